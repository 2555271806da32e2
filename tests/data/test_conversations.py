"""Every spelling of conversations is read; what cannot be used is counted and named by line."""

import gzip
import json
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import TOLD

from drafttrain.__main__ import main
from drafttrain.data.conversations import (
    Conversation,
    HubConfig,
    JsonlConfig,
    PlainText,
    SelfgenConfig,
    read,
)
from drafttrain.data.files import file_records
from drafttrain.data.records import UNKNOWN_ROLE, Message, Recorded, Unusable
from drafttrain.data.skips import NothingUsable, SkipReport

COMMON = {"name": "test", "max_length": 64, "holdout": 0, "template": "chat", "seed": 0} | TOLD
GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}


def jsonl(path: Any, **changes: Any) -> JsonlConfig:
    return JsonlConfig(**{**COMMON, "path": path, "limit": None, **changes})


def hub(**changes: Any) -> HubConfig:
    settings = {
        "repo": "someone/something",
        "revision": None,
        "subset": None,
        "files": None,
        "split": "train",
        "streaming": False,
        "column": "messages",
        "prompt_column": None,
        "response_column": None,
        "limit": None,
    }
    return HubConfig(**{**COMMON, **settings, **changes})


def selfgen(**changes: Any) -> SelfgenConfig:
    settings = {
        "num_conversations": 4,
        "batch_size": 2,
        "user_temperature": 1.0,
        "answer_temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_user_tokens": 4,
        "max_answer_tokens": 4,
        "cache_dir": "outputs",
    }
    return SelfgenConfig(**{**COMMON, **settings, **changes})


def write(file: Path, *records: Any) -> str:
    """Write records one a line; bytes go in as they are."""
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in records]
    content = b"\n".join(lines) + b"\n"
    file.write_bytes(gzip.compress(content) if file.name.endswith(".gz") else content)
    return str(file)


def test_every_spelling_gives_the_same_conversation(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes."), ("user", "Why?")]
    plain = [{"role": role, "content": content} for role, content in turns]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    share = [{"from": names[role], "value": content} for role, content in turns]
    columns = {"role": [role for role, _ in turns], "content": [text for _, text in turns]}
    records = [
        {"messages": plain},
        {"conversations": plain},
        {"conversations": share},
        {"messages": None, "conversations": share, "id": 7},
        {"messages": [], "conversations": share},
        {
            "messages": [
                {**turn, "tool_calls": [], "function_call": None, "reasoning_content": " \n"}
                for turn in plain
            ],
            "tools": "[]",
            "functions": None,
        },
        {"conversations": [{**turn, "role": None, "content": None} for turn in share]},
        {"messages": columns},
    ]
    path = write(tmp_path / "a.jsonl", *records)
    conversations, report = read(jsonl(path))
    expected = tuple(Message(role, content) for role, content in turns)
    assert conversations == [
        Conversation(expected, index, f"{path}:{index + 1}") for index in range(len(records))
    ]
    assert report == SkipReport(len(records))
    assert report.lines() == []


BROKEN: list[tuple[Any, str, str]] = [
    (b'{"messages": [', "not JSON", "EOF while parsing a list"),
    (b'{"messages": "\xff"}', "not UTF-8", "byte 14"),
    (b"[" * 100_000, "not JSON", "recursion"),
    ([1], "not an object", "list"),
    ({"id": 1}, "without messages, conversations, prompt, instruction or question", "has id"),
    ({"text": "x"}, "text without turns, which needs data.template=none", ""),
    ({"messages": "Hi"}, "turns are not a list", "str"),
    ({"messages": {"role": "user"}}, "turns are not a list", "dict"),
    ({"messages": {"role": ["user"], "content": []}}, "turns of unequal length", ""),
    ({"messages": []}, "empty conversation", ""),
    ({"messages": ["Hi"]}, "a turn is not an object", "turn 1: str"),
    ({"messages": [{"role": "tool", "content": "x"}]}, UNKNOWN_ROLE, "turn 1: 'tool'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, UNKNOWN_ROLE, "turn 1"),
    ({"messages": [{"content": "x"}]}, UNKNOWN_ROLE, "turn 1: 'None'"),
    ({"messages": [{"role": "user", "content": 3}]}, "content is not a string", "turn 1: int"),
    ({"messages": [{"role": "user"}]}, "content is not a string", "turn 1: NoneType"),
    ({"messages": [{"role": "user", "content": " \n"}]}, "an empty turn", "turn 1"),
    (
        {"messages": [GOOD["messages"][1], GOOD["messages"][0]]},
        "no assistant turn",
        "",
    ),
    (
        {"messages": [*GOOD["messages"], {"role": "system", "content": "x"}]},
        "user and assistant do not alternate",
        "turn 3: system instead of user",
    ),
    (
        {"messages": [{"role": "system", "content": "x"}, *[GOOD["messages"][0]] * 2]},
        "user and assistant do not alternate",
        "turn 3: user instead of assistant",
    ),
    ({"messages": GOOD["messages"][:1]}, "no assistant turn", ""),
    *(
        (
            {"messages": [GOOD["messages"][0], {**GOOD["messages"][1], key: value}]},
            f"a turn with {key}, which is not trained",
            "turn 2",
        )
        for key, value in (
            ("tool_calls", [{"function": {"name": "look", "arguments": "{}"}}]),
            ("function_call", {"name": "look", "arguments": "{}"}),
            ("reasoning_content", "Hm."),
            ("reasoning", "Hm."),
            ("thinking", "Hm."),
        )
    ),
    ({**GOOD, "tools": [{"name": "look"}]}, "a record with tools, which is not trained", ""),
    ({**GOOD, "functions": "[{}]"}, "a record with functions, which is not trained", ""),
    (
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "not JSON",
        "hex escape",
    ),
]


@pytest.mark.parametrize(("record", "reason", "detail"), BROKEN)
def test_a_broken_line_is_counted_and_named(
    tmp_path: Path, record: Any, reason: str, detail: str
) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, record, b"", GOOD)
    conversations, report = read(jsonl(path))
    assert [(item.index, item.source) for item in conversations] == [
        (0, f"{path}:1"),
        (1, f"{path}:4"),
    ]
    assert report.num_read == 3
    assert report.counts == {reason: 1}
    (place,) = report.examples[reason]
    assert place.startswith(f"{path}:2")
    assert detail in place


def test_the_report_names_the_first_places_of_each_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, *[b"x"] * 5, {"messages": []})
    _, report = read(jsonl(path))
    first, second, third = report.lines()
    assert first == "skipped 6 of 7 conversations:"
    assert second.startswith(f"  5 x not JSON: {path}:2 (expected value at column 1)")
    assert f"{path}:4" in second
    assert f"{path}:5" not in second
    assert second.endswith(", ...")
    assert third == f"  1 x empty conversation: {path}:7"
    json.dumps(report.to_dict())
    later = SkipReport(1)
    later.skip("too long", "b")
    assert (report + later).counts == {"not JSON": 5, "empty conversation": 1, "too long": 1}
    assert (report + later).num_read == 7


