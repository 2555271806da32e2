"""A queue of prompts in one batch: the outputs of the prompts alone, in fewer passes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.decode.autoregressive import (
    autoregressive_decode,
    autoregressive_decode_batch,
    autoregressive_queue,
)
from drafttrain.target.model import Target

SAMPLED = Sampling(1.0, 0, 1.0)
# Unequal prompts; the longest come late, into a cache that must grow for them.
PROMPTS = [[1, *(6 + (number * 7 + place) % 60 for place in range(2 * number))]
           for number in range(40)]  # fmt: skip


@pytest.fixture(autouse=True)
def outputs_end_early(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = (*target.spec.eos_token_ids, 20, 41, 60)
    monkeypatch.setattr(target, "spec", replace(target.spec, eos_token_ids=stops))


class Counted:
    """A target, and how many rows each of its passes had."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        step = target.step

        def counted(cache: Any, tokens: Any, **more: Any) -> Any:
            self.rows.append(len(tokens))
            return step(cache, tokens, **more)

        monkeypatch.setattr(target, "step", counted)


def queue_outputs(
    target: Target, sampling: Sampling, batch_size: int, limit: int, prompts: Sequence[list[int]]
) -> dict[int, tuple[int, ...]]:
    rest = list(enumerate(prompts))

    def more(count: int) -> list[tuple[int, list[int]]]:
        assert count >= 1
        return [rest.pop(0) for _ in range(min(count, len(rest)))]

    answers = autoregressive_queue(
        target,
        more,
        sampling=sampling,
        max_new_tokens=limit,
        chance=SeededChance(7),
        batch_size=batch_size,
    )
    outputs: dict[int, tuple[int, ...]] = {}
    for ended in answers:
        assert ended
        assert not outputs.keys() & {name for name, _ in ended}
        outputs |= {name: tuple(tokens) for name, tokens in ended}
    return outputs


@pytest.mark.parametrize("limit", [1, 70])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("batch_size", [1, 12, 64])
def test_every_output_is_that_of_its_prompt_alone(
    target: Target, sampling: Sampling, batch_size: int, limit: int
) -> None:
    outputs = queue_outputs(target, sampling, batch_size, limit, PROMPTS)
    assert [*sorted(outputs)] == [*range(len(PROMPTS))]
    for name in range(0, len(PROMPTS), 3):
        told: dict[str, Any] = {"sampling": sampling, "max_new_tokens": limit}
        alone = autoregressive_decode(
            target, PROMPTS[name], row=name, chance=SeededChance(7), **told
        )
        assert outputs[name] == alone.tokens


def test_new_prompts_take_the_rows_of_those_that_have_ended(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(target, monkeypatch)
    outputs = queue_outputs(target, SAMPLED, 8, 64, PROMPTS)
    in_queue = counted.rows[:]
    counted.rows.clear()
    for first in range(0, len(PROMPTS), 8):
        autoregressive_decode_batch(
            target,
            PROMPTS[first : first + 8],
            rows=range(first, first + 8),
            sampling=SAMPLED,
            max_new_tokens=64,
            chance=SeededChance(7),
        )
    num_tokens = sum(map(len, outputs.values()))
    assert num_tokens / 40 < 32  # or all would end at once, and refilling would gain nothing
    decoding = [rows for rows in in_queue if rows > 1]
    assert sum(decoding) < 1.25 * num_tokens  # few passes of rows that have ended
    assert len(in_queue) < len(counted.rows)


def test_no_prompts_are_no_outputs(target: Target) -> None:
    assert queue_outputs(target, GREEDY, 4, 5, []) == {}


def test_a_prompt_that_comes_late_is_decoded_too(target: Target) -> None:
    """The next turn of a conversation is known once the one before it is answered."""
    ready, outputs = [(0, [1, 7])], {}

    def more(count: int) -> list[tuple[int, list[int]]]:
        return [ready.pop(0) for _ in range(min(count, len(ready)))]

    told: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 5, "chance": SeededChance(0)}
    for ended in autoregressive_queue(target, more, batch_size=4, **told):
        for name, tokens in ended:
            outputs[name] = tokens
            if name < 5:
                ready.append((name + 1, [1, 7, *tokens][:8]))
    assert [*outputs] == [0, 1, 2, 3, 4, 5]
