"""DFlash-2 against its equations: its losses, what a node reads, and what it cannot draft."""

import math
from typing import Any

import pytest
import torch
from published import block_reference, dflash2_reference, selector_scores
from test_drafters import NoChance, as_batch, build, random_drafter
from torch import Tensor

from drafttrain.core.chance import SeededChance
from drafttrain.core.ops.chunked_losses import chunk_limits
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Batch, TargetFeatures, weighted_sum
from drafttrain.decode.draft import draft
from drafttrain.decode.policy import tree_of_widths
from drafttrain.drafters.dflash import DFlash, DFlashState
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.target.model import Target

TEXT = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 4, 30]
FEW_WORDS = [1, 20, 33, 41, 20, 33, 20, 41, 33, 20, 41, 41, 7, 20, 9]
SIZE, TOP_K = 4, 24  # a quarter of the vocabulary: some of the text's tokens are candidates


def dflash2(target: Target, **overrides: Any) -> DFlash2:
    settings = {"block_size": SIZE, "selector_top_k": TOP_K, "conv_group_size": 8} | overrides
    drafter = random_drafter("dflash2", target, **settings)
    assert isinstance(drafter, DFlash2)
    return drafter


def begun(drafter: DFlash, target: Target, text: list[int]) -> DFlashState:
    tokens = torch.tensor([text])
    _, features = target.step(target.begin(), tokens[:, :-1], drafter.captures)
    readout = target.readout.to(drafter.fc.weight.dtype)
    state = drafter.begin(readout, tokens[:, 0], 40)
    drafter.observe(state, tokens[:, 1:], [len(text) - 1], features)
    return state


def shape_of(drafter: DFlash2) -> dict[str, Any]:
    shape = {**vars(drafter.shape), "eps": drafter.shape.rms_norm_eps, "scaling": None}
    shape |= {"heads": shape["num_attention_heads"], "kv_heads": shape["num_key_value_heads"]}
    return shape | {"theta": shape["rope_theta"]}


@pytest.mark.parametrize("until_first_miss", [False, True])
@torch.no_grad()
def test_training_is_the_equations_for_every_block(until_first_miss: bool, target: Target) -> None:
    """Every anchor and place, in float64: DFlash's loss, and the selector's on its candidates."""
    drafter = dflash2(target, until_first_miss=until_first_miss).double()
    states_of = block_reference(shape_of(drafter), 2, SIZE, drafter.mask_token_id)
    batch, readout = as_batch(FEW_WORDS), target.readout.to(torch.float64)
    readout.head[FEW_WORDS[1:4]] *= 4  # likely or unlikely: some of them are right
    features = target.features(batch, drafter.captures)
    captured = torch.stack([features.captured[layer][0] for layer in drafter.captures]).double()
    tensors = dict(drafter.state_dict()) | {"the target's head": readout.head}
    depths = SIZE - 1
    expected, counts, right = torch.zeros(2, depths).double(), [0] * depths, [0] * depths
    missing = left_out = 0
    for anchor in range(1, len(FEW_WORDS) - 1):
        states = states_of(tensors, captured[:, :anchor], readout.embedding, FEW_WORDS)[1:]
        counted = {"depth": True, "selector": True}
        for place, label in enumerate(FEW_WORDS[anchor + 1 : anchor + 1 + depths]):
            logits, before = readout.head @ states[place], FEW_WORDS[anchor + place]
            likely = logits.sort(descending=True).indices[:TOP_K].tolist()
            known = label in likely
            missing += not known
            among = likely if known else [*likely[:-1], label]
            scores = selector_scores(tensors, states[place], before, among)
            hit = known and among[int(scores.argmax())] == label
            if counted["depth"]:
                expected[0, place] -= logits.log_softmax(-1)[label]
            if counted["selector"]:
                expected[1, place] -= scores.log_softmax(-1)[among.index(label)]
            left_out += not counted["selector"]
            counts[place] += 1
            right[place] += hit
            if until_first_miss:
                counted["depth"] &= bool(logits.argmax() == label)
                counted["selector"] &= hit
    assert 0 < missing < sum(counts), "some of the text's tokens are candidates, and some are not"
    assert 0 < sum(right)
    assert (left_out > 0) == until_first_miss
    layers = dict(zip(drafter.captures, captured[:, None], strict=True))
    given = TargetFeatures(layers, features.final_hidden.double(), readout)
    with chunk_limits(1, 3):  # candidates of three positions at a time
        losses = drafter(batch, given, NoChance())
    gamma = drafter.config.gamma
    for row, name in enumerate(("depth", "selector")):
        terms = [losses[f"{name}_{k}"] for k in range(1, SIZE)]
        found = torch.stack([term.sum for term in terms])
        torch.testing.assert_close(found, expected[row], rtol=1e-5, atol=1e-9)
        assert [int(term.count) for term in terms] == counts
        assert [term.weight for term in terms] == [math.exp(-k / gamma) for k in range(depths)]
    assert [int(losses[f"selector_{k}"].correct) for k in range(1, SIZE)] == right  # type: ignore
    assert len(losses) == 2 * depths


