"""A run's drafter meets a fine-tune of its target: the API, `chat` and `generate` name both."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import drafttrain
from drafttrain.__main__ import main

QUICK = ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32"]


@pytest.fixture(scope="module")
def run(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sibling")
    with (folder / "data.jsonl").open("w") as file:
        for number in range(8):
            turns = [{"role": "user", "content": f"Say {number}."}]
            turns += [{"role": "assistant", "content": f"It is {number}, I think."}]
            file.write(json.dumps({"messages": turns}) + "\n")
    told = ["train", f"run.dir={folder / 'run'}", f"model.path={tiny_target_dir}", *QUICK]
    told += ["data=jsonl", f"data.path={folder / 'data.jsonl'}", "data.holdout=2", "drafter=medusa"]
    told += ["trainer.tokens_per_step=32", "trainer.validation_prompts=1", "trainer.max_steps=1"]
    assert main([*told, "trainer.validation_tokens=4"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def sibling(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned") / "fine_tune"
    shutil.copytree(tiny_target_dir, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    weights[name] = weights[name] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def named(said: str, sibling: Path) -> bool:
    where = (
        rf"drafter trained for \S+( \(\S+\))?, measured on \S+ \({sibling}\): the weights differ"
    )
    return len(re.findall(where, said.replace("\n", " "))) == 1


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_command_that_answers_names_both_targets(
    command: str,
    run: Path,
    sibling: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    told = [command, f"run.dir={run}", f"model.path={sibling}", *QUICK, "eval.depth=2"]
    told += ["chat.prompt=Hello"] if command == "generate" else []
    capsys.readouterr()
    assert main([*told, "chat.max_new_tokens=4"]) == 0
    out, err = capsys.readouterr()
    assert "trained for" not in out  # which holds answers alone
    assert named(err, sibling)


def test_the_api_names_both_targets(
    run: Path, sibling: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = drafttrain.load_target(sibling, device="cpu", dtype="float32")
    capsys.readouterr()
    drafter = drafttrain.load_drafter(run, target)
    assert named(capsys.readouterr().out, sibling)
    told = {"prompts_per_task": 1, "max_new_tokens": 4, "depth": 2, "lossless_prompts": 0}
    report = drafttrain.evaluate(target, drafter, **told)
    assert any(named(note, sibling) for note in report.notes)
    assert f"({sibling.name})" in report.target
