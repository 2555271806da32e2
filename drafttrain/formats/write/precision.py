"""In how many bits an export writes which weights."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.serving.layout import Config
from drafttrain.formats import eight_bits
from drafttrain.formats.write.config import FP8
from drafttrain.runtime.hardware import dtype_name


@dataclass(frozen=True)
class Precision:
    """How weights are rounded: those of `eight_bits` (None: none) to 8 bits, others to `dtype`."""

    dtype: torch.dtype
    eight_bits: re.Pattern[str] | None = None

    @property
    def name(self) -> str:
        """The name of it, for people."""
        return dtype_name(self.dtype) if self.eight_bits is None else FP8

    def describe(self) -> str:
        """Return which weights are in how many bits."""
        if self.eight_bits is None:
            return self.name
        return f"{FP8} (fc and the decoder layers' products) and {dtype_name(self.dtype)}"

    @property
    def notes(self) -> list[str]:
        """The notes of a card on it."""
        if self.eight_bits is None:
            return []
        return [
            "The weights of fc and of the decoder layers' products are in 8 bits (float8_e4m3fn "
            "with a scale for each row, by compressed-tensors), which vLLM reads from config.json; "
            "it rounds what they multiply to 8 bits too, token by token."
        ]

    @property
    def eps(self) -> float:
        """The largest relative step between two numbers."""
        return torch.finfo(self.dtype if self.eight_bits is None else eight_bits.FP8).eps

    @property
    def config(self) -> Config:
        """What config.json says of it."""
        own = {} if self.eight_bits is None else {eight_bits.KEY: eight_bits.WRITTEN}
        return {"torch_dtype": dtype_name(self.dtype), **own}

    def takes(self, name: str) -> bool:
        """Return whether a weight, by its name in the files, is written in 8 bits."""
        return self.eight_bits is not None and self.eight_bits.fullmatch(name) is not None

    def rounded(self, name: str, weight: Tensor) -> Tensor:
        """Return what a weight is worth once it is written."""
        if self.takes(name):
            return eight_bits.worth(*eight_bits.quantised(weight))
        return weight.to(self.dtype)

    def stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as files hold them, contiguous copies on the CPU."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            tensor = tensor.detach().cpu()
            if self.takes(name):
                found[name], found[name + eight_bits.SCALE] = eight_bits.quantised(tensor)
            else:
                tensor = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                # A clone: safetensors refuses tensors that share storage, such as views.
                found[name] = tensor.contiguous().clone()
        return found

    def as_engines_compute(self, drafter: Drafter) -> Drafter:
        """Let a drafter round what its weights of 8 bits read, and return it."""
        for name, _ in drafter.named_parameters():
            if self.takes(name):
                module = drafter.get_submodule(name.removesuffix(".weight"))
                module.register_forward_pre_hook(
                    lambda _, given: (eight_bits.rounded_by_token(given[0]), *given[1:])
                )
        return drafter
