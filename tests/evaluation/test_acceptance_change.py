"""What rounding costs in acceptance: two drafters on the same prompts, by the same chance."""

from typing import Any

import pytest
from builders import BY_TEMPLATE
from test_evaluate import PROMPTS, drafters, settings

from drafttrain.core.chance import SeededChance
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.measure import acceptance_change, change_statement, first_turn
from drafttrain.report.results import BeforeAfter, Change, Estimate
from drafttrain.target.model import Target

__all__ = ["drafters"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_change_is_that_of_the_loop_on_the_same_prompts(
    temperature: float, target: Target, drafters: dict[str, Drafter]
) -> None:
    config = settings(temperature=temperature, max_new_tokens=24)

    def length(drafter: Drafter) -> float:
        counted = []
        for row, prompt in enumerate(PROMPTS):
            told: dict[str, Any] = {"sampling": config.sampling, "max_new_tokens": 24, "row": row}
            told |= {"policy": 3, "chance": SeededChance(5)}
            tokens = first_turn(prompt, target, BY_TEMPLATE)
            counted.append(speculative_decode(target, drafter, tokens, **told).stats.trimmed)
        return sum(c.yielded for c in counted) / sum(c.num_drafts for c in counted)

    one, other = drafters["eagle3"], drafters["ngram"]
    same = acceptance_change(target, one, one, PROMPTS, BY_TEMPLATE, config, 5)
    assert same.difference.value == 0
    found = acceptance_change(target, one, other, PROMPTS, BY_TEMPLATE, config, 5)
    assert found.before.value == pytest.approx(length(one))
    assert found.after.value == pytest.approx(length(other))
    assert length(one) != length(other)
    assert found.difference.value == pytest.approx(length(other) - length(one))


def test_the_statement_names_both_lengths_and_how_sure_the_difference_is() -> None:
    found = BeforeAfter(Estimate(2.5, None), Estimate(2.4, None), Change(-0.1, [-0.1504, -0.0498]))
    assert change_statement(found, 16, settings()) == (
        "Acceptance length 2.500 with the weights as trained, 2.400 as written: -0.100 (95 % "
        "interval -0.150 to -0.050), on 16 held-out prompts, greedy, chain of 3, both decoded by "
        "drafttrain's own loop."
    )
    few = BeforeAfter(Estimate(2.5, None), Estimate(2.5, None), Change(0.0, None))
    assert (
        "2.500 as written: 0.000 (too few prompts for an interval), on 1 held-out prompt, tem"
        in (change_statement(few, 1, settings(temperature=0.7)))
    )
