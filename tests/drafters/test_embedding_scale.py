"""Embeddings made as large as the states beside them: the factor, what it changes and what not."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from test_drafters import as_batch, build, losses_of, random_drafter, stepped_logits

from drafttrain.core.readout import Readout
from drafttrain.drafters.shared.embedding_scale import EmbeddingScale
from drafttrain.target.model import Target, load_target

TEXT = [1, 20, 33, 41, 20, 52]
FAMILIES = ["eagle", "hydra_heads", "redrafter"]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    """A target whose embeddings are twenty times as small as its final states."""
    target = load_target(model_config(tiny_target_dir), torch.float64, "cpu")
    readout = target.readout
    assert readout.norm is not None
    with torch.no_grad():
        size = readout.norm.square().mean().sqrt() / 20
        readout.embedding.mul_(size / readout.embedding.square().mean().sqrt())
    return target


def readout_of(embedding: float, norm: float | None, scale: float = 1.0) -> Readout:
    """A readout whose tensors have these sizes."""
    signs = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]])
    state = None if norm is None else norm * torch.ones(3)
    return Readout(embedding * signs, signs, state, embedding_scale=scale)


@pytest.mark.parametrize(
    ("readout", "wanted"),
    [
        (readout_of(0.05, 1.0), 16.0),  # of 20
        (readout_of(0.04, 1.0), 32.0),  # of 25
        (readout_of(4.0, 1.0), 0.25),
        (readout_of(0.05, 1.0, scale=20.0), 1.0),  # Gemma: the target multiplies them itself
        (readout_of(0.05, None), 1.0),
        (readout_of(0.0, 1.0), 1.0),
        (readout_of(0.05, 0.0), 1.0),
    ],
)
def test_it_is_the_nearest_power_of_two(readout: Readout, wanted: float) -> None:
    scale = EmbeddingScale(True)
    scale.prepare(readout)
    assert scale.value() == wanted
    assert torch.equal(scale(torch.tensor([0.1, -3.0])), wanted * torch.tensor([0.1, -3.0]))


def test_without_it_embeddings_are_read_as_they_are() -> None:
    scale = EmbeddingScale(False)
    scale.prepare(readout_of(0.05, 1.0))
    embedded = torch.tensor([0.1, -3.0])
    assert scale(embedded) is embedded
    assert not scale.state_dict()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_drafter_reads_embeddings_as_large_as_states(family: str, target: Target) -> None:
    """With the factor, the same as if the target's table were as large."""
    scaled: Any = random_drafter(family, target).double()
    plain: Any = random_drafter(family, target, scale_embeddings=False).double()
    assert float(scaled.scale.factor) == 16.0
    assert {*scaled.state_dict()} - {*plain.state_dict()} == {"scale.factor"}
    found = stepped_logits(scaled, target, TEXT, 3, 2)
    assert not torch.allclose(found, stepped_logits(plain, target, TEXT, 3, 2))
    larger = copy.copy(target)
    larger.readout = replace(target.readout, embedding=16 * target.readout.embedding)
    assert torch.equal(found, stepped_logits(plain, larger, TEXT, 3, 2))


@torch.no_grad()
def test_eagles_files_hold_it_in_fc(target: Target) -> None:
    """An engine, which multiplies nothing, computes the same to the last bit."""
    drafter: Any = random_drafter("eagle", target).double()
    served: Any = random_drafter("eagle", target, scale_embeddings=False).double()
    _, tensors = drafter.to_serving()
    width = target.spec.hidden_size
    assert torch.equal(tensors["fc.weight"][:, :width], 16 * drafter.fc.weight[:, :width])
    assert torch.equal(tensors["fc.weight"][:, width:], drafter.fc.weight[:, width:])
    served.load_weights({name: t for name, t in tensors.items() if name != "fc.bias"})
    batch = as_batch(TEXT)
    ours, theirs = losses_of(drafter, target, batch), losses_of(served, target, batch)
    assert torch.equal(ours["depth_1"].sum, theirs["depth_1"].sum)
    assert torch.equal(ours["feature"].sum, theirs["feature"].sum)


def test_a_table_of_its_own_is_not_scaled(target: Target) -> None:
    drafter: Any = build("eagle", target.spec, own_embedding=True)
    drafter.prepare(torch.ones(target.spec.vocab_size, dtype=torch.long), target.readout)
    assert drafter.scale.value() == 1.0
