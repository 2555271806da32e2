"""Decoding in turns: every method writes what it writes alone, and none runs ahead."""

import time
from collections.abc import Generator
from typing import Any

import pytest
import torch
from test_drafters import random_drafter

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Decoded
from drafttrain.decode.autoregressive import autoregressive_passes
from drafttrain.decode.clock import Clock
from drafttrain.decode.loop import speculative_passes
from drafttrain.decode.rows import Passes, Row, at_once, in_turns
from drafttrain.drafters.base import Drafter
from drafttrain.target.model import Target

PROMPTS = [[1, 3, 6, 20, 33, 41, 20], [1, 9, 12]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)])
def test_methods_in_turns_write_what_each_writes_alone(target: Target, sampling: Sampling) -> None:
    drafters = {name: random_drafter(name, target) for name in ("eagle3", "ngram")}

    def decoding() -> dict[str, Passes]:
        def one(drafter: Drafter | None) -> Passes:
            chance = SeededChance(0)
            told = {"sampling": sampling, "max_new_tokens": 12, "chance": chance, "rows": [0, 1]}
            if drafter is None:
                return autoregressive_passes(target, PROMPTS, **told)  # type: ignore[arg-type]
            return speculative_passes(target, drafter, PROMPTS, policy=3, **told)  # type: ignore[arg-type]

        return {"plain": one(None), **{name: one(each) for name, each in drafters.items()}}

    together = in_turns(decoding(), 3)
    alone = {name: at_once(passes) for name, passes in decoding().items()}
    assert set(together) == set(alone) == {"plain", "eagle3", "ngram"}
    for name, outputs in alone.items():
        assert [one.tokens for one in together[name]] == [one.tokens for one in outputs], name
        assert [one.stats.trimmed for one in together[name]] == [
            one.stats.trimmed for one in outputs
        ]


@pytest.mark.parametrize("name", ["plain", "eagle3", "ngram"])
def test_what_happens_between_the_passes_is_not_charged(
    target: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others decode meanwhile: their time was in every prefill but the last."""
    meanwhile = 0.0
    monkeypatch.setattr(Clock, "now", lambda clock: time.perf_counter() + meanwhile)
    told: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 8, "chance": SeededChance(0)}
    if name == "plain":
        passes = autoregressive_passes(target, PROMPTS, rows=[0, 1], **told)
    else:
        drafter = random_drafter(name, target)
        passes = speculative_passes(target, drafter, PROMPTS, rows=[0, 1], policy=3, **told)
    num_waits = 0
    with torch.inference_mode():
        while True:
            try:
                next(passes)
            except StopIteration as end:
                decoded = end.value
                break
            meanwhile += 1000.0
            num_waits += 1
    assert num_waits >= 2, "after the prefill, and after the first pass"
    charged = sum(one.stats.total_s for one in decoded)
    assert 0 < charged < 999, "one wait alone would be more"


def test_the_method_that_has_written_least_goes_on() -> None:
    order: list[str] = []

    def writes(name: str, tokens: int, at_a_time: int) -> Generator[list[Row], None, list[Decoded]]:
        row = Row(0, 5)
        while len(row.output) < tokens:
            order.append(name)
            row.output += [7] * min(at_a_time, tokens - len(row.output))
            yield [row]
        return [Decoded(tuple(row.output), row.stats)]

    decoded = in_turns({"slow": writes("slow", 8, 1), "fast": writes("fast", 8, 4)}, 2)
    assert "".join(name[0] for name in order) == "sf" + "ssssf" + "sss"
    assert {name: one[0].tokens for name, one in decoded.items()} == {
        "slow": (7,) * 8,
        "fast": (7,) * 8,
    }
