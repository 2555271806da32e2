"""Inflate a drafter by the ratio of an inflated target, without changing what it computes."""

from typing import Any

import torch

from drafttrain.drafters.base import Drafter
from drafttrain.target.pretrained.inflate import MULTIPLE, count_parameters, is_gated, widen
from drafttrain.target.pretrained.size import parameters


def inflate_drafter(drafter: Drafter, ratio: float) -> str:
    """Widen every gated feed-forward layer `ratio` times, in place; return a note for reports.

    The drafter's output stays the same, up to rounding: the added columns are zero. A drafter
    without such layers stays as it is, and the note says so.
    """
    assert ratio >= 1, f"a drafter is only ever widened, got a ratio of {ratio}"
    name = drafter.config.name
    layers: list[Any] = [module for module in drafter.modules() if is_gated(module)]
    if not layers:
        return f"{name} not inflated (it has no gated feed-forward layer)"
    before = _size(drafter)
    for layer in layers:
        old = layer.gate_proj.out_features
        widen(layer, max(old, round(old * ratio / MULTIPLE) * MULTIPLE))
    return f"{name} inflated from {parameters(before)} to {parameters(_size(drafter))}"


def _size(drafter: Drafter) -> int:
    """Return how many numbers its weights hold, with those that it has frozen."""
    saved = drafter.state_dict().keys()
    frozen = [b for n, b in drafter.named_buffers() if n in saved and b.is_floating_point()]
    return count_parameters(drafter) + sum(map(torch.numel, frozen))
