"""EAGLE-1: what it reads, and what an engine that reads both inputs is told (arXiv:2401.15077)."""

from pathlib import Path

import pytest
import torch
from builders import drafter_config, model_config
from test_drafters import as_batch, losses_of, random_drafter

from drafttrain.core.types import Batch, TargetFeatures
from drafttrain.core.vocab import DraftVocab
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


# A reduced vocabulary (FR-Spec): rows of the target's head, chosen once, saved with the weights


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_the_most_frequent_tokens_are_drafted_and_ties_go_to_the_lowest_ids(
    name: str, target: Target
) -> None:
    drafter, size = drafter_config(name, draft_vocab_size=5).build(target.spec), 97
    counts = torch.zeros(size, dtype=torch.long)
    counts[[90, 40, 7]] = torch.tensor([3, 2, 1])
    drafter.prepare(counts, target.readout)
    assert drafter.vocab is not None
    assert drafter.vocab.target_ids.tolist() == [0, 1, 7, 40, 90]
    assert "target_ids" in drafter.state_dict()


@pytest.mark.parametrize("size", [None, 97, 16384])
def test_a_small_vocabulary_stays_whole(size: int | None, target: Target) -> None:
    drafter = random_drafter("eagle", target, draft_vocab_size=size)
    assert drafter.vocab is None
    assert "target_ids" not in drafter.state_dict()


@pytest.mark.parametrize("name", ["eagle", "mtp", "hass"])
@torch.no_grad()
def test_reduced_logits_are_those_of_the_whole_vocabulary_without_the_others(
    name: str, target: Target
) -> None:
    """Of weights that were loaded: the map comes with them, and without one they know all."""
    made = random_drafter(name, target, draft_vocab_size=30).double()
    reduced = random_drafter(name, target).double()
    reduced.load_weights(made.state_dict())
    whole = drafter_config(name, draft_vocab_size=30).build(target.spec).double().eval()
    whole.load_weights({n: t for n, t in made.state_dict().items() if n != "target_ids"})
    assert reduced.vocab is not None
    assert whole.vocab is None
    tokens = torch.tensor([[1, 20, 33, 41, 20, 52]])
    _, features = target.step(target.begin(), tokens[:, :-1], made.captures)
    logits = []
    for drafter in (whole, reduced):
        state = drafter.begin(target.readout, tokens[:, 0], 20)
        drafter.observe(state, tokens[:, 1:], [5], features)
        logits.append([drafter.expand(state, None), drafter.expand(state, tokens[:, :1])])
    for one, other in zip(*logits, strict=True):
        torch.testing.assert_close(one[..., reduced.vocab.target_ids], other)


@torch.no_grad()
def test_features_are_learned_where_the_token_cannot_be_drafted(target: Target) -> None:
    """The loss on tokens leaves such a position out and says so; the regression does not."""
    drafter = random_drafter("eagle", target)
    assert isinstance(drafter, Eagle)
    batch = as_batch([1, 20, 33, 41, 20, 52])
    whole = losses_of(drafter, target, batch)
    features = target.features(batch, ())
    choices = target.readout.logits(features.final_hidden)[0, 1:-1].argmax(-1)
    drafter.reduce(DraftVocab.of(choices[:1], 97))
    reduced = losses_of(drafter, target, batch)
    assert torch.equal(reduced["feature"].sum, whole["feature"].sum)
    uncovered = reduced["depth_1"].uncovered
    assert uncovered is not None
    assert int(uncovered) == int((choices != choices[0]).sum()) > 0
    assert torch.equal(reduced["depth_1"].count, whole["depth_1"].count)
