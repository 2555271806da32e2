"""A stream gives what decoding gives, as it is decoded, and says who wrote each token."""

import asyncio
import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
from builders import BY_TEMPLATE
from paths import ROOT

import drafttrain
from drafttrain.core.chance import SeededChance
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Decoded
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.records import Message
from drafttrain.decode.autoregressive import autoregressive_passes
from drafttrain.decode.rows import Passes, Row
from drafttrain.decode.stream import (
    ACCEPTED,
    BONUS,
    CORRECTED,
    UNDRAFTED,
    Stream,
    pieces_of,
    written_by,
)
from drafttrain.drafters.base import Drafter
from drafttrain.target.model import Target

LIST = "Write this again: red, green, blue, red, green, blue, red, green, blue."


@pytest.fixture(scope="module")
def target() -> Target:
    return drafttrain.load_target("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def lookup(target: Target) -> Drafter:
    return drafttrain.load_drafter("ngram", target)


@pytest.mark.parametrize(
    ("drafted", "accepted", "kept", "expected"),
    [
        (0, 0, 1, [(UNDRAFTED, 1)]),
        (4, 4, 5, [(ACCEPTED, 4), (BONUS, 1)]),
        (4, 2, 3, [(ACCEPTED, 2), (CORRECTED, 1)]),
        (4, 0, 1, [(CORRECTED, 1)]),
        (4, 3, 3, [(ACCEPTED, 3)]),  # the output ended inside an accepted run
    ],
)
def test_who_wrote_what_a_pass_added(
    drafted: int, accepted: int, kept: int, expected: list[tuple[str, int]]
) -> None:
    assert written_by(drafted, accepted, kept) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_pieces_are_the_answer_and_accepted_ones_are_those_counted(
    temperature: float, target: Target, lookup: Drafter
) -> None:
    told: dict[str, Any] = {"max_new_tokens": 60, "temperature": temperature, "seed": 1, "depth": 4}
    whole = drafttrain.generate(target, lookup, LIST, **told)
    stream = drafttrain.stream(target, lookup, LIST, **told)
    pieces = list(stream)
    assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens
    assert "".join(piece.text for piece in pieces) == whole.text == stream.text
    assert pieces[0].writer == UNDRAFTED, "the prefill's"
    accepted = [token for piece in pieces if piece.writer == ACCEPTED for token in piece.tokens]
    assert len(accepted) == whole.stats.trimmed.num_accepted_tokens > 2
    assert CORRECTED in {piece.writer for piece in pieces}
    assert stream.num_passes == whole.stats.num_target_passes
    assert stream.tokens_per_pass == (len(whole.tokens) - 1) / stream.num_passes
    assert stream.decoded is not None
    assert stream.tokens_per_second is not None
    assert stream.decoded.tokens == whole.tokens


@pytest.mark.parametrize("policy", ["chain", "dynamic_tree"])
def test_an_output_has_the_pieces_of_its_stream(
    policy: str, target: Target, lookup: Drafter
) -> None:
    told: dict[str, Any] = {"depth": 3, "policy": policy, "tree_nodes": 6, "tree_width": 2}
    stream = drafttrain.stream(target, lookup, LIST, max_new_tokens=50, **told).rest()
    assert stream.decoded is not None
    pieces = pieces_of(stream.decoded, target.tokenizer)
    assert pieces == stream.pieces
    assert {piece.writer for piece in pieces} >= {UNDRAFTED, ACCEPTED, CORRECTED, BONUS}
    assert len(stream.decoded.stats.pass_s) == stream.num_passes


def test_without_a_drafter_the_target_writes_all(target: Target) -> None:
    stream = drafttrain.stream(target, None, LIST, max_new_tokens=8)
    assert {piece.writer for piece in stream} == {UNDRAFTED}
    assert stream.tokens_per_pass == 1


def test_a_tree_that_is_accepted_to_its_end_gives_a_bonus(target: Target, lookup: Drafter) -> None:
    told: dict[str, Any] = {"depth": 2, "policy": "dynamic_tree", "tree_nodes": 6, "tree_width": 2}
    stream = drafttrain.stream(target, lookup, LIST, max_new_tokens=40, **told)
    runs = [(piece.writer, len(piece.tokens)) for piece in stream]
    assert (ACCEPTED, 2) in runs
    for place, (writer, _) in enumerate(runs):
        if writer == BONUS:
            assert runs[place - 1] == (ACCEPTED, 2)


def test_a_stream_that_is_left_decodes_no_more(target: Target, lookup: Drafter) -> None:
    stream = drafttrain.stream(target, lookup, LIST, max_new_tokens=200)
    for piece in stream:
        assert piece.tokens
        if len(stream.tokens) > 4:
            break
    stream.close()
    assert list(stream) == []
    assert stream.decoded is None
    assert stream.num_passes < 10


def test_an_answer_that_stops_just_at_its_limit_is_not_cut(target: Target) -> None:
    whole = drafttrain.stream(target, None, LIST, max_new_tokens=8).rest()
    assert whole.cut
    word = target.tokenizer.decode(whole.tokens[-1:])
    limit = next(n for n in range(1, 9) if word in target.tokenizer.decode(whole.tokens[:n]))
    told: dict[str, Any] = {"stop_strings": [word], "max_new_tokens": limit}
    stopped = drafttrain.stream(target, None, LIST, **told).rest()
    assert len(stopped.tokens) == limit
    assert not stopped.cut
    policy: dict[str, Any] = {"sampling": GREEDY, "chance": SeededChance(0), "rows": [0]}
    tokens = prompt_tokens([Message("user", LIST)], target.tokenizer, BY_TEMPLATE)
    end = autoregressive_passes(
        target, [tokens], max_new_tokens=1, stop_tokens=whole.tokens[:1], **policy
    )
    assert not Stream(end, target.tokenizer, 1).rest().cut


def test_a_stream_that_an_error_ended_has_ended(target: Target) -> None:
    def failing() -> Passes:
        yield [Row(0, 1, output=[5])]
        raise KeyboardInterrupt

    stream = Stream(failing(), target.tokenizer, 9)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert list(stream) == []
    assert stream.decoded is None


def test_a_stream_can_be_awaited(target: Target, lookup: Drafter) -> None:
    async def all_of() -> str:
        return "".join(
            [p.text async for p in drafttrain.stream(target, lookup, LIST, max_new_tokens=20)]
        )

    expected = drafttrain.generate(target, lookup, LIST, max_new_tokens=20)
    assert asyncio.run(all_of()) == expected.text


def test_a_consumer_that_is_cancelled_ends_the_stream(target: Target, lookup: Drafter) -> None:
    stream = drafttrain.stream(target, lookup, LIST, max_new_tokens=400)

    async def take() -> None:
        async for piece in stream:
            assert piece.tokens

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(take(), 0.05)
        await asyncio.sleep(0.5)  # the pass that was being decoded ends

    asyncio.run(cancelled())
    assert stream.decoded is None
    assert list(stream) == []


def test_a_stream_that_is_dropped_frees_its_cache(
    target: Target, lookup: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, begin = [], target.begin

    def begins() -> RaggedCache:
        cache = begin()
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(target, "begin", begins)
    gc.disable()
    try:
        for _ in drafttrain.stream(target, lookup, LIST, max_new_tokens=40):
            break
        with drafttrain.stream(target, lookup, LIST, max_new_tokens=40) as stream:
            next(stream)
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()


def test_bytes_that_are_no_character_do_not_end_a_stream(target: Target) -> None:
    """As tokenizers with byte fallback may write them, and byte-level ones too."""
    spelled = {1: "a", 2: "\ufffd", 3: "b", 4: " c"}

    class Tokenizer:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(spelled[token] for token in tokens)

    def passes() -> Passes:
        row = Row(0, 1)
        for token in (1, 2, 3, 2, 2, 4, 2):
            row.output.append(token)
            yield [row]
        return [Decoded(tuple(row.output), row.stats)]

    stream = Stream(passes(), Tokenizer(), 99).rest()
    assert stream.text == "a\ufffdb\ufffd\ufffd c\ufffd"


def test_text_comes_once_its_characters_are_whole(target: Target) -> None:
    text = "é🙂 ok 漢"
    tokens = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(text), "some characters are several tokens"

    def passes(end: int) -> Passes:
        row = Row(0, 1)
        for token in tokens[:end]:
            row.output.append(token)
            yield [row]
        return [Decoded(tuple(row.output), row.stats)]

    pieces = [piece.text for piece in Stream(passes(len(tokens)), target.tokenizer, 99)]
    assert "".join(pieces) == text
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)
    cut = Stream(passes(len(tokens) - 1), target.tokenizer, 99)
    last = list(cut)[-1]
    assert last.text.endswith("\ufffd")
    assert last.tokens == ()


def test_what_does_not_fit_is_refused_before_anything_is_decoded(
    target: Target, lookup: Drafter
) -> None:
    with pytest.raises(ValueError, match="must fit in the"):
        drafttrain.stream(target, lookup, "word " * 3000)
    with pytest.raises(ValueError, match="did you mean depth"):
        drafttrain.stream(target, lookup, "Hi", dept=3)


def test_a_shorter_context_of_the_drafters_is_refused_before_anything_is_decoded(
    target: Target, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(ROOT / "drafttrain/assets/tiny", short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    drafter = drafttrain.load_drafter("two_model", target, path=str(short))
    assert drafttrain.stream(target, drafter, "Hello", max_new_tokens=8)
    told = r"must fit in the 64 positions of drafter=two_model: the prompt has \d+, max_new_tokens"
    with pytest.raises(ValueError, match=told):
        drafttrain.stream(target, drafter, "Hello", max_new_tokens=64)
