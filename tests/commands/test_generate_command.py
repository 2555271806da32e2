"""`generate` prepares each prompt once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafttrain.__main__ import main
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.records import Message

QUICK = ["drafter=ngram", "model=tiny", "hardware.threads=1", "hardware.dtype=float32"]


def test_a_prompt_is_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tokenised to be checked, before anything was decoded, and then again to be decoded."""
    asked: list[str] = []

    def counted(messages: Sequence[Message], *about: Any) -> list[int]:
        asked.append(messages[-1].content)
        return prompt_tokens(messages, *about)

    monkeypatch.setattr("drafttrain.commands.setup.talk.prompt_tokens", counted)
    file = tmp_path / "prompts.txt"
    call = ["generate", *QUICK, f"chat.file={file}", f"chat.out={tmp_path / 'answers.jsonl'}"]
    file.write_text("Hi\nHello\n")
    assert main([*call, "chat.max_new_tokens=2"]) == 0
    assert asked == ["Hi", "Hello"]
    # What the file holds answers to is not tokenised at all.
    file.write_text("Hi\nHello\nAgain\n")
    assert main([*call, "chat.max_new_tokens=2"]) == 0
    assert asked == ["Hi", "Hello", "Again"]
