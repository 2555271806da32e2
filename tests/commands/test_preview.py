"""data.preview shows what would be trained, and nothing is trained."""

import json
from pathlib import Path

import pytest

from drafttrain.__main__ import main


@pytest.mark.parametrize(("command", "out"), [("train", "run.dir"), ("capture", "store.dir")])
def test_a_preview_marks_trained_tokens_and_ends(
    command: str, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Context \x1b[31m", "weight": 0},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "It is green."},
    ]
    data = tmp_path / "a.jsonl"
    data.write_text((json.dumps({"messages": turns}) + "\n") * 5 + "[]\n")
    settings = ["data=jsonl", f"data.path={data}", "data.preview=3", f"{out}={tmp_path / 'out'}"]
    assert main([command, *settings]) == 0
    shown = capsys.readouterr().out
    assert shown.count("«It is green.<|end|>»") == 3
    assert shown.count("»") == 3 + 1  # and its explanation at the end
    assert "Context \\x1b[31m<|end|>" in shown
    assert "5 conversations: " in shown
    assert "tokens are trained (" in shown
    assert "skipped 1 of 6 conversations" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("regenerate", "data.path=a.jsonl"),
        ("plan", "drafter=eagle3"),
        ("evaluate", "drafter=ngram"),
        ("generate", "drafter=ngram"),
    ],
)
def test_commands_that_train_on_no_records_refuse_a_preview(
    command: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, setting, "data.preview=2"]) == 2
    assert f"data.preview must be 0 for {command}, which trains on" in capsys.readouterr().err
