"""`until_first_miss`: a drafted token counts as long as its chain was right, in every family.

The chains are drafted one by one, as decoding does, along the text.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from test_drafters import build, losses_of, random_drafter, stepped_logits
from test_golden_losses import spec_of

from drafttrain.core.losses import REJECTION, DepthLossConfig, FirstMiss
from drafttrain.core.ops import chunked_losses as chunked
from drafttrain.core.ops.chunked_losses import OutputHead, TargetProbs
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, weighted_sum
from drafttrain.core.vocab import DraftVocab
from drafttrain.target.model import Target, load_target

# Family: its settings, and whether it is right where it drafts the text's token.
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "eagle3": ({"unroll": 4, "draft_vocab_coverage": 1.0}, False),
    "hass": ({"unroll": 4, "token_weight": 1.0}, False),
    "hydra_heads": ({}, True),
    "medusa": ({}, True),
    "dflash": ({"block_size": 5}, True),
    "dspark": ({"block_size": 5}, True),
    "hydra_pp": ({}, True),
    "mlp_speculator": ({}, True),
    "mtp": ({"unroll": 4}, False),
    "p_eagle": ({"draft_vocab_coverage": 1.0}, False),
    "redrafter": ({}, True),
}
ONE, OTHER = 20, 33
SPEC = spec_of(5)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    """A target that predicts two tokens only, so that a random drafter is often right."""
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    with torch.no_grad():
        kept = target.readout.head[[ONE, OTHER]] * 8
        target.readout.head.zero_()[[ONE, OTHER]] = kept
    return target


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three positions a chunk: chains reach from one into the next."""
    monkeypatch.setattr(chunked, "FEWEST_POSITIONS", 3)
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", {"cpu": 1})


def drafter_of(family: str, target: Target, **changes: Any) -> Any:
    drafter = random_drafter(family, target, **FAMILIES[family][0], **changes)
    with torch.no_grad():
        for name, tensor in drafter.named_parameters():
            if "lm_head" in name:
                tensor[:, : SPEC.hidden_size].copy_(target.readout.head)
    return drafter


def text(length: int = 26) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return [[ONE, OTHER][int(torch.randint(2, (), generator=generator))] for _ in range(length)]


def batch_of(tokens: list[int], trained: list[bool]) -> Batch:
    """Two texts in one row: the second is the first's beginning."""
    half = len(tokens) // 2
    rows = tokens + tokens[:half]
    document = torch.tensor([[0] * len(tokens) + [1] * half])
    positions = torch.tensor([[*range(len(tokens)), *range(half)]])
    return Batch(
        torch.tensor([rows]), torch.tensor([trained + trained[:half]]), positions, document
    )


TRAINED = [index > 4 and index not in (11, 12, 19) for index in range(26)]


@torch.no_grad()
def by_chain(
    family: str, drafter: Any, target: Target, tokens: list[int], trained: list[bool]
) -> tuple[list[float], int]:
    """The loss of each depth, chain after chain; and how many losses a miss left out."""
    config, on_text = drafter.config, FAMILIES[family][1]
    sums, left_out = [0.0] * drafter.unroll, 0
    _, features = target.step(target.begin(), torch.tensor([tokens]), ())
    says = target.readout.logits(features.final_hidden)[0]
    for root in range(1, len(tokens) - 1):
        right = True
        for depth in range(1, min(drafter.unroll, len(tokens) - 1 - root) + 1):
            ahead = root + depth
            if not trained[ahead]:
                right = True  # nothing is drafted there, and so nothing is missed
                continue
            logits = stepped_logits(drafter, target, tokens, root, depth)
            probs, label = says[ahead - 1].softmax(-1), tokens[ahead]
            left_out += not right
            if right:
                loss = config.token_loss(logits, probs[None], torch.tensor([label]))
                sums[depth - 1] += float(loss)
            right &= int(logits.argmax()) == (label if on_text else int(probs.argmax()))
    return sums, left_out


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_chains_that_end_at_their_first_miss(
    family: str, target: Target
) -> None:
    tokens, half = text(), 13
    drafter = drafter_of(family, target, until_first_miss=True)
    first, left_out = by_chain(family, drafter, target, tokens, TRAINED)
    second, _ = by_chain(family, drafter, target, tokens[:half], TRAINED[:half])
    expected = torch.tensor(first) + torch.tensor(second)
    terms = losses_of(drafter, target, batch_of(tokens, TRAINED))
    found = torch.stack([terms[name].sum for name in drafter.depth_terms])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert left_out > 10
    assert bool((found > 0).all()), "some chains are right at all depths"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_out_is_still_counted_and_has_no_gradient(family: str, target: Target) -> None:
    batch = batch_of(text(), TRAINED)
    found = {}
    for until in (False, True):
        drafter = drafter_of(family, target, until_first_miss=until)
        terms = losses_of(drafter, target, batch)
        weighted_sum(terms).backward()
        norms = [p.grad.norm() for p in drafter.parameters() if p.grad is not None]
        found[until] = terms, torch.stack(norms)
    for name, term in found[True][0].items():
        plain = found[False][0][name]
        assert (term.count, term.correct, term.weight) == (plain.count, plain.correct, plain.weight)
        assert bool(term.sum <= plain.sum)
    first, *deeper = drafter.depth_terms
    assert torch.equal(found[True][0][first].sum, found[False][0][first].sum)
    for name in deeper:
        assert bool(found[True][0][name].sum < found[False][0][name].sum)
    assert not torch.allclose(found[True][1], found[False][1])
    assert bool(found[True][1].isfinite().all())


