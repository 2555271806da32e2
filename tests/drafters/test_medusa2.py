"""Medusa-2: what is trained beside the copies is what the target computes with the changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import drafter_config, model_config
from test_drafters import NoChance, as_batch, build, random_drafter

from drafttrain.commands.setup.store_contents import refuse_without_store
from drafttrain.commands.setup.target_and_drafter import GivenDrafter, change_target, check_members
from drafttrain.core.types import weighted_sum
from drafttrain.drafters.medusa import Medusa
from drafttrain.drafters.medusa2 import Medusa2
from drafttrain.target.model import Target, load_target

TEXTS = [[1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 4, 30], [1, 9, 8, 70, 71]]


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    with torch.no_grad():
        target.readout.head.mul_(8)
    return target


def begun(target: Target, **settings: Any) -> Medusa2:
    """A drafter that has trained nothing yet."""
    torch.manual_seed(0)
    drafter = build("medusa2", target.spec, **settings)
    assert isinstance(drafter, Medusa2)
    drafter.initialise(target.model, None)
    drafter.prepare(torch.arange(target.spec.vocab_size), target.readout)
    return drafter


def moved(target: Target, **settings: Any) -> Medusa2:
    drafter = random_drafter("medusa2", target, **settings)
    assert isinstance(drafter, Medusa2)
    return drafter


@pytest.mark.parametrize("layers", [1, 3, None])
@torch.no_grad()
def test_the_losses_are_those_of_the_target_with_the_changes_in_its_weights(
    layers: int | None, target: Target
) -> None:
    drafter, batch = moved(target, lora_layers=layers), as_batch(*TEXTS)
    features = target.features(batch, drafter.captures)
    found = drafter(batch, features, NoChance())
    with target.changed(drafter.target_changes()):
        tuned = target.features(batch, ())
    heads = Medusa.forward(drafter, batch, tuned, NoChance())
    for number, (name, term) in enumerate(heads.items()):
        torch.testing.assert_close(found[name].sum, term.sum, rtol=1e-5, atol=1e-4)
        assert found[name].weight == pytest.approx(0.2 * 0.8**number)
    head, expected = target.readout.head, torch.zeros(())
    for row, text in enumerate(TEXTS):
        given, ours = (x.final_hidden[row, : len(text) - 1] @ head.T for x in (features, tuned))
        gap = given.log_softmax(-1) - ours.log_softmax(-1)
        expected += (given.softmax(-1) * gap).sum()
    torch.testing.assert_close(found["target"].sum, expected, rtol=1e-5, atol=1e-4)
    assert int(found["target"].count) == sum(len(text) - 1 for text in TEXTS)
    assert found["target"].weight == 1
    assert expected > 1, "the changes must be felt"


def test_it_begins_as_the_target_that_was_given(target: Target) -> None:
    """The first stage of the paper is then Medusa-1's: only the heads have another rate than 0."""
    drafter, batch = begun(target), as_batch(*TEXTS)
    features = target.features(batch, drafter.captures)
    terms = drafter(batch, features, NoChance())
    assert float(terms["target"].sum.detach()) == pytest.approx(0, abs=1e-3)
    heads = Medusa.forward(drafter, batch, features, NoChance())
    for name, term in heads.items():
        torch.testing.assert_close(terms[name].sum, term.sum)
    assert not any(change.any() for change in drafter.target_changes().values())


def test_both_losses_reach_the_adapters(target: Target) -> None:
    drafter, batch = moved(target).train(), as_batch(*TEXTS)
    features = target.features(batch, drafter.captures)
    gradients = []
    for kept in ("target", "head_1"):
        drafter.zero_grad()
        terms = drafter(batch, features, NoChance())
        weighted_sum({kept: terms[kept]}).backward()
        adapters = {n: p for n, p in drafter.named_parameters() if n.startswith("target_layers.")}
        assert len(adapters) == 4 * 7 * 2
        gradients.append([p.grad.clone() for p in adapters.values() if p.grad is not None])
        assert len(gradients[-1]) == len(adapters)
    assert not torch.equal(gradients[0][0], gradients[1][0])


