"""Learning rates over the steps of a run."""

import math

SCHEDULES = ("cosine", "constant")


def lr_at(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    final_ratio: float,
    schedule: str,
) -> float:
    """Return the learning rate of the update that follows `step` finished ones.

    Linear warm-up reaches `peak` with the last of `warmup_steps` updates; then "constant" stays
    there and "cosine" falls to `final_ratio * peak` at `total_steps` (Loshchilov & Hutter 2017).
    The first update already has a rate above zero, and the last one has one above the final rate,
    so that no update is wasted.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if step >= total_steps:
        return final_ratio * peak
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * (final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * progress)) / 2)