@torch.no_grad()
def test_drafting_is_the_training_forward(target: Target) -> None:
    """Where the text's token is a candidate, its loss is that of the logits when decoding."""
    drafter = dflash2(target)
    known = 0
    for anchor in range(1, len(TEXT) - SIZE + 1):
        state, newest = begun(drafter, target, TEXT[: anchor + 1]), None
        for depth in range(1, SIZE):
            label = TEXT[anchor + depth]
            logits = drafter.expand(state, newest)[0, 0]
            assert int(logits.isfinite().sum()) == TOP_K
            newest = torch.tensor([[label]])
            mask = [[place == anchor + depth for place in range(len(TEXT))]]
            batch = as_batch(TEXT, mask=mask)
            losses = drafter(batch, target.features(batch, drafter.captures), NoChance())
            if logits[label].isfinite():
                known += 1
                found = losses[f"selector_{depth}"].sum
                torch.testing.assert_close(found, -logits.log_softmax(-1)[label])
    assert known > 3


def test_a_place_reads_the_token_before_it_and_no_other_after_the_anchor(target: Target) -> None:
    drafter, anchor, depth = dflash2(target), 5, 3
    mask = [[place == anchor + depth for place in range(len(TEXT))]]
    batch = as_batch(TEXT, mask=mask)
    features = target.features(batch, drafter.captures)
    found = []
    for changed in (None, anchor + depth - 2, anchor + depth - 1, anchor + depth + 1):
        text = batch.tokens.clone()
        if changed is not None:
            text[0, changed] = 70
        other = Batch(text, batch.loss_mask, batch.positions, batch.document)
        terms = drafter(other, features, NoChance())
        found.append([float(terms[f"{name}_3"].sum.detach()) for name in ("depth", "selector")])
    # Its own logits read none of them: DFlash's loss stays.
    assert found[0] == found[1] == found[3]
    assert found[0][0] == found[2][0]
    assert found[0][1] != found[2][1]


@torch.no_grad()
def test_children_depend_on_their_parents_token_alone(target: Target) -> None:
    drafter = dflash2(target)
    state = begun(drafter, target, TEXT)
    first = drafter.expand(state, None)
    assert first.shape == (1, 1, target.spec.vocab_size)
    tokens = torch.tensor([[33, 41, 33]])
    logits = drafter.expand(state, tokens, torch.tensor([[0, 0, 0]]))
    assert torch.equal(logits[:, 0], logits[:, 2])
    likely = logits[0, 0].isfinite()
    assert torch.equal(likely, logits[0, 1].isfinite())
    assert int(likely.sum()) == TOP_K
    selector = drafter.candidate_selector
    assert state.hidden is not None
    apart = selector.predecessor_codebook[41] - selector.predecessor_codebook[33]
    apart = apart * (selector.hidden_projection.weight @ state.hidden[0, 1])
    expected = selector.successor_codebook[likely] @ apart
    torch.testing.assert_close((logits[0, 1] - logits[0, 0])[likely], expected)