@pytest.mark.parametrize("family", FAMILIES)
def test_validation_measures_every_position(family: str, target: Target) -> None:
    batch, sums = batch_of(text(), TRAINED), []
    for until in (False, True):
        drafter = drafter_of(family, target, until_first_miss=until)
        assert isinstance(drafter.config, DepthLossConfig)
        drafter.config = replace(drafter.config, losses=REJECTION)
        sums.append(
            [float(term.sum.detach()) for term in losses_of(drafter, target, batch).values()]
        )
    assert sums[0] == sums[1]


def test_a_token_outside_the_vocabulary_is_a_miss() -> None:
    """The target predicts 0, then what the drafter lacks, then 0 and 0; the drafter always 0."""
    readout = Readout(torch.eye(3), torch.eye(3))
    final = torch.eye(3)[[0, 2, 0, 0]] * 5
    probs = TargetProbs(readout, final, torch.arange(4), DraftVocab.of(torch.tensor([0, 1]), 3))
    head = OutputHead(torch.tensor([[2.0], [0.0]]))
    config = build("eagle3", SPEC, losses={"hard_cross_entropy": 1.0}).config
    config = replace(config, until_first_miss=True)
    rows, columns = torch.zeros(4, dtype=torch.long), torch.arange(2, 6)
    chains = FirstMiss.along_text(config, rows, columns, 2)
    assert chains is not None
    places, labels = torch.zeros(2, 4, dtype=torch.long), torch.tensor([0, 0, 0, 0])
    states = [torch.ones(1, 1), torch.ones(1, 1)]
    sums, counts, correct, uncovered = chunked.chunked_losses(
        config, [1.0, 1.0], [head], states, places, labels, probs, first_miss=chains
    )
    one = float(torch.tensor([2.0, 0.0]).logsumexp(0) - 2)
    assert chains.right.tolist() == [[True, False, True, True], [True, False, False, True]]
    assert sums.tolist() == pytest.approx([3 * one, 2 * one])
    assert (counts.tolist(), correct.tolist()) == ([4, 4], [3, 3])
    assert uncovered.tolist() == [1, 1]


def test_a_second_pass_over_the_chunks_leaves_out_the_same() -> None:
    """Weighted otherwise, the sums are differentiated by computing the chunks again."""
    torch.manual_seed(0)
    states = [torch.randn(6, 4).double().requires_grad_() for _ in range(3)]
    head = OutputHead(torch.randn(5, 4).double())
    labels = torch.tensor([0, 3, 1, 4, 2, 2])
    config = build("medusa", SPEC, until_first_miss=True).config
    rows, columns = torch.zeros(6, dtype=torch.long), torch.tensor([2, 3, 4, 5, 8, 9])
    chains = FirstMiss.along_text(config, rows, columns, 3)
    assert chains is not None
    assert chains.before.tolist() == [-1, 0, 1, 2, -1, 4]
    places = torch.arange(6).expand(3, -1)
    sums, *_ = chunked.chunked_losses(
        config, [1.0, 0.5, 0.25], [head], states, places, labels, None, True, chains
    )
    right = chains.right.clone()
    (again,) = torch.autograd.grad(sums[2], states[2], retain_graph=True)
    assert torch.equal(chains.right, right)
    left_out = ~chains.counts(2, torch.arange(6))
    assert 0 < int(left_out.sum()) < 6
    assert torch.equal(again.abs().sum(-1) == 0, left_out)


def test_losses_may_have_no_position() -> None:
    config = build("medusa", SPEC, until_first_miss=True).config
    none = torch.zeros(0, dtype=torch.long)
    chains = FirstMiss.along_text(config, none, none, 2)
    assert chains is not None
    assert chains.right.shape == (2, 0)
