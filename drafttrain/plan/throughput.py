"""Tokens per second of a training run by the roofline: arithmetic, memory traffic, collectives."""

from dataclasses import dataclass

from drafttrain.plan.accelerator import Accelerator
from drafttrain.plan.shapes import Shape
from drafttrain.plan.trace import DrafterCost


@dataclass(frozen=True)
class Load:
    """What one micro batch on one rank is: rows x length tokens, so many of them a step."""

    rows: int
    length: int
    ranks: int
    ranks_here: int  # those of them that are on one machine
    tokens_per_step: int
    loss_share: float
    dtype: str
    checkpointing: bool
    low: bool  # the drafter's weights in bfloat16, beside float32 masters
    on_cpu: bool

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch."""
        return self.rows * self.length

    @property
    def micro_batches(self) -> float:
        """Micro batches of a rank in one optimizer step; under one, rows are fewer."""
        return max(1.0, self.tokens_per_step / (self.tokens * self.ranks))


@dataclass(frozen=True)
class Throughput:
    """Seconds of one optimizer step by what they go to, and what follows."""

    target_s: float  # the larger of arithmetic, reading weights, and gathering shards
    drafter_s: float
    optimizer_s: float  # update and all-reduce
    target_flops: float  # per token
    drafter_flops: float
    bound: str  # what the target's pass waits for
    tokens_per_s: float  # over all ranks

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.target_s + self.drafter_s + self.optimizer_s


def target_flops(shape: Shape, length: int) -> float:
    """Operations per token of the target's pass over whole rows, its output head left out.

    Two per weight, and attention's 4 x heads x head_dim per token that is seen: half of the row.
    """
    query = shape.num_attention_heads * shape.head_dim
    return float(shape.num_layers * (2 * shape.linear_parameters + 2 * query * length))


def drafter_flops(parts: DrafterCost, load: Load) -> float:
    """Operations per token of the drafter's forward and backward, and of the target's head.

    A token sees half of its row.
    """
    step = parts.step(load.checkpointing)
    return step.flops + step.flops_per_key * load.length / 2


def throughput(
    shape: Shape,
    parts: DrafterCost,
    load: Load,
    chip: Accelerator,
    *,
    target_bytes: float,
    sharded: bool,
    stored: bool,
) -> Throughput:
    """Return what the roofline says of one optimizer step.

    sharded: the target's weights are gathered from the other ranks for every micro batch, while the
    layer before is computed. stored: features come from disk, there is no target. The ranks of a
    device map take turns, which the caller tells by load.ranks=1.
    """
    speed = chip.flops[load.dtype] * chip.efficiency
    bandwidth = chip.bandwidth * chip.bandwidth_efficiency
    link = chip.interconnect * chip.bandwidth_efficiency
    tokens, times = load.tokens_per_step / load.ranks, load.micro_batches
    per_token = 0.0 if stored else target_flops(shape, load.length)
    waits = {"arithmetic": tokens * per_token / speed}
    if not stored:
        waits["memory"] = times * target_bytes / bandwidth
        if sharded and load.ranks > 1:
            gathered = target_bytes * (load.ranks - 1) / load.ranks
            waits["gathering"] = times * gathered / link
    bound = max(waits, key=lambda name: waits[name])
    own = drafter_flops(parts, load)
    # AdamW reads weight, gradient and both moments and writes all but the gradient: 28 bytes.
    update = 28 * parts.num_trained / bandwidth
    if load.ranks > 1:
        update += 2 * 4 * parts.num_trained * (load.ranks - 1) / load.ranks / link
    drafting = tokens * own / speed
    return Throughput(
        target_s=waits[bound],
        drafter_s=drafting,
        optimizer_s=update,
        target_flops=per_token,
        drafter_flops=own,
        bound=bound,
        tokens_per_s=load.tokens_per_step / (waits[bound] + drafting + update),
    )
