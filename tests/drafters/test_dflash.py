"""DFlash against the paper's equations; what its blocks see; how anchors are drawn."""

import math
from typing import Any

import pytest
import torch
from memory_tracker import PeakBytes
from published import dflash_reference
from test_drafters import NoChance, as_batch, build, in_one_row, random_drafter

from drafttrain.core.types import PAD_DOCUMENT, Batch, TargetFeatures
from drafttrain.drafters.dflash import DFlash, spread_layers
from drafttrain.target.model import Target
from drafttrain.training.loop import StepChance

TEXT = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 4, 30]
SIZE = 5


def dflash(target: Target, **overrides: Any) -> DFlash:
    drafter = random_drafter("dflash", target, **{"block_size": SIZE} | overrides)
    assert isinstance(drafter, DFlash)
    return drafter


def own(features: TargetFeatures, drafter: DFlash) -> torch.Tensor:
    return torch.stack([features.captured[layer][0] for layer in drafter.captures])


@torch.no_grad()
def test_training_is_the_papers_equations_for_every_block(target: Target) -> None:
    """Every anchor of a text and every place in its block, densely and in float64."""
    drafter = dflash(target).double()
    shape = {**vars(drafter.shape), "eps": drafter.shape.rms_norm_eps, "scaling": None}
    shape |= {"heads": shape["num_attention_heads"], "kv_heads": shape["num_key_value_heads"]}
    shape |= {"theta": shape["rope_theta"]}
    reference = dflash_reference(shape, 2, SIZE, drafter.mask_token_id)
    batch, readout = as_batch(TEXT), target.readout.to(torch.float64)
    captured = own(target.features(batch, drafter.captures), drafter).double()
    layers = dict(zip(drafter.captures, captured[:, None], strict=True))
    tensors = dict(drafter.state_dict()) | {"the target's head": readout.head}
    expected, counts = torch.zeros(SIZE - 1).double(), [0] * (SIZE - 1)
    for anchor in range(1, len(TEXT) - 1):
        before = captured[:, :anchor]
        logits = reference(tensors, before, before[0], readout.embedding, TEXT)
        drafted = TEXT[anchor + 1 : anchor + SIZE]
        for place, token in enumerate(drafted):
            expected[place] -= logits[place].log_softmax(-1)[token]
            counts[place] += 1
    final = torch.zeros(1, len(TEXT), target.spec.hidden_size).double()
    losses = drafter(batch, TargetFeatures(layers, final, readout), NoChance())
    terms = list(losses.values())
    torch.testing.assert_close(
        torch.stack([term.sum for term in terms]), expected, rtol=1e-5, atol=0
    )
    assert [int(term.count) for term in terms] == counts
    gamma = drafter.config.gamma
    assert [term.weight for term in terms] == [math.exp(-k / gamma) for k in range(SIZE - 1)]


def test_a_block_reads_features_before_its_anchor_and_no_token_after_it(target: Target) -> None:
    drafter, anchor = dflash(target, block_size=2), 5
    mask = [[place == anchor + 1 for place in range(len(TEXT))]]  # trained from that anchor alone
    batch = as_batch(TEXT, mask=mask)
    features = target.features(batch, drafter.captures)
    leaves = {layer: hidden.requires_grad_() for layer, hidden in features.captured.items()}
    readout = features.readout
    loss = drafter(batch, TargetFeatures(leaves, features.final_hidden, readout), NoChance())
    loss["depth_1"].sum.backward()
    for hidden in leaves.values():
        assert hidden.grad is not None
        assert hidden.grad[0, :anchor].abs().amax(-1).all()
        assert not hidden.grad[0, anchor:].any()
    # It embeds the anchor alone: other tokens reach it by features only, which stay here.
    losses = []
    for changed in (None, anchor - 1, anchor, anchor + 2):
        text = batch.tokens.clone()
        if changed is not None:
            text[0, changed] = 70
        other = Batch(text, batch.loss_mask, batch.positions, batch.document)
        losses.append(float(drafter(other, features, NoChance())["depth_1"].sum.detach()))
    assert losses[0] == losses[1] == losses[3] != losses[2]


def anchors_of(drafter: DFlash, batch: Batch, step: int) -> set[tuple[int, int]]:
    blocks = drafter._blocks(batch, StepChance(3, step))
    at = blocks.columns[blocks.rows, blocks.slots]
    return {
        (int(batch.document[row, column]), int(batch.positions[row, column]))
        for row, column in zip(blocks.rows.tolist(), at.tolist(), strict=True)
    }


