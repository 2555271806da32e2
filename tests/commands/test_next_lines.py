"""Whoever follows the lines `next:` goes from training on two ranks to files that engines load."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drafttrain.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_pictures")]

PYTHON = [sys.executable, "-m", "drafttrain"]
# Sizes alone: a user waits for the default ones.
SHORT = ["eval.prompts_per_task=1", "eval.max_new_tokens=6", "hardware.dtype=float32"]
SIZES = {
    "evaluate": [*SHORT, "eval.resamples=100", "eval.lossless_prompts=1"],
    "tune": [*SHORT, *("tune.rounds=1", "tune.depths=[1,2]", "tune.batch_sizes=[1]")],
    "export": [],
}


def followed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """Run a command of a line `next:` in this process; return its name and the commands it names.

    A line names one command, or two: "A, or B".
    """
    command, *arguments = shlex.split(line.split("python -m drafttrain ")[1])
    assert main([command, *arguments, *SIZES[command]]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    return command, said.partition("next: ")[2].split(", or ")


def test_every_suggested_command_runs_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    rows = [
        {"messages": [{"role": role, "content": f"{role} {n}"} for role in ("user", "assistant")]}
        for n in range(16)
    ]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = ["train", "run.name=two", "hardware.ranks=2", "hardware=cpu", "hardware.threads=1"]
    train += ["drafter=eagle", "data=jsonl", "data.path=data.jsonl", "data.holdout=2"]
    train += ["trainer.max_steps=4", "trainer.tokens_per_step=128", "trainer.validate_every=4"]
    train += ["trainer.validation_prompts=2", "trainer.validation_tokens=4"]
    done = subprocess.run([*PYTHON, *train], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    following, ran = [done.stdout.partition("next: ")[2]], []
    while following != [""] and len(ran) < 5:
        assert "run.dir=outputs/two" in following[-1]
        command, following = followed(following[-1], capsys)
        ran.append(command)
    # Four steps of training pay nowhere: then `tune` suggests no export.
    assert ran[:2] == ["evaluate", "tune"]
    assert ran[2:] in (["evaluate"], ["export"])
    if ran[2:] == ["evaluate"]:
        assert main(["export", "run.dir=outputs/two"]) == 0
        assert "warning: `tune` chose not to speculate" in capsys.readouterr().out
    assert Path("outputs/two/export/model.safetensors").is_file()