def test_the_targets_rate_is_zero_while_heads_warm_up_and_then_rises(target: Target) -> None:
    drafter = build("medusa2", target.spec, head_warmup=0.2, target_rate=0.5)
    told = [drafter.rates(done)["target_layers."] for done in (0, 0.1, 0.2, 0.3, 0.4, 0.9)]
    assert told == pytest.approx([0, 0, 0, 0.25, 0.5, 0.5])
    at_once = build("medusa2", target.spec, head_warmup=0.0, target_rate=0.5)
    assert at_once.rates(0.0) == {"target_layers.": 0.5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_is_changed_for_a_while_and_then_the_same_to_the_bit(
    dtype: torch.dtype, tiny_target_dir: Path
) -> None:
    target = load_target(model_config(tiny_target_dir), dtype, "cpu")
    drafter = moved(target, lora_layers=2)
    changes, before = drafter.target_changes(), target.model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}

    def interrupted() -> None:
        with target.changed(changes):
            for name, change in changes.items():
                whole = before[f"model.{name}"].float() + change
                assert torch.equal(target.decoder.get_parameter(name), whole.to(dtype))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    after = target.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name.split(".")[1] for name in changes} == {"2", "3"}


def test_the_copies_are_their_own_and_a_checkpoint_holds_none(target: Target) -> None:
    drafter, batch = moved(target), as_batch(*TEXTS)
    features = target.features(batch, drafter.captures)
    before = drafter(batch, features, NoChance())["target"].sum.detach()
    with target.changed(drafter.target_changes()):
        assert torch.equal(drafter(batch, features, NoChance())["target"].sum.detach(), before)
    saved = drafter.state_dict()
    assert {name.split(".")[0] for name in saved} == {"blocks", "lm_heads", "target_layers"}
    assert all("lora_" in name for name in saved if name.startswith("target_layers."))
    again = build("medusa2", target.spec)
    again.load_weights(saved)
    assert not list(again.target_layers.buffers()), "drafting needs none of them"
    for name, change in drafter.target_changes().items():
        assert torch.equal(again.target_changes()[name], change)
    again.initialise(target.model, None)  # as where it is trained further
    assert torch.equal(again(batch, features, NoChance())["target"].sum.detach(), before)


def test_a_target_that_another_drafter_changed_is_refused(target: Target) -> None:
    one, other = (GivenDrafter(moved(target), None, name, ()) for name in ("one", "other"))
    change_target(target, one)
    weight = target.decoder.layers[0].mlp.up_proj.weight.clone()  # type: ignore[union-attr, operator]
    change_target(target, one)
    assert torch.equal(target.decoder.layers[0].mlp.up_proj.weight, weight), "changed once"
    with pytest.raises(ValueError, match="are those that one was trained with, and other needs"):
        change_target(target, other)


def test_no_store_and_no_ensemble_takes_it(target: Target) -> None:
    drafter = build("medusa2", target.spec)
    with pytest.raises(ValueError, match="stored features are of the target as it was; use featu"):
        refuse_without_store(drafter)
    member = GivenDrafter(drafter, None, "member", ())
    joined = GivenDrafter(build("ngram", target.spec), None, "joined", (), members=(member,))
    with pytest.raises(ValueError, match="must draft for the target as it is, got medusa2"):
        check_members(joined, target.spec)


def test_weights_that_are_not_whole_here_are_refused(target: Target) -> None:
    target.check_changeable()
    changes, target.where = moved(target).target_changes(), "layers 0-1 on the disk"
    said = "needs them whole on one device and not quantised, got: layers 0-1 on the disk; use"
    with pytest.raises(ValueError, match=said):
        target.change(changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_layers": 0}, "drafter.lora_layers must be at least 1, or null for all layers"),
        ({"lora_layers": 5}, "drafter.lora_layers must be at most 4, the layers of tiny_test"),
        ({"lora_rank": 0}, "drafter.lora_rank must be at least 1, got 0"),
        ({"heads_weight": 0.0}, "drafter.heads_weight must be above 0"),
        ({"target_rate": 0.0}, "drafter.target_rate must be above 0"),
        ({"head_warmup": 1.0}, r"drafter.head_warmup must be in \[0, 1\), got 1.0"),
        ({"target_losses": {"kl": 1.0}}, "drafter.target_losses must be one of soft_cross_entropy"),
        ({"target_losses": {}}, "drafter.target_losses must have a weight above 0, got none"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_config("medusa2", **settings).build(target.spec)
