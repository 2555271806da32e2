"""Inflate a model to the size, and so the cost, of another without changing what it computes."""

import copy
from typing import Any

import torch
from torch import nn

from drafttrain.runtime.settings import require
from drafttrain.target.pretrained.limits import without_weights
from drafttrain.target.pretrained.size import parameters, parse_size

MULTIPLE = 64  # feed-forward widths are multiples of it, for which kernels are tuned
NAMES = ("gate_proj", "up_proj", "down_proj")
# A share of an output's largest value: bfloat16 rounding stays below it, another function does not.
TOLERANCE = 0.02


def inflated_width(size: str, model_config: Any, name: str, trust_code: bool) -> int:
    """Return the feed-forward width that brings a model nearest to `size`; no weight is read.

    ValueError if the model is larger than that, or its feed-forward layers are not like Llama's.
    """
    if getattr(model_config, "quantization_config", None) is not None:
        raise ValueError(
            f"model.inflate must be null for quantised weights, and model={name} has them;"
            " inflate the model that they were made from"
        )
    skeleton = without_weights(model_config, trust_code)
    layers = gated_layers(skeleton, name)
    wanted, present = parse_size(size), count_parameters(skeleton)
    need = f"be at least the {parameters(present)} of model={name}"
    require(wanted >= present, "model.inflate", need, size, "; null leaves the model as it is")
    old = layers[0].gate_proj.out_features
    each = 0  # parameters for each column that is added
    for layer in layers:
        gate, up, down = (getattr(layer, key) for key in NAMES)
        biases = sum(linear.bias is not None for linear in (gate, up))
        each += gate.in_features + up.in_features + down.out_features + biases
    return max(old, round((old + (wanted - present) / each) / MULTIPLE) * MULTIPLE)


def inflate(model: Any, width: int, name: str) -> None:
    """Widen the feed-forward layers of a Transformers model in place, on its device.

    ValueError if that would change what a layer computes.
    """
    model.config = copy.deepcopy(model.config)  # drafters are built from the original
    for layer in gated_layers(model, name):
        weight = layer.gate_proj.weight
        probe = torch.linspace(-1, 1, weight.shape[1], device=weight.device)[None].to(weight.dtype)
        with torch.no_grad():
            before = layer(probe).float()
            widen(layer, width)
            change = (layer(probe).float() - before).abs().max()
        if not change <= TOLERANCE * before.abs().max():
            raise _unknown(name, model)
    # so that what is saved loads again
    model.config.get_text_config(decoder=True).intermediate_size = width


def gated_layers(model: Any, name: str) -> list[Any]:
    """Return each decoder layer's feed-forward layer; ValueError unless all are as in Llama."""
    layers: list[Any] = [
        getattr(layer, "mlp", None) for layer in getattr(model.get_decoder(), "layers", [None])
    ]
    gated = all(is_gated(layer) for layer in layers)
    if not gated or len({layer.gate_proj.out_features for layer in layers}) != 1:
        raise _unknown(name, model)
    return layers


def is_gated(module: Any) -> bool:
    """Return whether a module is `down_proj(act(gate_proj(x)) * up_proj(x))`, by its weights."""
    if not isinstance(module, nn.Module):
        return False
    # Any other weights could be those of a norm over the inner width (BitNet has one).
    weighted = {key for key, child in module.named_children() if _weights(child)}
    return weighted == set(NAMES) and all(
        # Subclasses hold packed weights (quantisation), which rows cannot be added to.
        type(getattr(module, key)) is nn.Linear
        for key in NAMES
    )


@torch.no_grad()
def widen(layer: Any, width: int) -> None:
    """Widen a gated feed-forward layer in place; its output stays the same, up to rounding.

    The added rows of gate and up repeat existing ones: they have the same values in every dtype
    and on every device, a realistic size (zeros could meet fast paths), and are finite wherever
    the others are. The added columns of down are zero, so the added rows have no effect.
    """
    gate, up, down = (getattr(layer, key) for key in NAMES)
    old = gate.out_features
    assert width >= old, f"cannot widen from {old} to {width}"
    rows = torch.arange(width, device=gate.weight.device) % old
    for linear in (gate, up):
        for name, values in _weights(linear).items():
            setattr(linear, name, _as(values, values[rows]))
        linear.out_features = width
    columns = down.weight.new_zeros(down.out_features, width)
    columns[:, :old] = down.weight
    down.weight = _as(down.weight, columns)
    down.in_features = width
    if hasattr(layer, "intermediate_size"):
        layer.intermediate_size = width


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers a model's weights hold."""
    return sum(parameter.numel() for parameter in model.parameters())


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights by name; those that a drafter has frozen are buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _as(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return new values as a parameter or a buffer, whichever the old ones are."""
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _unknown(name: str, model: Any) -> ValueError:
    kind = model.config.get_text_config(decoder=True).model_type
    return ValueError(
        f"model.inflate must be null for model={name} ({kind}): its feed-forward layers are not"
        " down_proj(act(gate_proj(x)) * up_proj(x)) with plain weights, of one width, in every"
        " layer, as Llama's are; choose another target to inflate"
    )
