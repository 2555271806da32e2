"""What a shell offers while a command line is typed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import PYTHONPATH

from drafttrain.__main__ import OPTIONS, main
from drafttrain.config.completion import completed
from drafttrain.config.groups import choices


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("drafttrain tr", ["train"]),
        ("python -m drafttrain ex", ["export"]),
        ("drafttrain train dr", ["drafter=", "drafter."]),
        ("drafttrain train drafter=eag", ["drafter=eagle", "drafter=eagle3", "drafter=eagle3_1"]),
        ("drafttrain train -m drafter=eagle3,mlp", ["drafter=eagle3,mlp_speculator"]),
        ("drafttrain train trainer.max_s", ["trainer.max_steps="]),
        ("drafttrain train drafter=medusa drafter.num_h", ["drafter.num_heads="]),
        ("drafttrain train run.see", ["run.seed="]),
        ("drafttrain evaluate hardware.micro", ["hardware.micro_batch="]),
        ("drafttrain train --help dra", ["drafter"]),
        ("drafttrain train --mult", ["--multirun"]),
        ("drafttrain train +exp", ["+experiment="]),
        ("drafttrain train +experiment=sm", ["+experiment=smoke"]),
        ("drafttrain train nothing.", []),
    ],
)
def test_words_are_completed(line: str, offered: list[str]) -> None:
    assert completed(line, OPTIONS) == offered


def test_choices_of_ones_own_are_offered(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "mine.yaml").touch()
    for told in (f"--config-dir={tmp_path}", f"--config-dir {tmp_path}"):
        assert completed(f"drafttrain train {told} drafter=mi", OPTIONS) == ["drafter=mine"]
    assert "mine" not in choices("drafter")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-sc", f"install={shell}"]) == 0
    assert "--shell-completion" in capsys.readouterr().out
    assert main(["--shell-completion", "install=csh"]) == 2
    assert "must be install=SHELL, one of bash, zsh, fish" in capsys.readouterr().err


def test_bash_completes_what_is_typed() -> None:
    program = f"""
        eval "$({sys.executable} -m drafttrain -sc install=bash)"
        COMP_WORDS=({sys.executable} -m drafttrain train drafter = mlp) COMP_CWORD=6
        COMP_LINE="{sys.executable} -m drafttrain train drafter=mlp" COMP_POINT=${{#COMP_LINE}}
        _drafttrain {sys.executable}
        printf '[%s]' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "COMP_WORDBREAKS": " =:"},
        check=True,
        timeout=120,
    )
    assert done.stdout == "[mlp_speculator ]"