def test_an_unusable_file_is_an_error_that_prints_the_report(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"x", {"messages": []})
    with pytest.raises(NothingUsable, match="must hold usable conversations") as error:
        read(jsonl(path))
    assert f"1 x empty conversation: {path}:2" in str(error.value)
    with pytest.raises(NothingUsable, match="got none; give it some records"):
        read(jsonl(write(tmp_path / "empty.jsonl")))


def test_several_files_compressed_ones_and_lists_are_read_in_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", GOOD)
    second = write(tmp_path / "b.jsonl.gz", GOOD, GOOD)
    third = tmp_path / "c.json"
    third.write_text(json.dumps([GOOD, {"messages": []}]))
    (tmp_path / "README.md").write_text("not data")
    expected = [f"{first}:1", f"{second}:1", f"{second}:2", f"{third}[0]"]
    for path in (str(tmp_path), [first, second, str(third)], str(tmp_path / "?.json*")):
        conversations, report = read(jsonl(path))
        assert [item.source for item in conversations] == expected
        assert report.examples == {"empty conversation": [f"{third}[1]"]}
    conversations, report = read(jsonl(str(tmp_path), limit=2))
    assert (len(conversations), report.num_read) == (2, 2)


def test_content_may_come_in_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    told = {"messages": [{"role": "user", "content": parts}, GOOD["messages"][1]]}
    seen = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    conversations, report = read(jsonl(write(tmp_path / "a.jsonl", told, seen)))
    assert conversations[0].messages == tuple(Message(**turn) for turn in GOOD["messages"])
    assert report.counts == {"content with parts that are no text": 1}


