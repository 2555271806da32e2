"""Inflate a drafter by the ratio of an inflated target, without changing what it computes."""

from typing import Any

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
    before = count_parameters(drafter)
    for layer in layers:
        old = layer.gate_proj.out_features
        widen(layer, max(old, round(old * ratio / MULTIPLE) * MULTIPLE))
    after = count_parameters(drafter)
    return f"{name} inflated from {parameters(before)} to {parameters(after)}"