@torch.no_grad()
def test_what_is_recorded_is_what_was_drawn_from_and_only_candidates_are(target: Target) -> None:
    drafter, sampling = dflash2(target, selector_top_k=3).double(), Sampling(0.7, 0, 1.0)
    policy, chance = tree_of_widths([2, 2, 2]), SeededChance(0)
    state = begun(drafter, target, TEXT)
    proposal = draft(policy, drafter, state, sampling, chance, [0], [len(TEXT)])
    probs = proposal.draft_probs
    assert probs is not None
    assert bool(((probs > 0).sum(-1) == 3).all())
    reference = dflash2_reference(shape_of(drafter), 2, SIZE, drafter.mask_token_id, 3)
    _, features = target.step(target.begin(), torch.tensor([TEXT[:-1]]), drafter.captures)
    captured = torch.stack([features.captured[layer][0] for layer in drafter.captures]).double()
    readout = state.readout
    tensors = dict(drafter.state_dict()) | {"the target's head": readout.head}
    assert proposal.tree is not None
    parents = proposal.tree.parents[0].tolist()
    tokens = proposal.tokens[0].tolist()
    for node, parent in enumerate([-1, *range(6)]):  # the root, then the nodes that have children
        path: list[int] = []
        while parent >= 0:
            path, parent = [tokens[parent], *path], parents[parent]
        text = [*TEXT, *path, 0, 0, 0]
        scores = reference(tensors, captured, captured[0], readout.embedding, text)[len(path)]
        expected = (scores / 0.7).softmax(-1)
        torch.testing.assert_close(probs[0, node], expected, rtol=1e-5, atol=1e-9)
    for place, token in enumerate(tokens):
        source = 0 if parents[place] < 0 else parents[place] + 1
        assert probs[0, source, token] > 0


def test_it_begins_as_dflash_does_but_for_the_selector(target: Target) -> None:
    """Convolutions are the identity at first; the features are read as DFlash reads them."""
    own = build("dflash2", target.spec, block_size=SIZE)
    assert isinstance(own, DFlash2)
    plain = build("dflash", target.spec, block_size=SIZE)
    shared = {name: own.state_dict()[name] for name in plain.state_dict()}
    plain.load_state_dict(shared)
    batch = as_batch(TEXT)
    features = target.features(batch, own.captures)
    theirs = plain(batch, features, NoChance())
    ours = own(batch, features, NoChance())
    for name, term in theirs.items():
        torch.testing.assert_close(ours[name].sum, term.sum)


def test_the_selectors_loss_has_its_weight_and_reaches_the_states(target: Target) -> None:
    batch = as_batch(TEXT)
    norms, totals = [], []
    for weight in (0.5, 1.0):
        drafter = dflash2(target, selector_weight=weight, losses={"hard_cross_entropy": 1e-9})
        losses = drafter(batch, target.features(batch, drafter.captures), NoChance())
        totals.append(float(weighted_sum(losses).detach()))
        weighted_sum(losses).backward()
        gradient = drafter.fc.weight.grad
        assert gradient is not None
        norms.append(float(gradient.norm()))
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-3)
    assert totals[1] == pytest.approx(2 * totals[0], rel=1e-3)


@torch.no_grad()
def test_candidates_logits_are_the_targets_readouts(target: Target) -> None:
    """Scaled, capped and with a bias, for a few tokens alone."""
    from dataclasses import replace

    readout = replace(target.readout, head_bias=torch.randn(97), logit_scale=0.3, soft_cap=2.0)
    states, tokens = torch.randn(5, 32), torch.randint(97, (5, 7))
    expected = readout.logits(states).gather(-1, tokens)
    found: Tensor = readout.logits_of(tokens, states)
    torch.testing.assert_close(found, expected)


def test_what_cannot_be_is_named(target: Target) -> None:
    for key, value, need in (
        ("conv_kernel_size", 9, r"be at most drafter\.block_size \(8\)"),
        ("conv_group_size", 0, "be at least 1"),
        ("conv_group_size", 5, r"divide the hidden size of \S+, 32"),
        ("selector_rank", 0, "be at least 1"),
        ("selector_top_k", 98, "be at most 97, the tokens of"),
        ("selector_weight", 0.0, "be above 0"),
    ):
        with pytest.raises(ValueError, match=rf"drafter\.{key} must {need}"):
            build("dflash2", target.spec, **{"block_size": 8, key: value})


def test_greedy_drafts_follow_the_selector_rather_than_each_places_choice(target: Target) -> None:
    drafter = dflash2(target)
    state = begun(drafter, target, TEXT)
    proposal = draft(tree_of_widths([1] * 3), drafter, state, GREEDY, SeededChance(0), [0], [12])
    assert state.logits is not None
    alone = state.logits[0].argmax(-1)
    assert not torch.equal(proposal.tokens[0], alone)
