"""MTP against a dense reference; what its variants read; which settings it has."""

from typing import Any

import pytest
import torch
from published import DEPTH, MTP_NAMES, mtp_reference
from test_drafters import NoChance, as_batch, build, random_drafter

from drafttrain.core.types import TargetFeatures
from drafttrain.drafters.mtp import MTP
from drafttrain.drafters.serving.mtp_layout import in_file
from drafttrain.target.model import Target

TEXT = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 4, 30]


def mtp(target: Target, **overrides: Any) -> MTP:
    drafter = random_drafter("mtp", target, **overrides)
    assert isinstance(drafter, MTP)
    return drafter


@pytest.mark.parametrize("variant", MTP_NAMES)
@torch.no_grad()
def test_training_is_the_definition_for_every_position_and_depth(
    target: Target, variant: str
) -> None:
    """Each position's own pass, densely and in float64, over its text, by the files' own names."""
    drafter = mtp(target, variant=variant, unroll=DEPTH, depth_decay=0.5).double().train()
    shape = {**vars(drafter.shape), "eps": drafter.shape.rms_norm_eps, "scaling": None}
    shape |= {"heads": shape["num_attention_heads"], "kv_heads": shape["num_key_value_heads"]}
    reference = mtp_reference(shape | {"theta": shape["rope_theta"]}, variant)
    batch, readout = as_batch(TEXT), target.readout.to(torch.float64)
    layer = target.spec.num_layers
    found = target.features(batch, (layer,))
    before, after = found.captured[layer].double(), found.final_hidden.double()
    tensors = in_file(drafter.state_dict(), variant) | {"the target's head": readout.head}
    padded = TEXT + [0] * DEPTH  # past the end nothing is compared
    expected, counts = torch.zeros(DEPTH).double(), [0] * DEPTH
    for position in range(len(TEXT) - 2):
        seen = slice(0, position + 1)
        logits = reference(tensors, before[:, seen], after[0, seen], readout.embedding, padded)
        for depth, token in enumerate(TEXT[position + 2 : position + 2 + DEPTH]):
            expected[depth] -= logits[depth].log_softmax(-1)[token]
            counts[depth] += 1
    features = TargetFeatures({layer: before}, after, readout)
    terms = list(drafter(batch, features, NoChance()).values())
    torch.testing.assert_close(torch.stack([t.sum for t in terms]), expected, rtol=1e-5, atol=0)
    assert [int(term.count) for term in terms] == counts
    assert [term.weight for term in terms] == [0.5**depth for depth in range(DEPTH)]


@pytest.mark.parametrize(("variant", "reads_token"), [("mimo", False), ("qwen", True)])
def test_a_variant_reads_one_hidden_state_and_the_token_after_the_first_or_not(
    target: Target, variant: str, reads_token: bool
) -> None:
    drafter = mtp(target, variant=variant)
    batch = as_batch(TEXT, mask=[[place == 4 for place in range(len(TEXT))]])
    layer = target.spec.num_layers
    found = target.features(batch, (layer,))
    before, after = found.captured[layer].requires_grad_(), found.final_hidden.requires_grad_()
    table = target.readout.embedding.clone().requires_grad_()
    readout = type(target.readout)(table, target.readout.head)
    own = TargetFeatures({layer: before}, after, readout)
    drafter(batch, own, NoChance())["depth_1"].sum.backward()
    read, unread = (before, after) if variant == "mimo" else (after, before)
    assert unread.grad is None
    assert read.grad is not None
    assert read.grad[0].abs().amax(-1).nonzero()[:, 0].tolist() == [0, 1, 2]
    assert table.grad is not None
    ids = set(table.grad.abs().amax(-1).nonzero()[:, 0].tolist())
    assert ids == {*TEXT[2:4], *([TEXT[1]] if reads_token else [])}


def test_gradients_flow_through_the_states_of_all_depths(target: Target) -> None:
    drafter = mtp(target).double()
    batch = as_batch(TEXT, mask=[[place == 6 for place in range(len(TEXT))]])
    found = target.features(batch, drafter.captures)
    captured = {layer: hidden.double() for layer, hidden in found.captured.items()}
    readout = target.readout.to(torch.float64)
    features = TargetFeatures(captured, found.final_hidden.double(), readout)
    weight = drafter.layer.input_proj.weight

    def loss() -> torch.Tensor:
        return drafter(batch, features, NoChance())["depth_3"].sum

    loss().backward()
    assert weight.grad is not None
    direction = torch.randn_like(weight)
    along, step = (weight.grad * direction).sum(), 1e-5 * direction
    with torch.no_grad():
        weight.add_(step)
        above = loss()
        weight.sub_(2 * step)
        slope = (above - loss()) / 2e-5
    torch.testing.assert_close(along, slope, rtol=1e-4, atol=0)


def test_it_begins_with_the_targets_final_norm(target: Target) -> None:
    drafter = build("mtp", target.spec)
    readout = type(target.readout)(
        target.readout.embedding, target.readout.head, torch.rand(target.spec.hidden_size)
    )
    drafter.prepare(torch.ones(target.spec.vocab_size, dtype=torch.long), readout)
    assert isinstance(drafter, MTP)
    assert torch.equal(drafter.layer.final_layernorm.weight, readout.norm)


def test_settings_that_do_not_fit_are_named(target: Target) -> None:
    for key, value, need in (
        ("variant", "deepseek", "be one of mimo, qwen"),
        ("own_embedding", True, "be false: it shares the target's"),
        ("unroll", 0, "be at least 1"),
        ("depth_decay", 0.0, r"be in \(0, 1\]"),
    ):
        with pytest.raises(ValueError, match=rf"drafter\.{key} must {need}"):
            build("mtp", target.spec, **{key: value})
