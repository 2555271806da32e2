"""What a run says of the acceptance to expect: before it, and at each validation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_drafters import build
from test_engine import deepspeed_config
from test_optim import auto, even
from test_training import constant, random_samples, recorded, start, target, trainer

from drafttrain.config.groups import choices
from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.shared.publications import LENGTHS, expectation
from drafttrain.runtime.signals import StopRequest
from drafttrain.target.model import Target
from drafttrain.training.engine.build import build_engine
from drafttrain.training.loop import METRIC
from drafttrain.training.validation import (
    BREAK_EVEN,
    LOOKUP_LENGTH,
    Validation,
    forecast,
    held_out_prompts,
)

__all__ = ["target"]  # a fixture


@pytest.mark.parametrize("depth", [1, 4])
def test_prompt_lookup_is_counted_along_an_answer_as_in_decoding(
    depth: int, target: Target
) -> None:
    lookup = build("ngram", target.spec)
    asked: dict[str, Any] = {"sampling": GREEDY, "chance": SeededChance(0)}
    drafts = 0
    for length, tokens in ((3, 1), (5, 2), (9, 40), (20, 24)):
        prompt = [6 + (7 * place) % 11 for place in range(length)]
        decoded = speculative_decode(
            target, lookup, prompt, policy=depth, max_new_tokens=tokens, **asked
        )
        replayed = lookup.replay(prompt, decoded.tokens, depth)  # type: ignore[operator]
        assert replayed == decoded.stats.trimmed
        drafts += replayed.num_drafts
    assert drafts > 5


def test_a_validation_measures_prompt_lookup_and_from_which_length_speculation_pays(
    target: Target,
) -> None:
    engine = build_engine(
        *(build("medusa", target.spec), deepspeed_config("none")),
        **{"device": "cpu", "dtype": torch.float32, "betas": (0.9, 0.95), "eps": 1e-8},
        **{"weight_decay": 0.0, "max_grad_norm": 1.0},
    )
    lookup = build("ngram", target.spec)
    validation = Validation(
        *(target, engine, held_out_prompts(random_samples(4))),
        **{"most": 4, "depth": 2, "max_new_tokens": 24, "draft_dtype": torch.float32},
        **{"stop": StopRequest(), "lookup": lookup.replay},  # type: ignore[dict-item]
    )
    state = torch.get_rng_state()
    pays = validation.measure_break_even()
    metrics = validation()
    assert metrics is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert metrics[BREAK_EVEN] == pays
    assert 0.2 < metrics[BREAK_EVEN] < 20
    assert 1 <= metrics[LOOKUP_LENGTH] <= 3
    again = validation()
    assert again == metrics  # passes are timed once


def test_more_data_is_read_less_often() -> None:
    def epochs(tokens: int, **changes: Any) -> float:
        return float(auto(**changes).sized(tokens, even(tokens), 576, 4e-3).epochs)

    read = [epochs(tokens) for tokens in (1, 227_000, 800_000, 1_200_000, 2_400_000, 10**9)]
    assert read == [3, 3, 3, 2, 1, 1]
    assert epochs(10**7, epochs=2) == 2


def test_a_validation_follows_a_tenth_of_many_steps(target: Target, tmp_path: Path) -> None:
    def validated(steps: int) -> list[int]:
        folder, config = tmp_path / str(steps), trainer(max_steps=steps, validate_every=75)
        start("medusa", target, folder, config, constant)
        return [step for step, _ in recorded(folder, METRIC)]

    assert validated(100) == [10, 75, 100]
    assert validated(99) == [75, 99]


def test_what_was_measured_of_a_family_is_told_and_nothing_else() -> None:
    assert set(LENGTHS) <= set(choices("drafter"))
    assert "1.97 and 1.43 from 0.2M tokens (SmolLM2-135M-Instruct" in expectation("eagle3_1")
    assert "none of drafter=medusa (" in expectation("medusa")


def said(values: dict[str, float], step: int = 100, right: float | None = None) -> list[str]:
    lines: list[str] = []
    read = forecast(1000, 227_000, ("depth_1", "depth_2"), lines.append)
    if right is not None:
        read(step - 1, {"train/accuracy_depth_1": right})
    read(step, values)
    return lines


def test_a_validation_is_set_beside_what_pays_and_extrapolated() -> None:
    values = {"val/acceptance_length": 1.5, "val/acceptance_length_error": 0.08}
    more = {BREAK_EVEN: 1.45, LOOKUP_LENGTH: 1.93, "val/acceptance_position_1": 0.52}
    first, ahead = said(values | more)
    assert first == (
        "validation after step 100: acceptance length 1.50, standard error 0.08, speculation pays "
        "here from 1.45, prompt lookup has 1.93 where it finds a match"
    )
    assert ahead.endswith("at the end, which pays here")
    assert len(said(values | more, step=99)) == 1, "too early"
    assert len(said(values | more, step=1000)) == 1, "nothing is ahead"
    assert said({"train/loss": 1.0}) == []
    assert said(values)[1].endswith("which may pay here"), "nobody knows"
    assert said(values | {BREAK_EVEN: 9.0})[1].endswith("which does not pay here")


def test_text_that_is_known_by_heart_is_named() -> None:
    values = {"val/acceptance_length": 1.5, "val/acceptance_position_1": 0.52}
    *_, line = said(values, right=0.74)
    assert line == (
        "  first tokens right: 0.74 in training, 0.52 here: the drafter memorises the 227,000 "
        "tokens; more text helps more than more steps"
    )
    assert "memorises" not in said(values, right=0.55)[-1]
