"""Weights of eight bits: how compressed-tensors stores them, and what they are worth.

As vLLM 0.32 reads them (CompressedTensorsW8A8Fp8): a matrix in float8_e4m3fn, and the scale of each
of its rows as NAME_scale; activations are rounded while decoding, each token by its own scale.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from drafttrain.drafters.serving.layout import Config, Files, Unfit
from drafttrain.runtime.untrusted_input import shown

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
LEAST_SCALE = 1 / (512 * LARGEST)  # of a token, in vLLM
SCALE = "_scale"
KEY = "quantization_config"  # of config.json

_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
WRITTEN: Config = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_WEIGHTS, "strategy": "channel"},
            "input_activations": {**_ACTIVATIONS, "strategy": "token"},
        }
    },
    # The kernels of convolutions within a block are few numbers; vLLM would take them for products.
    "ignore": ["lm_head", "re:.*_conv\\.kernel_projection$"],
}


def quantised(
    weight: Float[Tensor, "row column"],
) -> tuple[Float[Tensor, "row column"], Float[Tensor, "row 1"]]:
    """Return a matrix in eight bits, and the scale of each row in float32."""
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (weight.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def worth(weight: Float[Tensor, "row column"], scale: Tensor) -> Float[Tensor, "row column"]:
    """Return what a matrix in eight bits stands for, in float32; scale: of a row, or of all."""
    return weight.float() * scale.float()


def rounded_by_token(values: Float[Tensor, "*token width"]) -> Float[Tensor, "*token width"]:
    """Return activations as vLLM rounds them before a product in eight bits."""
    scale = values.float().abs().amax(dim=-1, keepdim=True) / LARGEST
    scale = scale.clamp(min=LEAST_SCALE)
    rounded = (values.float() * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(FP8)
    return (rounded.float() * scale).to(values.dtype)


@dataclass(frozen=True)
class PlainView:
    """Files in which weights of eight bits are numbers; others are as they are."""

    files: Files

    @property
    def config(self) -> Config:
        """The content of config.json."""
        return self.files.config

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors, without scales."""
        names = self.files.names
        return frozenset(n for n in names if n.removesuffix(SCALE) not in names - {n})

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors whose names begin so; Unfit: not stored as config.json says."""
        held = self.files.tensors(prefix)
        if not self.config.get(KEY):
            return held
        complaints = _unknown(self.config[KEY])
        found = {}
        for name in sorted(name for name in self.names if name.startswith(prefix)):
            weight, scale = held[name], held.get(name + SCALE)
            if (weight.dtype == FP8) != (scale is not None):
                complaints.append(
                    f"{shown(name)} must have a scale where it is {FP8}, and no other"
                )
            elif scale is None:
                found[name] = weight
            elif weight.dim() != 2 or tuple(scale.shape) not in ((len(weight), 1), (1,), ()):
                complaints.append(
                    f"{shown(name + SCALE)} must be of each row or of all of a matrix, got "
                    f"{list(scale.shape)} for {list(weight.shape)}"
                )
            else:
                found[name] = worth(weight, scale)
        if complaints:
            raise Unfit(complaints)
        return found


def _unknown(config: Any) -> list[str]:
    """Return why a quantization_config is of another kind than is read here."""
    groups = config.get("config_groups") if isinstance(config, dict) else None
    weights = [
        group.get("weights") if isinstance(group, dict) else None
        for group in (groups.values() if isinstance(groups, dict) else [])
    ]
    known = bool(weights) and all(
        isinstance(each, dict)
        and each.get("strategy") in ("channel", "tensor")
        and all(each.get(key) == value for key, value in _WEIGHTS.items())
        for each in weights
    )
    if known and all(config.get(key) == WRITTEN[key] for key in ("quant_method", "format")):
        return []
    kind = config.get("quant_method") if isinstance(config, dict) else config
    return [
        "quantization_config must be compressed-tensors' float-quantized, of weights in 8 bits by "
        f"channel or tensor, got {shown(kind)}; other quantised drafters cannot be read"
    ]
