"""Rows of instructions, speakers of any name, and text beside the turns: nothing asked is lost."""

from pathlib import Path
from typing import Any

import pytest
from test_conversations import GOOD, hub, jsonl, write

from drafttrain.data.conversations import GREETING, Conversation, read, read_asked
from drafttrain.data.evaluation_prompts import read_prompts
from drafttrain.data.records import ROLES, TOKENS, UNKNOWN_ROLE, Message, Unusable, messages_of
from drafttrain.data.skips import NothingUsable

ASKED = {"role": "user", "content": "Sum\n1 2"}
SUM = (Message("user", "Sum\n1 2"), Message("assistant", "3"))
BRIEF = Message("system", "Be brief.")
QUESTION, ANSWER = GOOD["messages"]
ROWS: list[tuple[dict[str, Any], tuple[Message, ...]]] = [
    ({"prompt": "Sum", "input": "1 2", "completion": "3"}, SUM),
    ({"instruction": "Sum", "input": "1 2", "output": "3", "text": "Below is ..."}, SUM),
    ({"instruction": "Sum", "context": "1 2", "response": "3"}, SUM),
    ({"instruction": "Sum\n1 2", "input": "", "output": "3", "history": []}, SUM),
    ({"question": "Sum\n1 2", "answer": "3", "system_prompt": "Be brief."}, (BRIEF, *SUM)),
    ({"prompt": [ASKED], "completion": [{"role": "assistant", "content": "3"}]}, SUM),
    ({"prompt": [ASKED], "completion": "3"}, SUM),
]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": name, "content": name + "'s"} for name in texts]


def asked(path: str, which: str = "all", **changes: Any) -> list[tuple[Message, ...]]:
    return [one.messages for one in read_asked(jsonl(path, **changes), which)[0]]


@pytest.mark.parametrize(("row", "messages"), ROWS)
def test_a_row_of_instructions_is_a_conversation_with_all_that_is_asked(
    row: dict[str, Any], messages: tuple[Message, ...], tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", row)
    assert read(jsonl(path))[0] == [Conversation(messages, 0, f"{path}:1")]
    assert asked(path) == [messages[:-1]]


def test_an_input_of_a_data_set_is_part_of_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", {**ROWS[1][0], "system": "Be brief."})
    here: dict[str, Any] = {"repo": str(folder), "column": None, "response_column": "output"}
    found, _ = read(hub(**here, prompt_column="instruction"))
    assert [one.messages for one in found] == [(BRIEF, *SUM)]
    found, _ = read(hub(**here, prompt_column="input"))
    assert found[0].messages[1:] == (Message("user", "1 2"), Message("assistant", "3"))


LOST: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Sum", "completion": "3", "history": [["Hi", "Yes"]]}, "a record with history"),
    ({"prompt": [ASKED], "input": "3 4", "completion": "3"}, "a record with input, which"),
    ({"prompt": "Sum", "input": [1, 2], "completion": "3"}, "content is not a string"),
    ({"messages": [vars(BRIEF), QUESTION, ANSWER], "system": "Be long."}, "a record with system,"),
    ({"instruction": "In French.", "question": "Sum", "answer": "3"}, "a record with question,"),
    ({"instruction": "In French.", "prompt": "Sum", "answer": "3"}, "a record with instruction,"),
    ({"prompt": "Sum", "question": "1 2", "answer": "3"}, "a record with question, which"),
    ({"question": "Sum", "system": "A", "system_prompt": "B", "answer": "3"}, "a record with sys"),
    ({"question": "Sum", "choices": ["1", "2"], "answer": "1"}, "a record with choices, which"),
    ({"question": "Sum", "options": {"A": "1"}, "answer": "A"}, "a record with options, which"),
    ({**GOOD, "image": "a.jpg"}, "a record with image, which"),
    ({"prompt": "Sum", "images": [{"path": "a.jpg"}], "answer": "3"}, "a record with images, wh"),
    ({**GOOD, "conversations": [QUESTION, {"role": "gpt", "content": "No."}]}, "a record with con"),
    *(
        ({**GOOD, key: "In this story the sky is green."}, f"a record with {key}, which")
        for key in ("context", "input", "instruction", "prompt", "question", "documents")
    ),
]


@pytest.mark.parametrize(("row", "reason"), LOST)
def test_what_cannot_be_made_part_of_the_question_is_skipped_and_said(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(NothingUsable, match=f"1 x {reason}"):
        read(jsonl(path))
    with pytest.raises(NothingUsable, match=f"1 x {reason}"):
        asked(path)


def test_a_system_prompt_beside_the_turns_is_the_first_of_them(tmp_path: Path) -> None:
    rows = [{**GOOD, "system": "Be brief."}, {"messages": [vars(BRIEF), *GOOD["messages"]]}]
    rows.append({**rows[1], "system": "Be brief."})
    found, _ = read(jsonl(write(tmp_path / "a.jsonl", *rows)))
    assert {one.messages[0] for one in found} == {BRIEF}
    assert {len(one.messages) for one in found} == {3}


def test_a_row_of_instructions_is_a_prompt_to_evaluate(tmp_path: Path) -> None:
    found, _ = read_prompts(
        write(tmp_path / "a.jsonl", ROWS[0][0], ROWS[4][0] | {"context": "x"}), 9
    )
    assert [prompt.turns for prompt in found] == [("Sum\n1 2",)]  # the other has a system turn


def test_what_the_assistant_says_before_the_user_is_left_out_and_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"messages": turns("assistant", "user", "assistant")},
        {"messages": turns("system", "assistant", "assistant", "user", "assistant")},
        {"messages": turns("assistant")},
        GOOD,
    )
    found, report = read(jsonl(path))
    assert [[turn.role for turn in one.messages] for one in found] == [
        *(["user", "assistant"], ["system", "user", "assistant"], ["user", "assistant"]),
    ]
    assert report.notes == {GREETING: 2}
    assert report.counts == {"no assistant turn": 1}
    assert asked(path)[0] == asked(path, "last")[0] == (Message("user", "user's"),)


