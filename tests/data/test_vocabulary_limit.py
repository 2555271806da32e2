"""A tokenizer with more tokens than its model costs the records that use them, and no more."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import BY_TEMPLATE, model_config
from test_conversations import GOOD, jsonl, write
from test_regenerate_command import local, run
from test_regenerate_command import settings as answer_settings

from drafttrain.commands.chat import unanswered
from drafttrain.commands.setup.talk import Talk
from drafttrain.commands.setup.target_and_drafter import _read_samples
from drafttrain.data.conversations import read_asked
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.skips import SkipReport
from drafttrain.decode.rows import check_room
from drafttrain.evaluation.measure import fitting
from drafttrain.target.model import Target, load_target

BEYOND = "<|beyond|>"
BAD = {"messages": [{"role": "user", "content": BEYOND}, GOOD["messages"][1]]}


@pytest.fixture(scope="module")
def folder(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokenizer has one token more than its embedding."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("target") / "tiny"
    shutil.copytree(tiny_target_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    fill = [f"<|fill{i}|>" for i in range(size - len(tokenizer))]
    tokenizer.add_tokens([*fill, BEYOND], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(model_config(folder), torch.float32, "cpu")


def test_a_record_with_a_token_beyond_the_model_is_skipped(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", BAD, GOOD)
    samples, report = _read_samples(jsonl(path), model_config(folder))
    assert [sample.index for sample in samples] == [1]
    ((reason, places),) = report.examples.items()
    assert reason.startswith("a token beyond the ")
    assert places[0].startswith(f"{path}:1 (token ")
    with pytest.raises(ValueError, match="1 x a token beyond the"):
        _read_samples(jsonl(write(tmp_path / "b.jsonl", BAD)), model_config(folder))


def test_a_prompt_with_a_token_beyond_the_model_is_not_answered(
    target: Target, tmp_path: Path
) -> None:
    asked, _ = read_asked(jsonl(write(tmp_path / "a.jsonl", BAD, GOOD)), "all")
    config = answer_settings(max_new_tokens=4)
    rows = run(tmp_path / "out.jsonl", asked, local(target, config), config)
    assert [row["index"] for row in rows] == [1]
    failed = json.loads((tmp_path / "out.failed.jsonl").read_text())
    assert failed["reason"].startswith("a token beyond the")
    assert failed["final"]


def test_a_prompt_to_decode_is_one_clear_line(target: Target) -> None:
    with pytest.raises(ValueError, match=r"tokens that tiny_test has, .* got token"):
        check_room(target, [[1], [2, target.spec.vocab_size]], 4)
    check_room(target, [[1]], 4)


@pytest.mark.usefixtures("stand_ins")
def test_a_prompt_to_evaluate_is_named_before_anything_is_decoded(target: Target) -> None:
    config: Any = SimpleNamespace(deepest=2, max_new_tokens=8, skip_long_prompts=False)
    for turns in ((f"Say {BEYOND}",), ("Hi", f"Say {BEYOND}")):
        prompts = [Prompt("good", "t", "t", ("Hi",)), Prompt("bad", "t", "t", turns)]
        with pytest.raises(ValueError, match=r"^eval\.prompts: bad: the prompt must hold tokens"):
            fitting(prompts, SkipReport(), target, BY_TEMPLATE, config, [])


@pytest.mark.usefixtures("stand_ins")
def test_a_prompt_of_chat_file_is_named_before_any_is_answered(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt("good", "", "", ("Hi",)), Prompt("bad", "", "", ("Hi", BEYOND))]
    monkeypatch.setattr(Talk, "stream", lambda talk, messages, row: talk.tokens(messages))
    how: Any = None
    talk = Talk(target, None, how, BY_TEMPLATE, 0, cut=True)
    settings: Any = SimpleNamespace(system=None, file="prompts.jsonl")
    with pytest.raises(ValueError, match=r"^chat\.file: bad: the prompt must hold tokens"):
        next(unanswered(talk, prompts, settings))
