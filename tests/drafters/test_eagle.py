"""EAGLE-1: what it reads, and what an engine that reads both inputs is told (arXiv:2401.15077)."""

from pathlib import Path

import pytest
import torch
from builders import drafter_config, model_config
from test_drafters import as_batch, losses_of, random_drafter

from drafttrain.core.types import Batch, TargetFeatures
from drafttrain.drafters.eagle import Eagle
from drafttrain.target.model import Target, load_target


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(model_config(tiny_target_dir), torch.float64, "cpu")


def pairs_of(
    drafter: Eagle, target: Target, features: TargetFeatures, batch: Batch
) -> torch.Tensor:
    hidden = features.final_hidden[:, :-1].to(torch.float64)
    return drafter._pairs(target.readout, batch.tokens[:, 1:], hidden)


@pytest.mark.parametrize("read", ["tokens", "features"])
@torch.no_grad()
def test_an_input_that_is_not_read_changes_nothing(read: str, target: Target) -> None:
    drafter = random_drafter("eagle", target, reads=[read]).double()
    assert isinstance(drafter, Eagle)
    one, two = as_batch([1, 20, 33, 41, 20, 52]), as_batch([1, 21, 34, 42, 21, 53])
    of_one, of_two = (target.features(batch, drafter.captures) for batch in (one, two))
    before = pairs_of(drafter, target, of_one, one)
    other_features = pairs_of(drafter, target, of_two, one)
    other_tokens = pairs_of(drafter, target, of_one, two)
    assert torch.equal(before, other_features) == (read == "tokens")
    assert torch.equal(before, other_tokens) == (read == "features")


@pytest.mark.parametrize("read", ["tokens", "features"])
@torch.no_grad()
def test_an_engine_that_reads_both_inputs_computes_the_same(read: str, target: Target) -> None:
    drafter = random_drafter("eagle", target, reads=[read]).double()
    both = random_drafter("eagle", target, scale_embeddings=False).double()
    _, tensors = drafter.to_serving()
    both.load_weights({name: t for name, t in tensors.items() if name != "fc.bias"})
    batch = as_batch([1, 20, 33, 41, 20, 52])
    ours, theirs = losses_of(drafter, target, batch), losses_of(both, target, batch)
    assert torch.equal(ours["depth_1"].sum, theirs["depth_1"].sum)
    assert torch.equal(ours["feature"].sum, theirs["feature"].sum)


@pytest.mark.parametrize("reads", [[], ["tokens", "tokens"], ["token"]])
def test_what_it_cannot_read_is_refused(reads: list[str]) -> None:
    with pytest.raises(ValueError, match=r"drafter\.reads must be one or both of tokens, features"):
        drafter_config("eagle", reads=reads)
