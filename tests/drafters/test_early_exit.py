"""Early exit: the target's first layers are the target's, and the adapter is Kangaroo's."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from published import rms, turned
from test_drafters import NoChance, as_batch, build, random_drafter, stepped_logits
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from drafttrain.core.types import weighted_sum
from drafttrain.drafters.early_exit import EarlyExit
from drafttrain.target.model import Target, load_target

TEXT = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 4, 30]
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    target = load_target(model_config(tiny_target_dir), torch.float64, "cpu")
    with torch.no_grad():
        target.readout.head.mul_(8)  # sharp enough to differ from a drafter
    return target


def begun(target: Target, **settings: Any) -> EarlyExit:
    """A drafter with the target's layers, and an adapter of random weights."""
    drafter = random_drafter("early_exit", target, **settings)
    assert isinstance(drafter, EarlyExit)
    drafter.initialise(target.model, None)
    return drafter.double()


def adapted(drafter: EarlyExit, early: Tensor) -> Tensor:
    """What the head reads at the last position, from the states at the exit: attention, norms."""
    weights, shape = dict(drafter.adapter.state_dict()), drafter.shape
    frequencies = [
        shape.rope_theta ** (-2 * j / shape.head_dim) for j in range(shape.head_dim // 2)
    ]
    normed = rms(early, weights["input_layernorm.weight"], shape.rms_norm_eps)
    q, k, v = (
        (normed @ weights[f"self_attn.{part}_proj.weight"].T).unflatten(1, (-1, shape.head_dim))
        for part in "qkv"
    )
    q, k = turned(q, frequencies), turned(k, frequencies)
    groups = shape.num_attention_heads // shape.num_key_value_heads
    heads = []
    for head in range(shape.num_attention_heads):
        scores = k[:, head // groups] @ q[-1, head] / math.sqrt(shape.head_dim)
        heads.append(scores.softmax(0) @ v[:, head // groups])
    state = early[-1] + torch.cat(heads) @ weights["self_attn.o_proj.weight"].T
    return rms(state, weights["norm.weight"], shape.rms_norm_eps)


@pytest.mark.parametrize("exit_layer", [1, 2])
@torch.no_grad()
def test_training_compares_the_adapted_states_of_the_exit_with_the_target(
    exit_layer: int, target: Target
) -> None:
    """The copies' states are those that the target hands out as captured features."""
    drafter, batch = begun(target, exit_layer=exit_layer), as_batch(TEXT)
    features = target.features(batch, (exit_layer,))
    early, final = features.captured[exit_layer][0], features.final_hidden[0]
    (term,) = drafter(batch, features, NoChance()).values()
    head, expected = target.readout.head, torch.zeros(()).double()
    for ahead in range(1, len(TEXT)):
        logits = head @ adapted(drafter, early[:ahead])
        expected -= ((head @ final[ahead - 1]).softmax(0) * logits.log_softmax(0)).sum()
    torch.testing.assert_close(term.sum, expected, rtol=1e-5, atol=0)  # copied in float32
    assert int(term.count) == len(TEXT) - 1


@torch.no_grad()
def test_every_drafted_token_runs_through_the_targets_first_layers(target: Target) -> None:
    drafter = begun(target)
    for root in (1, 6):
        for depth in range(1, 6):
            text = TEXT[: root + depth]
            early = target.features(as_batch(text), (2,)).captured[2][0]
            found = stepped_logits(drafter, target, TEXT, root, depth)[0]
            expected = target.readout.head @ adapted(drafter, early)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_copies_are_saved_and_moved_but_never_trained(target: Target) -> None:
    drafter = begun(target).float()
    batch = as_batch(TEXT)
    features = target.features(batch, ())
    before = {name: tensor.clone() for name, tensor in drafter.shallow.state_dict().items()}
    assert all(name.startswith("adapter.") for name, _ in drafter.named_parameters())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.5)
    weighted_sum(drafter(batch, features, NoChance())).backward()
    optimizer.step()
    after = drafter.shallow.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    again = build("early_exit", target.spec)
    again.load_weights(drafter.state_dict())
    for depth in (1, 3):
        found = [stepped_logits(each.eval(), target, TEXT, 4, depth) for each in (drafter, again)]
        assert torch.equal(*found)


def other(target: Target, **changes: Any) -> Any:
    """A model like the target, but for these settings."""
    settings = {**target.model.config.to_diff_dict(), **changes}
    settings.pop("dtype", None)
    return AutoModelForCausalLM.from_config(LlamaConfig(**settings)).double().eval()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"rope_parameters": LINEAR | {"rope_theta": 10000.0}}, {"rope_scaling": LINEAR}),
        ({"rms_norm_eps": 0.5}, {}),
    ],
    ids=["positions", "norms"],
)
def test_a_target_whose_layers_compute_something_else_is_refused(
    theirs: dict[str, Any], ours: dict[str, Any], target: Target
) -> None:
    model, drafter = other(target, **theirs), build("early_exit", target.spec)
    with pytest.raises(ValueError, match=r"those of .* differ: try drafter.attention_bias"):
        drafter.initialise(model, None)
    if ours:
        build("early_exit", target.spec, **ours).initialise(model, None)


def test_a_target_whose_layers_have_other_weights_is_refused_by_their_names(target: Target) -> None:
    model = other(target, num_key_value_heads=target.spec.num_attention_heads)
    with pytest.raises(ValueError, match=r"drafter=early_exit copies .*self_attn.k_proj.weight"):
        build("early_exit", target.spec).initialise(model, None)


def test_an_exit_behind_the_last_layer_is_refused(target: Target) -> None:
    layers = target.spec.num_layers
    with pytest.raises(ValueError, match=rf"drafter.exit_layer must be below {layers}, .*got"):
        build("early_exit", target.spec, exit_layer=layers)
    with pytest.raises(ValueError, match=r"drafter.exit_layer must be at least 1, got 0"):
        build("early_exit", target.spec, exit_layer=0)
