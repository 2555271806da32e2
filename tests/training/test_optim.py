"""The learning rate follows its formula, sizes follow the data, and only matrices decay."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from paths import ROOT
from torch import nn

from drafttrain.commands.setup.target_and_drafter import expected_spec
from drafttrain.config.compose import load_choice
from drafttrain.config.groups import choices, content_of
from drafttrain.config.overrides import UsageError
from drafttrain.core.types import Sample
from drafttrain.data.batches import Batches
from drafttrain.training.config import TrainerConfig
from drafttrain.training.engine.optimizer import muon_matrices, parameter_groups

VALUES = yaml.safe_load((ROOT / "conf" / "trainer" / "default.yaml").read_text())
COSINE = VALUES | dict(
    lr=3.0e-4, warmup_steps=5, max_steps=40, final_lr_ratio=0.1, schedule="cosine"
)


def lr_at(step: int, **settings: Any) -> float:
    return TrainerConfig(**settings).lr_at(step)


def torch_rates(optimizer: torch.optim.Optimizer, scheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_then_cosine_is_torchs_own_schedule() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0e-4)
    schedulers = torch.optim.lr_scheduler
    # LinearLR counts from its first value, so 4 increments lead to the fifth update's full rate.
    warmup = schedulers.LinearLR(optimizer, start_factor=1 / 5, total_iters=4)
    rates = torch_rates(optimizer, warmup, 5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0e-4)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=35, eta_min=3.0e-5)
    rates += torch_rates(optimizer, cosine, 36)
    assert [lr_at(step, **COSINE) for step in range(41)] == pytest.approx(rates, rel=1e-9)


def test_constant_stays_at_the_peak_after_warm_up() -> None:
    rates = [lr_at(step, **{**COSINE, "schedule": "constant"}) for step in range(60)]
    assert rates[:5] == pytest.approx([3.0e-4 * part / 5 for part in range(1, 6)])
    assert set(rates[5:]) == {3.0e-4}


def test_no_update_has_a_rate_of_zero_even_when_the_final_ratio_is_zero() -> None:
    rates = [lr_at(step, **{**COSINE, "final_lr_ratio": 0.0}) for step in range(40)]
    assert min(rates) > 0
    assert max(rates) == 3.0e-4


def test_past_the_last_step_the_rate_is_the_final_one() -> None:
    assert lr_at(40, **COSINE) == lr_at(10_000, **COSINE) == pytest.approx(3.0e-5)
    assert math.isclose(lr_at(22, **{**COSINE, "warmup_steps": 4}), 3.0e-4 * 0.55)


def test_warm_up_of_zero_steps_starts_at_the_peak() -> None:
    assert lr_at(0, **{**COSINE, "warmup_steps": 0}) == 3.0e-4


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"trainer\.schedule must be .* got linear"):
        lr_at(0, **{**COSINE, "schedule": "linear"})


def test_matrices_decay_and_vectors_do_not_and_frozen_weights_are_left_out() -> None:
    module = nn.ModuleDict(
        {
            "embedding": nn.Embedding(7, 4),
            "linear": nn.Linear(4, 3),
            "norm": nn.RMSNorm(3),
            "frozen": nn.Linear(3, 3),
        }
    )
    module["frozen"].requires_grad_(False)
    decayed, plain = parameter_groups([*module.parameters()], 0.1)
    assert decayed["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0.0
    expected = [module["embedding"].weight, module["linear"].weight]
    assert all(a is b for a, b in zip(decayed["params"], expected, strict=True))
    expected = [module["linear"].bias, module["norm"].weight]
    assert all(a is b for a, b in zip(plain["params"], expected, strict=True))


def test_a_group_with_nothing_in_it_is_left_out() -> None:
    assert [
        g["weight_decay"]
        for g in parameter_groups([*nn.Linear(2, 2, bias=False).parameters()], 0.1)
    ] == [0.1]
    assert [g["weight_decay"] for g in parameter_groups([*nn.RMSNorm(2).parameters()], 0.1)] == [
        0.0
    ]


def auto(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{**content_of("trainer", "auto"), **changes})


def even(tokens: int) -> Callable[[int, float], int]:
    return lambda step, epochs: max(1, round(epochs * tokens / step))


def test_sizes_follow_from_the_data_and_the_width() -> None:
    small, large = (
        auto(epochs=1).sized(400_000, even(400_000), 384, 4e-3),
        auto(epochs=2).sized(650_000_000, even(650_000_000), 4096, 4e-3),
    )
    sizes = [(s.max_steps, s.tokens_per_step, s.lr, s.warmup_steps) for s in (small, large)]
    assert sizes == [(781, 512, 2.9e-3, 39), (19_836, 65_536, 5.3e-5, 992)]
    assert small.validate_every == small.save_every == 391
    assert not small.unsized
    assert auto().unsized


def test_a_size_that_is_given_stays_and_the_others_follow_it() -> None:
    given = auto(epochs=1, tokens_per_step=1000, lr=1e-5).sized(400_000, even(400_000), 384, 4e-3)
    assert (given.max_steps, given.tokens_per_step, given.lr) == (400, 1000, 1e-5)
    steps = auto(max_steps=100).sized(400_000, even(400_000), 768, 8e-3)
    assert (steps.max_steps, steps.warmup_steps, steps.lr) == (100, 5, 4e-3)
    assert auto(epochs=1).sized(10, even(10), 384, 4e-3).max_steps == 1  # data of one sentence
    assert (
        auto(epochs=1).sized(100_000, even(100_000), 192, 4e-3).lr == 4e-3
    )  # never above the drafter's own
    assert auto(max_steps=1600).sized(400_000, even(400_000), 384, 4e-3).lr == 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": "fast"}, r"trainer\.lr must be a number above 0, or auto, got fast"),
        ({"epochs": 0}, r"trainer\.epochs must be above 0"),
        ({"max_steps": 0}, r"trainer\.max_steps must be a number of at least 1, or auto, got 0"),
    ],
)
def test_sizes_are_numbers_or_auto(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auto(**changes)


@pytest.mark.parametrize(
    ("tokens", "an_epoch", "epochs", "steps"),
    [(420, 1, 1, 1), (420, 1, 3, 3), (100, 1, 3, 3), (420, 1, 2.5, 3), (3_000, 10, 1.1, 11)],
)
def test_an_epoch_has_the_steps_that_the_batches_cut_it_into(
    tokens: int, an_epoch: int, epochs: float, steps: int
) -> None:
    trainer = auto(epochs=epochs, tokens_per_step=300)
    sample = Sample(torch.zeros(10, dtype=torch.long), torch.ones(10, dtype=torch.bool), 0)
    batches = Batches([sample] * (tokens // 10), 300, 4, seed=0)
    assert len(batches.steps) == batches.num_steps(1) == an_epoch
    assert (
        trainer.sized(tokens, lambda _, each: batches.num_steps(each), 384, 4e-3).max_steps == steps
    )


def test_a_warm_up_longer_than_the_run_names_the_rate_that_is_reached() -> None:
    trainer = auto(max_steps=4, warmup_steps=20, lr=8e-3)
    assert trainer.warm_up_note() == (
        "trainer.warmup_steps=20 are more than trainer.max_steps=4: the learning rate reaches "
        "0.0016, not trainer.lr=0.008; give fewer, or auto"
    )
    assert auto(max_steps=20, warmup_steps=20, lr=8e-3).warm_up_note() == ""


@pytest.mark.parametrize("size", [383, 384, 4096])
def test_muon_takes_layers_as_wide_as_a_draft_vocabulary(size: int) -> None:
    spec = expected_spec(load_choice("model", "tiny"))
    assert (spec.hidden_size, spec.vocab_size) == (384, 4096)
    config = replace(load_choice("drafter", "eagle3"), draft_vocab_size=size)
    with torch.device("meta"):
        drafter = config.build(spec)
        drafter.outline(lambda: None)
    taken = set(muon_matrices(drafter))
    left = {name for name, p in drafter.named_parameters() if p.ndim == 2 and p not in taken}
    assert left == {"lm_head.weight"}


def test_muon_takes_no_table_of_a_vocabulary() -> None:
    spec = expected_spec(load_choice("model", "tiny"))
    for name in choices("drafter"):
        with suppress(UsageError, ValueError), torch.device("meta"):
            drafter = load_choice("drafter", name).build(spec)
            sizes = {p.shape for p in muon_matrices(drafter)}
            assert not [shape for shape in sizes if spec.vocab_size in shape], name
