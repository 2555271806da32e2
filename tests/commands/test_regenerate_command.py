"""Answers to prompts: whoever gives them, whenever it was interrupted, the file is the same."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import chat_server
import pytest
import yaml
from builders import BY_TEMPLATE
from paths import ROOT

from drafttrain import __main__ as cli
from drafttrain.config.groups import content_of
from drafttrain.core.chance import SeededChance
from drafttrain.data.chat import encode, prompt_tokens
from drafttrain.data.conversations import Conversation, JsonlConfig, read, read_asked
from drafttrain.data.records import Message
from drafttrain.decode.autoregressive import autoregressive_decode, autoregressive_queue
from drafttrain.runtime import lock
from drafttrain.runtime.signals import Stopped, StopRequest
from drafttrain.target.answers import endpoint as endpoint_module
from drafttrain.target.answers.answers_file import Answers, open_answers, regenerate
from drafttrain.target.answers.config import RegenerateSettings
from drafttrain.target.answers.dialogue import (
    AnsweredConversation,
    ChatTokens,
    Dialogue,
    Failure,
    Outcome,
    by_transformers,
)
from drafttrain.target.answers.endpoint import by_endpoint, served_by
from drafttrain.target.model import Target

CONF = ROOT / "conf"
ROOM = 256


@pytest.fixture
def endpoint() -> Iterator[chat_server.Endpoint]:
    with chat_server.serve() as server:
        yield server


def settings(**changes: Any) -> RegenerateSettings:
    values = yaml.safe_load((CONF / "regenerate.yaml").read_text())["regenerate"]
    return RegenerateSettings(**values | {"max_new_tokens": 12, "max_retries": 3} | changes)


def data(path: Path, **changes: Any) -> JsonlConfig:
    values = content_of("data", "jsonl")
    del values["_target_"]
    return JsonlConfig(**values | {"path": str(path)} | changes)


def written(folder: Path, records: Sequence[Any]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def talk(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]}


PROMPTS = [
    {"prompt": "one"},
    talk("two and more words", "old", "three"),
    {"turns": ["four", "five"]},
    {"prompt": "six, a longer prompt than any other"},
    {"prompt": "seven"},
]


def asked_of(
    folder: Path, records: Sequence[Any] = PROMPTS, turns: str = "all"
) -> list[Conversation]:
    return read_asked(data(written(folder, records)), turns)[0]


def run(
    out: Path, asked: Sequence[Conversation], backend: Any, config: RegenerateSettings
) -> list[dict[str, Any]]:
    with open_answers(out, config.identity()) as answers:
        regenerate(asked, answers, contextlib.nullcontext(backend), StopRequest(), show=False)
    return lines(out)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def local(target: Target, config: RegenerateSettings) -> Any:
    chat = ChatTokens(config, BY_TEMPLATE, target.tokenizer, target.spec, ROOM)
    return partial(by_transformers, target=target, chat=chat, decode=autoregressive_queue)


def remote(config: RegenerateSettings) -> Any:
    return partial(by_endpoint, config=config, template=BY_TEMPLATE, stop=StopRequest())


# Reading prompts


def test_an_answer_that_is_written_anew_may_hold_reasoning(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    asks = [{"role": "user", "content": text} for text in ("2 + 2?", "sure?")]
    file = written(tmp_path, [{"messages": [asks[0], thought, asks[1], thought]}])
    asked, _ = read_asked(data(file), "all")
    assert [turn.content for turn in asked[0].messages] == ["2 + 2?", "sure?"]
    with pytest.raises(ValueError, match="reasoning_content"):
        read_asked(data(file), "last")  # the first answer stays
    file = written(tmp_path, [{"messages": [asks[0], thought]}])
    assert len(read_asked(data(file), "last")[0]) == 1


def test_prompts_come_in_every_spelling_and_what_cannot_be_asked_is_named(tmp_path: Path) -> None:
    bad = [
        {"nothing": 1},
        {"messages": [{"role": "assistant", "content": "first"}]},
        {"prompt": "  "},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        {"prompt": "What is the time?", "tools": [{"name": "clock"}]},
    ]
    file = written(tmp_path, [*PROMPTS, *bad])
    asked, report = read_asked(data(file), "all")
    assert [[turn.content for turn in one.messages] for one in asked] == [
        ["one"],
        ["two and more words", "three"],
        ["four", "five"],
        ["six, a longer prompt than any other"],
        ["seven"],
    ]
    assert report.num_read == 10
    assert report.examples["no user turn"] == [f"{file}:7"]
    assert report.num_skipped == 5
    kept, report = read_asked(data(file), "last")
    assert [turn.content for turn in kept[1].messages] == ["two and more words", "old", "three"]
    assert report.counts["an earlier turn without the answer that is to be kept"] == 1
    with pytest.raises(ValueError, match=r"data\.template must be chat to regenerate, got none"):
        read_asked(data(file, template="none"), "all")


# Transformers


def test_each_turn_is_the_targets_own_answer_to_the_new_turns_before_it(
    target: Target, tmp_path: Path
) -> None:
    config = settings()
    rows = run(tmp_path / "out.jsonl", asked_of(tmp_path), local(target, config), config)
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        assert row["cut"] is None
        turns = [Message(**turn) for turn in row["messages"]]
        for place, answer in enumerate(row["answers"]):
            prompt = prompt_tokens(turns[: 2 * place + 1], target.tokenizer, BY_TEMPLATE)
            alone = autoregressive_decode(
                target,
                prompt,
                sampling=config.sampling,
                max_new_tokens=12,
                chance=SeededChance(0),
            )
            assert tuple(answer["tokens"]) == alone.tokens
            said = alone.tokens[:-1] if answer["finished"] else alone.tokens
            text = target.tokenizer.decode(list(said), skip_special_tokens=True)
            assert turns[2 * place + 1] == Message("assistant", text)
    assert sum(len(row["answers"]) for row in rows) == 7


def test_the_last_answer_alone_leaves_the_others_as_they_are(
    target: Target, tmp_path: Path
) -> None:
    config = settings(turns="last")
    asked = asked_of(tmp_path, PROMPTS[:2], "last")
    rows = run(tmp_path / "out.jsonl", asked, local(target, config), config)
    assert rows[1]["messages"][1]["content"] == "old"
    assert len(rows[1]["messages"]) == 4
    assert len(rows[1]["answers"]) == 1


def test_sampled_answers_depend_on_seed_and_conversation_alone(
    target: Target, tmp_path: Path
) -> None:
    asked = asked_of(tmp_path)
    files = []
    for name, batch_size, seed in (("a", 1, 3), ("b", 3, 3), ("c", 8, 3), ("d", 8, 4)):
        config = settings(temperature=1.0, batch_size=batch_size, seed=seed)
        out = tmp_path / f"{name}.jsonl"
        run(out, asked, local(target, config), config)
        files.append(out.read_bytes())
    assert files[0] == files[1] == files[2]
    assert files[3] != files[0]


def test_the_token_that_ends_an_answer_is_no_part_of_its_text(
    target: Target, tmp_path: Path
) -> None:
    letters = target.tokenizer("abc", add_special_tokens=False)["input_ids"]
    spec = replace(target.spec, eos_token_ids=(letters[2],))
    for tokens, text, finished in ((letters, "ab", True), (letters[:2], "ab", False)):
        dialogue = Dialogue(asked_of(tmp_path)[0])
        ChatTokens(settings(), BY_TEMPLATE, target.tokenizer, spec, ROOM).take(dialogue, tokens)
        assert isinstance(dialogue.outcome, AnsweredConversation)
        assert dialogue.outcome.messages[1]["content"] == text
        assert dialogue.outcome.answers[0]["finished"] is finished
        assert dialogue.outcome.answers[0]["tokens"] == tokens


def test_an_answer_with_a_token_beyond_the_vocabulary_is_counted_not_kept(
    target: Target, tmp_path: Path
) -> None:
    dialogue = Dialogue(asked_of(tmp_path)[0])
    tokens = [1, target.spec.vocab_size]
    chat = ChatTokens(settings(), BY_TEMPLATE, target.tokenizer, target.spec, ROOM)
    chat.take(dialogue, tokens)
    assert isinstance(dialogue.outcome, Failure)
    assert dialogue.outcome.reason.startswith("answered with a token beyond the ")


def test_the_file_is_read_as_conversations(target: Target, tmp_path: Path) -> None:
    config, out = settings(), tmp_path / "out.jsonl"
    rows = run(out, asked_of(tmp_path), local(target, config), config)
    conversations, report = read(data(out))
    assert report.num_skipped == 0
    assert len(conversations) == len(rows)
    samples, _ = encode(conversations, target.tokenizer, data(out))
    assert len(samples) == len(rows)


def test_what_does_not_fit_is_left_out_or_cut_and_said(target: Target, tmp_path: Path) -> None:
    config, out = settings(), tmp_path / "out.jsonl"
    records = [{"prompt": "x" * 300}, {"turns": ["short", "y" * 300]}, {"prompt": "fits"}]
    asked = asked_of(tmp_path, records)
    rows = run(out, asked, local(target, config), config)
    assert [row["index"] for row in rows] == [1, 2]
    assert len(rows[0]["messages"]) == 2
    assert rows[0]["cut"].startswith("prompt and answer do not fit 256 tokens (")
    with open_answers(out, config.identity()) as answers:
        assert answers.missing(asked) == []  # asking again would give the same
        said = answers.report(3).lines()
    assert said[0] == "skipped 1 of 3 conversations:"
    assert "1 x prompt and answer do not fit 256 tokens" in said[1]
    assert f"{tmp_path}/prompts.jsonl:1" in said[1]


# Resuming


def test_a_run_that_stops_anywhere_goes_on_to_the_same_file(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    asked = asked_of(tmp_path)
    config = settings(base_url=endpoint.url, backend="openai", concurrency=1)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(whole, asked, remote(config), config)
    content = whole.read_bytes()
    ends = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))]
    for stop in (*ends, ends[1] + 1, ends[2] - 1, ends[4] + 30):
        out.write_bytes(content[:stop])
        out.with_suffix(".settings.json").write_bytes(
            whole.with_suffix(".settings.json").read_bytes()
        )
        num_asked = len(endpoint.asked)
        assert run(out, asked, remote(config), config) == lines(whole)
        assert out.read_bytes() == content
        left = lines(whole)[sum(stop >= end for end in ends) - 1 :]
        assert len(endpoint.asked) - num_asked == sum(len(row["answers"]) for row in left)


def test_a_torn_line_does_not_spoil_the_one_after_it(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    config = settings(base_url=endpoint.url, backend="openai", concurrency=1)
    asked, out = asked_of(tmp_path), tmp_path / "out.jsonl"

    def stopping(missing: Sequence[Conversation]) -> Iterator[list[Outcome]]:
        for number, outcomes in enumerate(by_endpoint(missing, config, BY_TEMPLATE, StopRequest())):
            if number == 1:
                raise KeyboardInterrupt
            yield outcomes

    for done in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            run(out, asked, stopping, config)
        assert len(lines(out)) == done
        with out.open("a") as stream:
            stream.write('{"index": 4, "mess')  # what a kill leaves
    assert [row["index"] for row in run(out, asked, remote(config), config)] == [0, 1, 2, 3, 4]


def test_a_failure_that_a_killed_run_mended_is_not_reported(tmp_path: Path) -> None:
    config, out = settings(), tmp_path / "out.jsonl"
    asked = asked_of(tmp_path)[:1]
    failed, answered = Dialogue(asked[0]), Dialogue(asked[0])
    failed.stop("the endpoint failed", "", final=False)
    answered.take("yes", [3], 1, True)
    with open_answers(out, config.identity()) as answers:
        for dialogue in (failed, answered):
            assert dialogue.outcome is not None
            answers.add([dialogue.outcome])  # and killed before `finish`
    with open_answers(out, config.identity()) as answers:
        assert answers.missing(asked) == []
        assert answers.report(1).num_skipped == 0


def test_answers_need_not_fit_in_memory(tmp_path: Path) -> None:
    config, out = settings(), tmp_path / "out.jsonl"
    asked = asked_of(tmp_path, [{"prompt": str(number)} for number in range(30)])

    def backwards(missing: Sequence[Conversation]) -> Iterator[list[Outcome]]:
        for one in reversed(missing):
            dialogue = Dialogue(one)
            dialogue.take("yes", [*range(10**4, 2 * 10**4)], 10**4, True)
            assert dialogue.outcome is not None
            yield [dialogue.outcome]

    tracemalloc.start()
    with open_answers(out, config.identity()) as answers:
        regenerate(asked, answers, contextlib.nullcontext(backwards), StopRequest(), show=False)
    written = tracemalloc.get_traced_memory()[1]
    with open_answers(out, config.identity()) as answers:
        tracemalloc.reset_peak()
        regenerate(asked, answers, contextlib.nullcontext(backwards), StopRequest(), show=False)
    read_again = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row["index"] for row in lines(out)] == [*range(30)]
    assert max(written, read_again) < out.stat().st_size


def test_finishing_order_does_not_matter(target: Target, tmp_path: Path) -> None:
    asked, config = asked_of(tmp_path), settings()
    run(tmp_path / "a.jsonl", asked, local(target, config), config)

    def backwards(missing: Sequence[Conversation]) -> Iterator[list[Outcome]]:
        for one in reversed(missing):
            yield from local(target, config)([one])

    run(tmp_path / "b.jsonl", asked, backwards, config)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_other_settings_or_other_prompts_are_refused_by_name(
    target: Target, tmp_path: Path
) -> None:
    config, out = settings(), tmp_path / "out.jsonl"
    asked = asked_of(tmp_path)
    before = run(out, asked[:3], local(target, config), config)
    warm = settings(temperature=0.5)
    with pytest.raises(ValueError, match=r"started with temperature=0\.0 and .* temperature=0\.5"):
        run(out, asked, local(target, warm), warm)
    others = asked_of(tmp_path, [PROMPTS[0], {"prompt": "another"}, *PROMPTS[2:]])
    with pytest.raises(ValueError, match=r"answers conversation 1 of .*:2, which has changed"):
        run(out, others, local(target, config), config)
    with pytest.raises(ValueError, match=r"answers conversation 2 of .*:3, which no longer exists"):
        run(out, asked[:2], local(target, config), config)
    assert run(out, asked, local(target, config), config)[:3] == before  # more prompts: more rows
    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match="must not name a file that `regenerate` did not write"):
        run(strange, asked, local(target, config), config)
    with (out).open("a") as stream:
        stream.write("nonsense\n")
    with pytest.raises(ValueError, match=r"out\.jsonl:6: .*a line as `regenerate` wrote"):
        run(out, asked, local(target, config), config)


def test_two_processes_do_not_write_one_file_nor_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
    config, out = settings(), tmp_path / "out.jsonl"
    with open_answers(out, config.identity()):
        header = out.with_suffix(".settings.json")
        header.unlink()  # as before the first has written it
        with (
            pytest.raises(
                ValueError, match=r"^regenerate\.out must .* which is held by regenerate"
            ),
            open_answers(out, config.identity() | {"seed": 17}),
        ):
            pass
        assert not header.exists()


def test_answers_that_are_still_written_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
    config, out = settings(), tmp_path / "out.jsonl"
    with (
        open_answers(out, config.identity()),
        pytest.raises(ValueError, match=r"^data\.path must .* which is held by regenerate"),
    ):
        read(data(out))


# An endpoint


def test_an_endpoint_that_fails_for_a_while_is_asked_again(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    endpoint.failures = {"one": [429, 500], "four": [503], "seven": [429, 429, 429]}
    endpoint.seconds = 0.05
    config = settings(base_url=endpoint.url, backend="openai", concurrency=2)
    started = time.monotonic()
    rows = run(tmp_path / "out.jsonl", asked_of(tmp_path), remote(config), config)
    assert len(rows) == 5
    assert len(endpoint.asked) == 7 + 6
    assert endpoint.busiest == 2
    # The endpoint's own pause of 10 ms was kept: the client's would have been seconds.
    assert time.monotonic() - started < 3
    assert rows[1]["messages"][1]["content"].startswith("two and more words? ")
    assert rows[1]["messages"][3]["content"].startswith("three? ")
    later = [body for body in endpoint.asked if body["messages"][-1]["content"] == "three"]
    assert later[0]["messages"][1] == rows[1]["messages"][1]


def test_a_seed_of_its_own_goes_with_every_request(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    config = settings(base_url=endpoint.url, backend="openai", temperature=0.7, top_p=0.9)
    asked = asked_of(tmp_path)
    run(tmp_path / "a.jsonl", asked, remote(config), config)
    seeds = {body["seed"] for body in endpoint.asked}
    assert len(seeds) == 7
    assert {body["top_p"] for body in endpoint.asked} == {0.9}
    assert "top_k" not in endpoint.asked[0]
    few = settings(
        base_url=endpoint.url, backend="openai", temperature=0.7, top_p=0.9, concurrency=1
    )
    run(tmp_path / "b.jsonl", asked, remote(few), few)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_what_fails_is_recorded_and_asked_again_next_time_unless_it_is_refused(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    endpoint.failures = {"one": [400], "seven": [500] * 4}
    config, out = settings(base_url=endpoint.url, backend="openai"), tmp_path / "out.jsonl"
    asked = asked_of(tmp_path)
    rows = run(out, asked, remote(config), config)
    assert [row["index"] for row in rows] == [1, 2, 3]
    failed = lines(out.with_suffix(".failed.jsonl"))
    assert [(row["index"], row["reason"], row["final"]) for row in failed] == [
        (0, "refused by the endpoint", True),
        (4, "the endpoint failed", False),
    ]
    assert failed[1]["detail"] == "500: not now: 500"
    rows = run(out, asked, remote(config), config)
    assert [row["index"] for row in rows] == [1, 2, 3, 4]
    assert len(lines(out.with_suffix(".failed.jsonl"))) == 1


def test_an_endpoint_that_only_fails_ends_the_run_and_keeps_what_is_answered(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    records = [{"prompt": f"p{number}"} for number in range(20)]
    endpoint.failures = {f"p{number}": [500] * 9 for number in range(3, 20)}
    config = settings(base_url=endpoint.url, backend="openai", concurrency=1, max_retries=0)
    asked, out = asked_of(tmp_path, records), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=r"failed 8 conversations in a row.* 500: not now: 500"):
        run(out, asked, remote(config), config)
    assert [row["index"] for row in lines(out)] == [0, 1, 2]
    endpoint.failures = {}
    assert len(run(out, asked, remote(config), config)) == 20


def test_an_endpoint_says_what_is_wrong_before_anything_is_asked(
    endpoint: chat_server.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(base_url=endpoint.url, backend="openai", max_retries=0)
    assert served_by(config).model == chat_server.MODEL
    endpoint.models = ["a", "b"]
    with pytest.raises(ValueError, match=r"served_model must name one of the models .*: a, b$"):
        served_by(config)
    wrong = settings(base_url=endpoint.url, backend="openai", served_model="c")
    with pytest.raises(ValueError, match=r"served_model must be a model of .* \(a, b\), got c"):
        served_by(wrong)
    endpoint.key = "secret"
    with pytest.raises(ValueError, match=r"must accept the key in MY_KEY .* is not set: 401"):
        served_by(settings(base_url=endpoint.url, backend="openai", api_key_variable="MY_KEY"))
    monkeypatch.setenv("MY_KEY", "secret")
    served_by(
        settings(
            base_url=endpoint.url, backend="openai", api_key_variable="MY_KEY", served_model="a"
        )
    )
    nowhere = settings(base_url="http://127.0.0.1:9/v1", backend="openai", max_retries=0)
    with pytest.raises(ValueError, match=r"base_url=http://127\.0\.0\.1:9/v1 .* cannot be reached"):
        served_by(nowhere)


def completion(**message: Any) -> bytes:
    choice = {"message": message, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}).encode()


UNREADABLE = [
    b'{"choices": [{"message": {"content": "\\ud800"}, "finish_reason": "stop"}]}',
    b'{"choices": [{"message": null, "finish_reason": "stop"}]}',
    b"<html>busy</html>",
    b"[1, 2]",
    b'{"choices": []}',
    b"",
    b"\xff\xfe",
    b'{"choices": {"0": 1}}',
    completion(content=["a"]),
    completion(content="a").replace(b": 3", b": -3"),
    b"[" * 100_000,
    b'{"choices": [{"message": {"content": "' + b"a" * (9 << 20) + b'"}}]}',
]


def test_a_reply_that_cannot_be_read_costs_its_row_and_is_asked_again_next_time(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    records = [{"prompt": f"{kind} {number}"} for number in range(12) for kind in ("bad", "good")]
    endpoint.replies = {f"bad {number}": [reply] for number, reply in enumerate(UNREADABLE)}
    config = settings(
        base_url=endpoint.url, backend="openai", concurrency=1, max_retries=0, timeout=20.0
    )
    asked, out = asked_of(tmp_path, records), tmp_path / "out.jsonl"
    rows = run(out, asked, remote(config), config)
    assert [row["index"] for row in rows] == [*range(1, 24, 2)]
    failed = lines(out.with_suffix(".failed.jsonl"))
    assert [row["index"] for row in failed] == [*range(0, 24, 2)]
    assert {row["final"] for row in failed} == {False}
    assert failed[0]["source"] == f"{tmp_path}/prompts.jsonl:1"
    assert {row["reason"] for row in failed[:-1]} == {"a reply that cannot be read"}
    assert "8 MB" in failed[-1]["detail"]
    assert len(run(out, asked, remote(config), config)) == 24


def test_reasoning_that_an_endpoint_keeps_apart_is_no_answer_to_train_on(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    endpoint.replies = {"one": [completion(content="Four.", reasoning_content="2 + 2")]}
    config = settings(base_url=endpoint.url, backend="openai")
    out = tmp_path / "out.jsonl"
    assert [row["index"] for row in run(out, asked_of(tmp_path), remote(config), config)] == [
        1, 2, 3, 4,
    ]  # fmt: skip
    (failed,) = lines(out.with_suffix(".failed.jsonl"))
    assert failed["reason"].startswith("reasoning kept apart")


def test_an_endpoint_that_refuses_everything_ends_the_run(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    records = [{"prompt": f"p{number}"} for number in range(60)]
    endpoint.failures = {f"p{number}": [400] for number in range(60)}
    config = settings(base_url=endpoint.url, backend="openai", concurrency=1)
    with pytest.raises(ValueError, match=r"answered none of 32 conversations, the last: refused"):
        run(tmp_path / "out.jsonl", asked_of(tmp_path, records), remote(config), config)
    assert len(endpoint.asked) == 32


@pytest.mark.parametrize(
    ("status", "listing", "message"),
    [
        (200, b"<html>welcome</html>", "must be the address of an OpenAI-compatible endpoint"),
        (200, b"", "must be the address of an OpenAI-compatible endpoint"),
        (200, b"[]", "must be the address of an OpenAI-compatible endpoint"),
        (200, b'{"data": null}', "must be the address of an OpenAI-compatible endpoint"),
        (
            500,
            b'{"error": {"message": "loading"}}',
            "is there, but cannot answer now: 500: loading",
        ),
        (429, b'{"error": {"message": "slow"}}', "is there, but cannot answer now: 429: slow"),
        (404, b"{}", "and lists no models: 404.*regenerate.served_model"),
        (
            403,
            b'{"error": {"message": "the key sk-secret is bad"}}',
            r"403: the key \[the key\] is",
        ),
    ],
)
def test_what_answers_instead_of_an_endpoint_is_named_as_what_it_is(
    endpoint: chat_server.Endpoint,
    status: int,
    listing: bytes,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    endpoint.listing, endpoint.listing_status = listing, status
    config = settings(base_url=endpoint.url, backend="openai", api_key_variable="MY_KEY")
    with pytest.raises(ValueError, match=message) as error:
        served_by(config)
    assert "served_model must" not in str(error.value)
    assert "sk-secret" not in str(error.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://no.such.host.invalid/v1"])
def test_an_endpoint_that_is_not_there_is_said_within_seconds(url: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"regenerate\.base_url=\S+ .* which cannot be reached"):
        served_by(settings(base_url=url, backend="openai", max_retries=8))
    assert time.monotonic() - started < 12


def test_a_server_that_hangs_is_given_up_after_the_time_that_is_said(
    endpoint: chat_server.Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.seconds = 20.0
    config = settings(base_url=endpoint.url, backend="openai", timeout=0.4, max_retries=8)
    asked = asked_of(tmp_path, [{"prompt": f"p{number}"} for number in range(8)])
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"no answer within regenerate\.timeout=0\.4 s"):
        run(tmp_path / "out.jsonl", asked, remote(config), config)
    assert time.monotonic() - started < 10


def test_a_request_to_stop_breaks_off_no_step_of_asyncio(
    endpoint: chat_server.Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error raised there by a signal would leave what has just begun without an await."""
    config = settings(base_url=endpoint.url, backend="openai", concurrency=1)
    went_on = list[bool]()

    async def signalled(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        went_on.append(True)
        await asyncio.sleep(3600)

    monkeypatch.setattr(endpoint_module, "converse", signalled)
    asked, started = asked_of(tmp_path), time.monotonic()
    stop = StopRequest()
    backend = partial(by_endpoint, config=config, template=BY_TEMPLATE, stop=stop)
    with (
        open_answers(tmp_path / "out.jsonl", config.identity()) as answers,
        stop.listening(),
        pytest.raises(Stopped, match="stopped by SIGTERM"),
    ):
        regenerate(asked, answers, contextlib.nullcontext(backend), stop, show=False)
    assert went_on == [True]
    assert time.monotonic() - started < 10


def test_what_a_template_is_told_goes_to_the_endpoint(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    config = settings(base_url=endpoint.url, backend="openai")
    quiet = replace(BY_TEMPLATE, kwargs={"enable_thinking": False})
    run(
        tmp_path / "out.jsonl",
        asked_of(tmp_path),
        partial(by_endpoint, config=config, template=quiet, stop=StopRequest()),
        config,
    )
    assert endpoint.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    "poison",
    [
        '{"index": 0, "messages": []}',
        '{"index": -1, "messages": [], "answers": [], "cut": null, "source": "", "digest": ""}',
        '{"index": "0", "messages": [], "answers": [], "cut": null, "source": "", "digest": ""}',
        "[" * 100_000,
        "null",
    ],
)
def test_answers_of_another_hand_are_named_by_line(poison: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_answers(out, {}):
        pass
    out.write_text(poison + "\n")
    with (
        pytest.raises(ValueError, match=r"out\.jsonl:1: .*a line as `regenerate` wrote"),
        open_answers(out, {}),
    ):
        pass


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=r"pip install 'drafttrain\[openai\]'"):
        served_by(settings(base_url="http://localhost/v1", backend="openai"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "sglang"}, "regenerate.backend must be one of transformers, vllm, openai"),
        ({"backend": "openai"}, "regenerate.base_url must name the endpoint"),
        ({"turns": "first"}, "regenerate.turns must be one of all, last, got first"),
        ({"out": "answers.txt"}, "regenerate.out must name a file in .jsonl, got answers.txt"),
        ({"temperature": -1.0}, "regenerate.temperature must be 0 .*or in"),
        ({"concurrency": 0}, "regenerate.concurrency must be at least 1, got 0"),
        ({"base_url": "notaurl"}, "base_url must be like .* got notaurl, which names no http"),
        ({"base_url": "http://a:b@c/v1"}, "base_url must be like .* with a user name or a pass"),
        ({"base_url": "http://a/v1?key=b"}, "base_url must be like .* got one with"),
        ({"base_url": "http://a:x/v1"}, "base_url must be like .* an address that cannot be read"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**change)


# The command


def test_the_command_answers_goes_on_and_says_what_it_did(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers" / "a.jsonl"
    call = [
        "regenerate",
        f"model.path={tiny_target_dir}",
        f"data.path={written(tmp_path, [*PROMPTS, {'prompt': ''}])}",
        f"regenerate.out={out}",
        "regenerate.max_new_tokens=8",
        "hardware=cpu",
        "hardware.threads=1",
    ]
    assert cli.main(call) == 0
    said = capsys.readouterr().out
    assert "1 x an empty turn" in said
    assert "5 conversations, 0 answered before" in said
    assert "tokens/s)" in said
    ended = [answer["finished"] for row in lines(out) for answer in row["answers"]]
    assert f"{ended.count(False)} of {len(ended)} answers reached the limit, regenerate.max" in said
    content = out.read_bytes()
    assert json.loads(out.with_suffix(".settings.json").read_text())["dtype"] == "float32"
    assert cli.main(call) == 0
    assert "5 conversations, 5 answered before" in capsys.readouterr().out
    assert out.read_bytes() == content
    assert cli.main([*call, "regenerate.seed=1"]) == 2
    assert "was started with seed=0 and would resume with seed=1" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_answers_in_the_dtype_in_which_it_is_trained_on(
    tiny_target_dir: Path, tmp_path: Path, dtype: str
) -> None:
    out = tmp_path / "a.jsonl"
    call = ["regenerate", f"model.path={tiny_target_dir}", f"regenerate.out={out}"]
    call += [f"data.path={written(tmp_path, PROMPTS[:1])}", "regenerate.max_new_tokens=2"]
    hardware = ["hardware.device=cpu", "hardware.threads=1", f"hardware.train_dtype={dtype}"]
    assert cli.main([*call, *hardware]) == 0
    assert json.loads(out.with_suffix(".settings.json").read_text())["dtype"] == dtype


def test_a_file_without_answers_is_an_error_and_not_the_next_step(
    endpoint: chat_server.Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = {f"p{number}": [completion(content="")] for number in range(3)}
    endpoint.replies = empty
    prompts = written(tmp_path, [{"prompt": name} for name in empty])
    call = ["regenerate", f"data.path={prompts}", f"regenerate.out={tmp_path / 'out.jsonl'}"]
    remote = ["regenerate.backend=openai", f"regenerate.base_url={endpoint.url}"]
    for _ in range(2):
        assert cli.main([*call, *remote]) == 2
        said = capsys.readouterr()
        assert (
            "has no conversation with an answer (skipped 3 of 3 conversations: 3 x an" in said.err
        )
        assert "next:" not in said.out
        assert f"asking {endpoint.url} for its models" in said.out
        assert len(endpoint.asked) == 3
    assert cli.main([*call, "regenerate.max_new_tokens=2048"]) == 2
    assert "regenerate.max_new_tokens must be less than data.max_length" in capsys.readouterr().err


def test_a_scheduler_that_asks_to_stop_is_told_how_to_go_on(
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add = Answers.add

    def asked_midway(answers: Answers, outcomes: Sequence[Outcome]) -> None:
        add(answers, outcomes)
        if len(answers.rows) in (2, 4):
            with contextlib.suppress(*[Stopped] * (len(answers.rows) == 4)):  # as asyncio may
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Answers, "add", asked_midway)
    call = ["regenerate", f"model.path={tiny_target_dir}", "hardware=cpu", "hardware.threads=1"]
    call += [f"data.path={written(tmp_path, PROMPTS)}", f"regenerate.out={tmp_path / 'out.jsonl'}"]
    call += ["regenerate.max_new_tokens=4", "regenerate.batch_size=2"]
    for answered in (2, 4):
        assert cli.main(call) == 143
        assert capsys.readouterr().err == (
            "stopped by SIGTERM: what is answered stays, and the same command resumes\n"
        )
        assert len(lines(tmp_path / "out.jsonl")) == answered
    assert cli.main(call) == 0
    assert [row["index"] for row in lines(tmp_path / "out.jsonl")] == list(range(5))


@pytest.mark.slow
def test_a_killed_process_loses_nothing_and_doubles_nothing(
    endpoint: chat_server.Endpoint, tmp_path: Path
) -> None:
    endpoint.seconds = 0.05
    file = written(tmp_path, [{"prompt": f"p{number}"} for number in range(60)])
    out = tmp_path / "out.jsonl"
    call = [sys.executable, "-m", "drafttrain", "regenerate", f"data.path={file}"]
    call += [f"regenerate.out={out}", "regenerate.backend=openai", "regenerate.concurrency=2"]
    call += [f"regenerate.base_url={endpoint.url}"]
    for wanted, number, code in ((5, signal.SIGKILL, -9), (25, signal.SIGTERM, 143)):
        process = subprocess.Popen(call, stdout=-3, stderr=-1, text=True, env={**os.environ})
        deadline = time.monotonic() + 60
        while not out.is_file() or out.read_bytes().count(b"\n") < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate()
        assert process.returncode == code, said
    assert said == "stopped by SIGTERM: what is answered stays, and the same command resumes\n"
    kept = out.read_bytes().count(b"\n")
    subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
    assert [row["index"] for row in lines(out)] == list(range(60))
    # Of each killed run at most what was under way was asked twice.
    assert len(endpoint.asked) <= 60 + 2 * 2
    assert kept >= 25


def test_a_redirect_is_not_followed_and_is_named(endpoint: chat_server.Endpoint) -> None:
    with chat_server.serve() as elsewhere:
        endpoint.location = elsewhere.url
        said = rf"got one that sends requests on to {elsewhere.url}/models, which is not followed"
        with pytest.raises(ValueError, match=said):
            served_by(settings(base_url=endpoint.url))
        with pytest.raises(ValueError, match=said):  # a named model needs no list, but its address
            served_by(settings(base_url=endpoint.url, served_model=chat_server.MODEL))
        assert elsewhere.listed == 0


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"model": "cuckoo"}, "answered by another model: cuckoo instead of parrot"),
        ({"model": "parrot-2026-01-01"}, None),
        ({"reason": "sk-0123456789"}, "the reply repeats the key in OPENAI_API_KEY"),
        ({"model": "sk-0123456789"}, "the reply repeats the key in OPENAI_API_KEY"),
    ],
)
def test_a_reply_by_another_model_or_with_the_key_is_not_kept(
    reply: dict[str, str],
    said: str | None,
    endpoint: chat_server.Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings(base_url=endpoint.url, api_key_variable="OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    choice = {"message": {"content": "yes"}, "finish_reason": reply.get("reason", "stop")}
    content = {"choices": [choice], "model": reply.get("model", "parrot")}
    endpoint.replies = {"one": [json.dumps(content).encode()]}
    asked = [Conversation((Message("user", "one"),), 0, "here")]
    with StopRequest().listening() as stop:
        found = [o for part in by_endpoint(asked, config, BY_TEMPLATE, stop) for o in part]
    failure = None if isinstance(found[0], AnsweredConversation) else found[0]
    assert (failure is None) == (said is None), found
    if failure is not None and said is not None:
        assert said in f"{failure.reason}: {failure.detail}"
        assert "sk-0123456789" not in str(failure)
