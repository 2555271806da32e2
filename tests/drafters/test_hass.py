"""HASS: EAGLE-1 trained on the features that decoding will show it (arXiv:2408.15766)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from test_drafters import NoChance, as_batch, build, losses_of, random_drafter

from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import TrainConfig
from drafttrain.core.types import Batch, weighted_sum
from drafttrain.drafters.eagle import Eagle
from drafttrain.target.model import Target, load_target

TOKENS = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(model_config(tiny_target_dir), torch.float64, "cpu")


def training_states(drafter: Any, target: Target, batch: Batch) -> list[torch.Tensor]:
    """What the training forward compares at each depth: "batch index hidden"."""
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "_compare", lambda states, *_: seen.extend(states) or {})
        drafter(batch, target.features(batch, drafter.captures), NoChance())
    return [state.unflatten(0, (len(batch.tokens), -1)) for state in seen]


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_each_state_of_training_is_the_one_that_decoding_computes(
    packed: bool, target: Target
) -> None:
    drafter = random_drafter("hass", target, unroll=4).double()
    batch, start = as_batch(TOKENS), 0
    if packed:  # after another text, in the same row
        start = 3
        first = as_batch([5, 9, 8])
        both = zip(vars(first).values(), vars(batch).values(), strict=True)
        parts = Batch(*(torch.cat(pair, dim=1) for pair in both))
        document = torch.tensor([[0] * 3 + [1] * len(TOKENS)])
        batch = Batch(parts.tokens, parts.loss_mask, parts.positions, document)
    trained = training_states(drafter, target, batch)
    assert len(trained) == drafter.unroll == 4
    compared = 0
    for root in range(1, len(TOKENS)):
        prefix = torch.tensor([TOKENS[: root + 1]])
        _, features = target.step(target.begin(), prefix[:, :-1], drafter.captures)
        state = drafter.begin(target.readout, prefix[:, 0], 128)
        drafter.observe(state, prefix[:, 1:], [root], features)
        drafter.expand(state, None)
        for depth in range(min(4, len(TOKENS) - root)):
            if depth:
                drafter.expand(state, torch.tensor([[TOKENS[root + depth]]]))
            # The chain after token `root` began at the feature before it.
            own = trained[depth][:, start + root - 1]
            torch.testing.assert_close(own, state.hidden[:, 0], rtol=1e-9, atol=1e-9)
            compared += 1
    assert compared == 4 * 9 - 3 - 2 - 1


def test_the_first_depth_is_eagle(target: Target) -> None:
    batch = as_batch(TOKENS, [1, 9, 8])
    values: dict[str, Any] = {"losses": {"soft_cross_entropy": 1.0}, "token_weight": 0.1}
    hass = random_drafter("hass", target, **values).double()
    eagle = random_drafter("eagle", target).double()
    ours, theirs = losses_of(hass, target, batch), losses_of(eagle, target, batch)
    assert torch.equal(ours["depth_1"].sum, theirs["depth_1"].sum)
    assert list(ours) == ["feature", "depth_1", "depth_2", "depth_3"]
    assert int(ours["feature"].count) == (8 + 1) + 7 + 6, "one token fewer at each depth"


def test_no_gradient_flows_from_a_depth_to_the_features_that_it_reads(target: Target) -> None:
    """As in the authors' code; a depth's keys and values do learn from the losses of later ones."""
    drafter = random_drafter("hass", target, unroll=2).double()
    batch = as_batch(TOKENS)
    features = target.features(batch, drafter.captures)
    step, made = drafter._step, []

    def watch(*given: Any) -> Any:
        state, newest = step(*given)
        made.append(state)
        return state, newest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "_step", watch)
        terms = drafter(batch, features, NoChance())
    (through,) = torch.autograd.grad(
        terms["depth_2"].sum, made[0], retain_graph=True, allow_unused=True
    )
    assert not bool(through.any())
    (own,) = torch.autograd.grad(weighted_sum(terms), made[0])
    assert bool(own.any())


def test_the_choice_is_eagle_with_three_depths_and_top_k() -> None:
    config: Any = typed(compose("train", ["drafter=hass"]), TrainConfig).drafter
    assert (config.name, config.unroll, config.top_k) == ("hass", 3, 10)
    assert config.losses == {"soft_cross_entropy": 0.1, "top_k": 1.0}
    assert (config.feature_weight, config.token_weight) == (1.0, 1.0)
    plain: Any = typed(compose("train", ["drafter=eagle"]), TrainConfig).drafter
    assert (plain.unroll, plain.until_first_miss) == (1, False)


def test_settings_that_say_nothing_are_refused(target: Target) -> None:
    with pytest.raises(ValueError, match=r"drafter\.unroll must be at least 1, got 0"):
        build("eagle", target.spec, unroll=0)
    refusal = r"drafter\.until_first_miss must be false with drafter\.unroll=1, .*got True"
    with pytest.raises(ValueError, match=refusal):
        build("eagle", target.spec, until_first_miss=True)
    drafter = build("eagle", target.spec, unroll=2, until_first_miss=True)
    assert isinstance(drafter, Eagle)
