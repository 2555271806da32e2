"""EAGLE-3.1 as a choice of conf/drafter: what it changes, and that it trains."""

import torch
from test_drafters import NoChance, as_batch

from drafttrain.config.compose import load_choice
from drafttrain.core.types import weighted_sum
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.target.model import Target


def composed(name: str, target: Target) -> Eagle3:
    torch.manual_seed(0)
    drafter = load_choice("drafter", name).build(target.spec)
    drafter.prepare(torch.ones(target.spec.vocab_size, dtype=torch.long), target.readout)
    return drafter


def test_the_choice_differs_from_eagle3_by_its_two_norms_alone(target: Target) -> None:
    one, other = (vars(load_choice("drafter", name)) for name in ("eagle3_1", "eagle3"))
    differing = {key: one[key] for key in one if one[key] != other[key]}
    assert differing == {"name": "eagle3_1", "lr": 4e-3, "fc_norm": True, "norm_output": True}
    theirs, ours = composed("eagle3", target), composed("eagle3_1", target)
    added = {name for name, _ in ours.named_parameters()} - {
        n for n, _ in theirs.named_parameters()
    }
    assert added == {f"fc_norm.{place}.weight" for place in range(3)}


def test_the_composed_choice_trains(target: Target) -> None:
    drafter, batch = composed("eagle3_1", target), as_batch(list(range(20, 40)))
    features = target.features(batch, drafter.captures)
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=1e-2), []
    for _ in range(8):
        loss = weighted_sum(drafter(batch, features, NoChance()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses
    assert drafter.fc_norm is not None
    assert all(
        not torch.equal(norm.weight, torch.ones_like(norm.weight)) for norm in drafter.fc_norm
    )