def test_anchors_are_drawn_anew_in_each_step_whatever_the_batch(target: Target) -> None:
    drafter = dflash(target, num_anchors=3).train()
    rows = [list(range(20, 32)), list(range(30, 49)), [1, 9, 8]]
    batch = as_batch(*rows)
    real = batch.document >= 0
    packed = Batch(*(tensor[real][None] for tensor in vars(batch).values()))
    drawn = anchors_of(drafter, batch, step=0)
    assert drawn == anchors_of(drafter, packed, step=0) == anchors_of(drafter, batch, step=0)
    assert drawn != anchors_of(drafter, batch, step=1)
    assert [sum(row == document for row, _ in drawn) for document in range(3)] == [3, 3, 1]
    every = set().union(*(anchors_of(drafter, batch, step) for step in range(60)))
    assert every == anchors_of(drafter.eval(), batch, step=0), "each position has its turn"
    assert every == {(row, at) for row in range(3) for at in range(1, len(rows[row]) - 1)}


def test_anchors_are_the_least_draws_of_their_conversation_found_without_comparing_all(
    target: Target,
) -> None:
    drafter, most, length = dflash(target, num_anchors=5).train(), 5, 600
    document = torch.arange(length)[None].expand(2, -1) // torch.tensor([[40], [210]])
    document[1, 590:] = PAD_DOCUMENT
    positions = torch.arange(length).expand(2, -1) % torch.tensor([[40], [210]])
    mask = (torch.rand(2, length) < 0.3) & (document >= 0)
    batch = Batch(torch.randint(5, 90, (2, length)), mask, positions, document)
    after = torch.nn.functional.pad(mask[:, 1:] & (document[:, 1:] == document[:, :-1]), (0, 1))
    chosen = mask & after & (positions > 0)
    draws = torch.randint(0, 30, (2, length, 1)) / 30  # many are equal

    class Draws(NoChance):
        def uniform_like(self, values: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
            return draws

    with PeakBytes() as peak:
        blocks = drafter.train()._blocks(batch, Draws())
    drawn = draws[..., 0]
    before = chosen[:, None] & (drawn[:, None] < drawn[..., None])
    before &= document[:, None] == document[..., None]
    expected = chosen & (before.sum(-1) < most)
    found = torch.zeros_like(chosen)
    found[blocks.rows, blocks.columns[blocks.rows, blocks.slots]] = True
    assert torch.equal(found, expected)
    assert 0 < int(found.sum()) < int(chosen.sum())
    assert peak.peak < 2 * length * length, "one byte for each pair"


def test_a_block_of_training_begins_in_an_answer_and_ends_with_it(target: Target) -> None:
    drafter = dflash(target, block_size=4)
    answers = "0011 1110 1100 1"  # which tokens are of answers
    mask = [[place == "1" for place in answers.replace(" ", "")]]
    batch = as_batch(list(range(20, 20 + len(mask[0]))), mask=mask)
    blocks = drafter.train()._blocks(batch, NoChance())
    anchors = blocks.columns[blocks.rows, blocks.slots].tolist()
    found = dict(zip(anchors, blocks.drafted.int().tolist(), strict=True))
    assert found == {
        2: [0, 1, 1, 1],
        3: [0, 1, 1, 1],
        4: [0, 1, 1, 0],
        5: [0, 1, 0, 0],
        8: [0, 1, 0, 0],
    }
    every = drafter.eval()._blocks(batch, NoChance())
    assert int(every.drafted.sum()) > int(blocks.drafted.sum()), "validation counts all"


def test_fixed_blocks_draft_each_token_once(target: Target) -> None:
    """All of an answer but its first, which is the first block's anchor."""
    drafter, lengths, prompts = dflash(target, anchors="fixed").train(), (20, 19, 30), (1, 1, 12)
    texts = [list(range(20, 20 + length)) for length in lengths]
    mask = [
        [place >= first for place in range(length)]
        for length, first in zip(lengths, prompts, strict=True)
    ]
    depth, batch = drafter.max_depth, as_batch(*texts, mask=mask)
    expected = {
        (row, at)
        for row, (length, first) in enumerate(zip(lengths, prompts, strict=True))
        for at in range(first, length - 1, depth)
    }
    assert anchors_of(drafter, batch, step=0) == anchors_of(drafter, batch, step=1) == expected
    losses = drafter(batch, target.features(batch, drafter.captures), NoChance())
    counts = [int(term.count) for term in losses.values()]
    assert sum(counts) == int(batch.loss_mask.sum()) - len(lengths)
    packed = drafter._blocks(in_one_row(batch), NoChance())
    assert int(packed.drafted.sum()) == sum(counts), "texts of a row do not shift each other's"
    assert len(anchors_of(drafter.eval(), batch, step=0)) > len(expected), "validation counts all"


@torch.no_grad()
def test_the_cache_holds_features_of_committed_tokens_alone(target: Target) -> None:
    drafter = dflash(target)
    batch = as_batch(TEXT, TEXT)
    features = target.features(batch, drafter.captures)
    state = drafter.begin(target.readout, batch.tokens[:, 0], 20)
    drafter.observe(state, batch.tokens[:, 1:7], [6, 4], features.slice(0, 6))
    drafter.expand(state, None)
    drafter.expand(state, torch.tensor([[5], [6]]))
    assert state.cache.lengths == [6, 4]
    drafter.observe(state, batch.tokens[:, 7:9], [1, 2], features.slice(6, 8))
    assert state.cache.lengths == [7, 6]


@torch.no_grad()
def test_a_proposal_takes_one_pass(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, passes = dflash(target), []
    draft = drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda state: passes.append(1) or draft(state))
    batch = as_batch(TEXT)
    features = target.features(batch, drafter.captures)
    state = drafter.begin(target.readout, batch.tokens[:, 0], 20)
    drafter.observe(state, batch.tokens[:, 1:], [len(TEXT) - 1], features.slice(0, len(TEXT) - 1))
    newest = None
    for _ in range(SIZE - 1):
        newest = drafter.expand(state, newest)[:, 0].argmax(-1, keepdim=True)
    assert len(passes) == 1


@torch.no_grad()
def test_where_features_enter_is_seen_from_the_second_layer_on(target: Target) -> None:
    batch, losses = as_batch(TEXT), {}
    for fusion in ("every_layer", "input"):
        for depth in (1, 2):
            drafter = dflash(target, fusion=fusion, num_layers=depth)
            # What the first layer reads is the same, but for its norm, which is made the identity.
            drafter.hidden_norm.weight.fill_(1.0)
            drafter.layers[0].input_layernorm.weight.fill_(1.0)
            features = target.features(batch, drafter.captures)
            term = drafter(batch, features, NoChance())["depth_1"]
            losses[fusion, depth] = float(term.sum)
    assert losses["input", 1] == pytest.approx(losses["every_layer", 1], rel=1e-4)
    assert losses["input", 2] != pytest.approx(losses["every_layer", 2], rel=1e-2)


def test_layers_are_spread_as_published() -> None:
    # Those of z-lab's Qwen3-8B (36 layers) and Llama-3.1-8B drafters, in config.json less one.
    assert spread_layers(36, 5) == (2, 10, 18, 26, 34)
    assert spread_layers(32, 5) == (2, 9, 16, 23, 30)
    assert spread_layers(30, 5) == (2, 9, 15, 21, 28), "halves to the even id"
    assert spread_layers(8, 5) == (2, 3, 4, 5, 6)
    assert spread_layers(4, 5) == (1, 2, 3), "distinct in a shallow target"
    assert spread_layers(12, 1) == (7,)


def test_what_does_not_fit_the_target_is_named(target: Target) -> None:
    with pytest.raises(ValueError, match=r"drafter\.mask_token_id must be one of the .* got 99999"):
        build("dflash", target.spec, mask_token_id=99999)
    with pytest.raises(ValueError, match=r"drafter\.layers must lie in 0\.\..*got \[1, 99\]"):
        build("dflash", target.spec, layers=[99, 1])
    with pytest.raises(ValueError, match=r"drafter\.block_size must be at least 2"):
        build("dflash", target.spec, block_size=1)
    with pytest.raises(ValueError, match=r"drafter\.gamma must be above 0"):
        build("dflash", target.spec, gamma=0.0)
    with pytest.raises(ValueError, match=r"drafter\.fusion must be one of every_layer, input"):
        build("dflash", target.spec, fusion="last")
    with pytest.raises(ValueError, match=r"drafter\.fusion must be every_layer: blocks"):
        build("dflash2", target.spec, fusion="input")