def test_the_names_of_speakers_can_be_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": turns("Alice", "vicuna")})
    with pytest.raises(NothingUsable, match=r"data\.roles=.*turn 1: 'Alice'"):
        read(jsonl(path))
    known = {"Alice": "user", "vicuna": "assistant"}
    found, _ = read(jsonl(path, roles=known))
    assert [turn.role for turn in found[0].messages] == ["user", "assistant"]
    assert asked(path, roles=known) == [(Message("user", "Alice's"),)]
    with pytest.raises(ValueError, match=r"data\.roles must map .* got vicuna=bot"):
        jsonl(path, roles={"vicuna": "bot"})
    assert "data.roles" in UNKNOWN_ROLE


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": [1, 2], "labels": [-100, 2]}, TOKENS),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "messages": None}, TOKENS),
        ({"question": "Hi", "reasoning": "Hm.", "answer": "Yes."}, "a record with reasoning"),
        ({**GOOD, "documents": [{"text": "x"}]}, "a record with documents"),
    ],
)
def test_what_would_be_trained_without_a_part_is_skipped_by_name(
    record: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    _, report = read(jsonl(write(tmp_path / "a.jsonl", GOOD, record)))
    (found,) = report.counts
    assert found.startswith(reason)


def test_rows_of_tokens_are_named_without_a_template_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "Hi"}, {"input_ids": [1], "labels": [1]})
    _, report = read(jsonl(path, template="none"))
    assert list(report.counts) == [TOKENS]
    both = {**GOOD, "input_ids": [1], "labels": [1]}  # a data set that keeps both
    assert len(read(jsonl(write(tmp_path / "b.jsonl", both)))[0]) == 1


def test_old_reasoning_does_not_keep_a_question_from_being_asked_again(tmp_path: Path) -> None:
    row = {"question": "Hi", "reasoning": "Hm.", "answer": "Yes."}
    assert asked(write(tmp_path / "a.jsonl", row)) == [(Message("user", "Hi"),)]


@pytest.mark.parametrize("key", ["train", "training", "loss"])
def test_an_answer_that_is_marked_untrained_is_context(key: str) -> None:
    turns = [QUESTION, {**ANSWER, key: False}, QUESTION, {**ANSWER, key: True}]
    assert [turn.trained for turn in messages_of({"messages": turns})] == [True, False, True, True]


@pytest.mark.parametrize("key", ["reasoning", "cot", "thought", "thoughts", "reasoning_details"])
def test_reasoning_beside_an_answer_is_skipped_by_name(key: str) -> None:
    for row in (
        {"question": "Hi", key: "First, ...", "answer": "Yes."},
        {**GOOD, key: [{"text": "First, ..."}]},
        {"messages": [QUESTION, {**ANSWER, key: "First, ..."}]},
    ):
        with pytest.raises(Unusable, match=f"a (record|turn) with {key}, which is not trained"):
            messages_of(row)


@pytest.mark.parametrize(
    "row",
    [
        {**GOOD, "prompt": "Hi", "input": " Hi\n", "system": ""},  # as UltraChat repeats it
        {**GOOD, "conversations": [{"from": "human", "value": "Hi"}], "reasoning": "on"},
        {**GOOD, "tools": "[]", "documents": {}, "images": [], "cot": None, "thinking": True},
        {"prompt": "Hi", "question": "Hi", "instruction": "", "input": "  ", "answer": "Yes."},
        {"instruction": "", "input": "Hi", "output": "Yes."},
    ],
)
def test_what_a_turn_repeats_or_what_is_no_text_is_no_loss(row: dict[str, Any]) -> None:
    assert messages_of(row) == (Message("user", "Hi"), Message("assistant", "Yes."))


@pytest.mark.parametrize(
    "mark",
    [
        *({"weight": value} for value in (0, 0.0, "0", False)),
        *({"train": value} for value in (0, False, "false", "False")),
        *({"loss": value} for value in (0, False)),
        *({"masked": value} for value in (1, True, "true")),
    ],
)
def test_every_mark_of_an_untrained_turn_counts(mark: dict[str, Any]) -> None:
    turns = [QUESTION, {**ANSWER, **mark}, QUESTION, ANSWER]
    assert [turn.trained for turn in messages_of({"messages": turns})] == [True, False, True, True]
    (key, value), *_ = mark.items()
    unknown, other = {**ANSWER, key: "half"}, {**ANSWER, key: not value or value == "0"}
    with pytest.raises(Unusable, match=f"a {key} that is neither 0 nor 1"):
        messages_of({"messages": [QUESTION, unknown]})
    if not isinstance(value, str):
        assert messages_of({"messages": [QUESTION, other]})[1].trained


def test_a_bad_answer_of_kto_is_not_trained() -> None:
    row = {"prompt": "Hi", "completion": "Yes."}
    assert messages_of({**row, "label": True}) == messages_of({**row, "label": 0})
    with pytest.raises(Unusable, match="marked as bad"):
        messages_of({**row, "label": False})


def test_speakers_of_other_names_ask_evaluation_prompts_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": turns("Alice", "vicuna")})
    known = {**ROLES, "Alice": "user", "vicuna": "assistant"}
    assert [one.turns for one in read_prompts(path, 9, known)[0]] == [("Alice's",)]