def test_a_record_without_end_is_passed_over_not_held(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(json.dumps(GOOD).encode() + b"\n")
        for _ in range(40):
            stream.write(b"a" * (1 << 20))
        stream.write(b"\n" + json.dumps(GOOD).encode() + b"\n")
    (lone := tmp_path / "b.json").write_bytes(b'["' + b"a" * (17 << 20))
    tracemalloc.start()
    conversations, report = read(jsonl([str(file), str(lone)]))
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()
    assert [item.source for item in conversations] == [f"{file}:1", f"{file}:3"]
    (unclosed,) = report.examples.pop(
        "a record of more than 16 MB, or not JSON, and nothing after it was read"
    )
    assert unclosed.startswith(f"{lone}[0] (Unterminated string")
    assert report.examples == {"a record of more than 16 MB": [f"{file}:2"]}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_record_above_the_limit_costs_itself_alone(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    good = json.dumps(GOOD)
    long = json.dumps({**GOOD, "id": "a" * (17 << 20)})
    most = json.dumps({**GOOD, "id": "a" * (8 << 20)})
    records = [good, long, most, *[good] * 2000]
    file.write_text("\n".join(records) if name == "a.jsonl" else f"[{','.join(records)}]")
    began = time.process_time()
    conversations, report = read(jsonl(str(file)))
    assert time.process_time() - began < 5, "the long ones slow down those after them"
    assert len(conversations) == 2002
    assert report.counts == {"a record of more than 16 MB": 1}


@pytest.mark.parametrize(
    ("text", "num_usable", "places"),
    [
        ("[GOOD,GOOD][GOOD]", 2, {"text after the json list, which was not read": "[2]"}),
        ("[]GOOD", 0, {"text after the json list, which was not read": "[0]"}),
        ("[GOOD,GOOD] \n", 2, {}),
        (
            "[GOOD,{'a': 1},GOOD]",
            1,
            {"not JSON, and nothing after it was read": "[1] (Expecting property name"},
        ),
        (
            "[GOOD GOOD]",
            1,
            {"not JSON, and nothing after it was read": "[1] (no , or ] after this record)"},
        ),
        ("[GOOD,GOOD", 2, {"not JSON, and nothing after it was read": "[2] (no , or ]"}),
        ('[GOOD,"\xff",GOOD,GOOD]', 3, {"not UTF-8": "[1] (byte 1)"}),
    ],
)
def test_what_is_not_read_of_a_list_is_said(
    text: str, num_usable: int, places: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text.encode("latin-1").replace(b"GOOD", json.dumps(GOOD).encode()))
    found = list(file_records(file))
    assert [record for _, record in found if not isinstance(record, Unusable)] == [
        GOOD
    ] * num_usable
    told = {r.reason: f"{where} ({r.detail})" for where, r in found if isinstance(r, Unusable)}
    assert told.keys() == places.keys()
    for reason, place in places.items():
        assert told[reason].startswith(f"{file}{place}")


def test_a_list_is_read_a_record_at_a_time_up_to_what_is_wrong(tmp_path: Path) -> None:
    good = json.dumps(GOOD)
    for text, places in (
        (f"[{good},{good}]", 2),
        (f" [ {good} ,\n {good} ]\n", 2),
        ("[]", 0),
        (f"[{good} {good}]", 1),
        (f"[{good},", 1),
        (f"[{good}, {{]", 1),
        ("[" * 100_000, 0),
        ("{}", 0),
        ("", 0),
        (f"[{good}, " + "1" * 70_000 + "]", 1),
    ):
        file = tmp_path / "a.json"
        file.write_text(text)
        found = [record for _, record in file_records(file)]
        assert [record == GOOD for record in found[:places]] == [True] * places
        assert len(found) in (places, places + 1)
        if len(found) > places:
            assert isinstance(found[-1], Unusable) or text.endswith("1]") or text == "{}"


def test_recorded_answers_are_read_with_the_conversation(tmp_path: Path) -> None:
    row = {**GOOD, "answers": [{"tokens": [3, 4], "num_tokens": 2, "finished": True}]}
    cut = {**GOOD, "answers": [{"num_tokens": 2, "finished": False}]}
    selfgen_row = {**GOOD, "index": 0, "tokens": [1, 2, 3], "num_prompt_tokens": 2}
    other = {**GOOD, "answers": ["Yes", "No"]}
    bad = [{**row, "answers": [{"tokens": tokens, "finished": True}]} for tokens in ([-1], [], "a")]
    many = {**row, "answers": row["answers"] * 2}
    torn = {**selfgen_row, "num_prompt_tokens": 3}
    path = write(tmp_path / "a.jsonl", row, cut, selfgen_row, other, *bad, many, torn)
    conversations, report = read(jsonl(path))
    assert [item.recorded for item in conversations] == [
        (Recorded((3, 4), True),),
        (Recorded(None, False),),
        (Recorded((3,), False, (1, 2)),),
        (),
    ]
    assert report.num_skipped == 5


def test_a_damaged_archive_is_read_up_to_the_damage(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    records = [{**GOOD, "id": index * 7919 % 1000} for index in range(1000)]
    write(file, *records)
    file.write_bytes(file.read_bytes()[:-200])
    conversations, report = read(jsonl(str(file)))
    assert 0 < len(conversations) < 1000
    (places,) = report.examples.values()
    assert places[0].startswith(f"{file}:{len(conversations) + 1} ")
    assert "damaged" in next(iter(report.counts))


def test_plain_text_is_read_when_there_is_no_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "Once."}, GOOD, {"text": 3}, {"id": 1})
    texts, report = read(jsonl(path, template="none"))
    assert texts == [PlainText("Once.", 0, f"{path}:1")]
    assert report.counts == {
        'conversation where data.template=none takes {"text": ...}': 1,
        "content is not a string": 1,
        "without text": 1,
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jsonl(None), "data.path must name a file, a directory or a glob"),
        (lambda: jsonl([]), "data.path must name a file"),
        (lambda: jsonl([3]), "data.path must name a file"),
        (lambda: jsonl("a", limit=0), "data.limit must be at least 1"),
        (lambda: jsonl("a", template_date="today"), "data.template_date must be a day such as"),
        (lambda: jsonl("a", template_kwargs={"messages": []}), "data.template_kwargs must name"),
        (lambda: jsonl("a", template_kwargs={"a": "b" * 20_000}), "data.template_kwargs must hold"),
        (
            lambda: jsonl("a", template="llama"),
            "data.template must be one of chat, none, got",
        ),
        (lambda: jsonl("a", max_length=1), "data.max_length must be at least 2, got 1"),
        (lambda: jsonl("a", seed=-1), "data.seed must be at least 0, got -1"),
        (lambda: jsonl("a", holdout=-1), "data.holdout must be at least 0"),
        (lambda: hub(repo=None), "data.repo must name a data set"),
        (lambda: hub(column=None), "data.column must name the column"),
        (lambda: hub(prompt_column="a"), "data.column must name the column"),
        (lambda: hub(limit=0), "data.limit must be at least 1"),
        (lambda: selfgen(batch_size=0), "data.batch_size must be at least 1, got 0"),
        (lambda: selfgen(user_temperature=0.0), "data.user_temperature must be above 0"),
        (lambda: selfgen(answer_temperature=11.0), "data.answer_temperature must be 0 .* or in"),
        (lambda: selfgen(top_k=-1), "data.top_k must be at least 0"),
        (lambda: selfgen(top_p=0.0), "data.top_p must be in"),
        (
            lambda: selfgen(template="none").check_text(),
            "data.template must be chat for data=selfgen",
        ),
        (lambda: read(jsonl("/nowhere/a")), "data.path must name existing files, got /nowhere/a"),
    ],
)
def test_wrong_settings_say_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_directory_without_data_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.path must hold files named .jsonl.* with none"):
        read(jsonl(str(tmp_path)))


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("datasets_cache")
def test_a_data_set_is_read_from_a_directory_by_column(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    row = {"prompt": "Hi", "answer": "Yes.", "chat": GOOD["messages"], "text": "Once."}
    write(folder / "train.jsonl", row, {**row, "answer": "", "chat": GOOD["messages"][:1]})
    here = hub(repo=str(folder))
    expected = tuple(Message(turn["role"], turn["content"]) for turn in GOOD["messages"])
    for config in (
        replace(here, column="chat"),
        replace(here, column="chat", streaming=True),
        replace(here, column=None, prompt_column="prompt", response_column="answer"),
    ):
        conversations, report = read(config)
        assert conversations == [Conversation(expected, 0, f"{folder}:train[0]")]
        assert report.num_skipped == 1
    texts, _ = read(replace(here, column="text", template="none", limit=1))
    assert texts == [PlainText("Once.", 0, f"{folder}:train[0]")]
    with pytest.raises(ValueError, match=r"data.column: no column messages \(there are prompt, an"):
        read(here)
    write(folder / "train.jsonl", {**row, "tools": [{"name": "look"}]})
    with pytest.raises(NothingUsable, match="1 x a record with tools, which is not trained"):
        read(replace(here, column="chat"))
    with pytest.raises(ValueError, match=r"data.repo .* \(split test\): Unknown split \"test\""):
        read(replace(here, split="test"))


@pytest.mark.usefixtures("datasets_cache")
def test_a_data_set_saved_to_disk_is_read(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([GOOD])
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "dict"))
    for name in ("one", "dict"):
        conversations, _ = read(hub(repo=str(tmp_path / name)))
        assert len(conversations) == 1


def test_a_hub_that_cannot_be_reached_is_one_clear_error() -> None:
    with pytest.raises(
        ValueError, match=r"data\.repo must name a data set that can be read"
    ) as error:
        read(hub())
    assert "someone/something" in str(error.value)
    assert "use data=jsonl data.path=FILE, or data.repo=DIRECTORY" in str(error.value)


def test_bad_records_end_a_command_before_it_loads_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", b"x", {"messages": []}, GOOD["messages"])
    call = [f"data.path={path}", "data=jsonl", "hardware=cpu", "hardware.threads=1"]
    for command in (
        ["train", f"run.dir={tmp_path / 'run'}"],
        ["capture", f"store.dir={tmp_path}/s"],
    ):
        assert main([*command, *call]) == 2
        said = capsys.readouterr()
        assert "target: " not in said.out
        assert said.err.count("\n") == 1
        assert f"(skipped 3 of 3 conversations: 1 x not JSON: {path}:1" in said.err
