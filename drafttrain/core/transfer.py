"""Copies from the host to a device, for which the host does not wait."""

from collections.abc import Sequence

import torch
from jaxtyping import Int, Shaped
from torch import Tensor


def send(tensor: Shaped[Tensor, "*shape"], device: torch.device) -> Shaped[Tensor, "*shape"]:
    """Return a tensor of the CPU on `device`; only page-locked memory is copied without a wait."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_numbers(numbers: Sequence[int], device: torch.device) -> Int[Tensor, " number"]:
    """Return numbers of the host on `device`."""
    return send(torch.tensor(numbers, dtype=torch.long), device)
