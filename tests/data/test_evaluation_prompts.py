"""Evaluation prompts: what ships, what a user's file may hold, and overlap with training text."""

import errno
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from drafttrain.data.evaluation_prompts import (
    Prompt,
    load_prompts,
    overlap_line,
    overlap_path,
    overlap_record,
    read_prompts,
)
from drafttrain.data.skips import NothingUsable
from drafttrain.data.suites import BUILTIN_PROMPTS, PromptSource
from drafttrain.runtime.disk import sha256_of


def written(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_eight_tasks_of_ten_prompts_ship():
    prompts, report = read_prompts(BUILTIN_PROMPTS, None)
    assert Counter(prompt.task for prompt in prompts) == dict.fromkeys(
        (
            "math",
            "coding",
            "shell",
            "task_dialogue",
            "chitchat",
            "story",
            "literature",
            "instruction",
        ),
        10,
    )
    assert report.num_skipped == 0
    assert len({prompt.turns for prompt in prompts}) == 80
    two_turns = Counter(prompt.task for prompt in prompts if len(prompt.turns) == 2)
    assert set(two_turns) == {"task_dialogue", "chitchat"}


def test_a_limit_keeps_the_first_prompts_of_each_task():
    prompts, _ = read_prompts(BUILTIN_PROMPTS, 2)
    assert len(prompts) == 16
    assert [prompt.id for prompt in prompts[:3]] == [
        "tiny_math_01",
        "tiny_math_02",
        "tiny_coding_01",
    ]


def test_unusable_lines_are_counted_and_named_by_line(tmp_path: Path):
    path = written(
        tmp_path,
        '{"id": 1, "task": "a", "turns": ["one", "two"]}',
        '{"id": 2, "task": "a", "turns": ["cut off',
        "",
        '{"id": 3, "task": "a", "turns": []}',
        '{"id": 4, "task": "a", "turns": ["fine", "  "]}',
        '{"id": 5, "turns": ["x"]}',
        '{"task": "a", "turns": ["x"]}',
        '{"id": 7, "task": "a"}',
        '{"id": 8, "task": "a", "turns": "x"}',
        '{"id": 9, "task": "a", "turns": [3]}',
        '{"id": 1, "task": "a", "turns": ["again"]}',
        '["list"]',
    )
    prompts, report = read_prompts(path, None)
    assert prompts == [Prompt("1", "a", "a", ("one", "two"))]
    assert report.counts == {
        "not JSON": 1,
        "an empty prompt": 2,
        "without task": 1,
        "without id": 1,
        "without turns": 1,
        "turns are not a list": 1,
        "content is not a string": 1,
        "an id seen before": 1,
        "not an object": 1,
    }
    assert report.examples["an empty prompt"] == [f"{path}:4 (no turns)", f"{path}:5 (turn 2)"]
    assert report.examples["an id seen before"] == [f"{path}:11 ('1' is at {path}:1)"]
    assert report.lines()[0] == "skipped 10 of 11 prompts:"
    error = NothingUsable("x must hold prompts, got none", report, "correct what is named here")
    assert "\n" not in str(error)
    assert str(error).startswith("x must hold prompts, got none (skipped 10 of 11 prompts: ")
    assert str(error).endswith("); correct what is named here")


def test_ids_that_no_report_could_print_are_counted_and_named(tmp_path: Path):
    ids = ['"\\ud800"', '["a"]', '"a\\nb"', f'"{"a" * 999}"', "true", "1" + "0" * 99]
    path = written(
        tmp_path, *(f'{{"id": {text}, "task": "a", "turns": ["x"]}}' for text in [*ids, '"fine"'])
    )
    prompts, report = read_prompts(path, None)
    assert [prompt.id for prompt in prompts] == ["1" + "0" * 99, "fine"]
    assert report.counts == {
        "not JSON": 1,  # a lone surrogate
        "id is neither text nor a number": 2,
        "id is no line of at most 200 characters": 2,
    }
    assert report.examples["not JSON"][0].startswith(f"{path}:1 ")


@pytest.mark.parametrize("key", ["task", "category"])
def test_no_task_is_named_as_reports_call_all_tasks(key: str, tmp_path: Path):
    names = {"task": "a", "category": "b", key: "all"}
    lines = [json.dumps({"id": n, "turns": ["x"], **names}) for n in (1, 2)]
    path = written(tmp_path, lines[0], lines[1].replace('"all"', '"overall"'))
    prompts, report = load_prompts(PromptSource(path=str(path), limit=None, task_by=key))
    assert [prompt.id for prompt in prompts] == ["2"]
    assert report.counts == {f'{key} is "all", as reports call all tasks together': 1}
    other = PromptSource(
        path=str(path), limit=None, task_by="category" if key == "task" else "task"
    )
    assert len(load_prompts(other)[0]) == 2


def test_conversations_that_training_takes_are_prompts(tmp_path: Path):
    parts = '[{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]'
    path = written(
        tmp_path,
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"},'
        f' {{"role": "user", "content": {parts}}}]}}',
        '{"id": "a", "task": "math", "conversations": [{"from": "human", "value": "2 + 2?"}]}',
        '{"messages": [{"role": "system", "content": "Be brief"}]}',
    )
    prompts, report = read_prompts(path, None)
    assert prompts == [
        Prompt("0", "conversations", "conversations", ("Hi", "Why?")),
        Prompt("a", "math", "math", ("2 + 2?",)),
    ]
    assert report.counts == {"a system turn, which an evaluation prompt cannot have": 1}


def test_a_file_without_prompts_is_an_error_that_says_what_to_do(tmp_path: Path):
    with pytest.raises(ValueError, match=r"eval\.prompts must name a file .* got nowhere\.jsonl"):
        read_prompts("nowhere.jsonl", None)
    path = written(tmp_path, '{"task": "a", "turns": ["x"]}')
    with pytest.raises(ValueError, match=re.escape(f"1 x without id: {path}:1")):
        read_prompts(path, None)


def test_a_file_that_cannot_be_read_is_named_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(tmp_path, '{"id": 1, "task": "a", "turns": ["x"]}')

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"^eval\.prompts must name files .*: Permission denied; "):
        read_prompts(path, None)


def test_the_shipped_record_is_of_the_shipped_prompts():
    record = overlap_record(BUILTIN_PROMPTS)
    assert record is not None
    assert record["num_prompts"] == 80
    assert record["num_equal_prompts"] == 0
    assert record["shared_ngram_share"] < 0.05
    assert "0 of 80 prompts equal a first prompt" in overlap_line(record)


def test_a_record_of_other_prompts_is_refused(tmp_path: Path):
    path = written(tmp_path, '{"id": 1, "task": "a", "turns": ["x"]}')
    assert overlap_record(path) is None
    assert "not known" in overlap_line(None)
    counts = ("num_prompts", "num_equal_prompts", "num_ngrams", "num_shared_ngrams", "ngram_words")
    record = {"prompts_sha256": sha256_of(path), "shared_ngram_share": None}
    record |= dict.fromkeys(counts, 0)
    overlap_path(path).write_text(json.dumps(record))
    assert overlap_record(path) == record
    written(tmp_path, '{"id": 1, "task": "a", "turns": ["y"]}')
    with pytest.raises(ValueError, match="got one of a file with other content"):
        overlap_record(path)
