"""Time, energy and money of a run by the roofline: arithmetic, memory traffic, collectives."""

from dataclasses import dataclass, replace

from drafttrain.plan.job import Job
from drafttrain.plan.memory import Memory
from drafttrain.training.engine.optimizer import balanced

LAYER_OPERATIONS = 40  # of the target's forward pass: a Llama's, in Transformers
HOST_LINK = 64e9  # bytes per second from the host to a GPU: PCIe 5.0 x16, its specified peak


@dataclass(frozen=True)
class Throughput:
    """Seconds of one optimizer step by its parts, and the speed that follows."""

    target_s: float  # the largest of arithmetic, reading weights, gathering shards, and launches
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


@dataclass(frozen=True)
class Cost:
    """Time, energy and money of training, for one way to shard."""

    memory: Memory
    speed: Throughput
    hours: float
    kilowatt_hours: float
    dollars: float


def cost(job: Job, found: Memory, stored: bool = False) -> Cost:
    """Return time, energy and money of a job, for one way to shard.

    stored: features come from the disk, and a target in memory is there for validation only.
    """
    job = replace(job, muon=job.muon and not found.sharding.enabled)  # DeepSpeed has AdamW alone
    speed = throughput(job, found.placement, stored or found.placement == "stored")
    hours = job.trained_tokens / speed.tokens_per_s / 3600
    # Accelerators wait for each other, and are paid while they do.
    used = job.gpus if found.placement == "device_map" and job.maps == 1 else job.load.ranks
    each = hours if job.chip.is_cpu else hours * used
    return Cost(
        memory=found,
        speed=speed,
        hours=hours,
        kilowatt_hours=each * job.chip.watts / 1000,
        dollars=each * job.price_per_hour,
    )


def throughput(job: Job, placement: str, stored: bool) -> Throughput:
    """Return the times of one optimizer step by the roofline, and no less than its launches take.

    Each layer of a sharded target (zero3) is gathered from the other ranks for every micro batch,
    while the layer before is computed. The accelerators of a device map take turns, and its layers
    on the host are moved to them for every micro batch (a CPU reads them from the disk, for which
    no time is counted).
    """
    shape, load, chip = job.shape, job.load, job.chip
    mapped = placement == "device_map" or (placement, job.placement.kind) == ("vllm", "device_map")
    ranks = job.maps if mapped else load.ranks
    speed = chip.flops[load.dtype] * chip.efficiency
    bandwidth = chip.bandwidth * chip.bandwidth_efficiency
    link = chip.interconnect * chip.bandwidth_efficiency
    # Two operations per weight, and attention's 4 x heads x head_dim per token attended to, half of
    # the row. The output head is counted with the drafter.
    query = shape.num_attention_heads * shape.head_dim
    each = 2 * round(shape.layer.active) + 2 * query * load.length
    target_flops = 0.0 if stored else float(shape.num_layers * each)
    step = job.parts.step(load.checkpointing)
    drafter_flops = step.flops + step.flops_per_key * load.length / 2
    waits = {"arithmetic": load.tokens_per_step / ranks * target_flops / speed}
    # Micro batches of a rank in one step; below one, a micro batch has fewer rows.
    times = max(1.0, load.tokens_per_step / (load.tokens * ranks))
    if not stored:
        waits["launches"] = times * shape.num_layers * LAYER_OPERATIONS * chip.launch_s
        waits["memory"] = times * job.target_bytes / bandwidth
        if placement == "device_map":
            waits["the host"] = times * job.spread[1] / (HOST_LINK * chip.bandwidth_efficiency)
        if placement == "zero3" and ranks > 1:
            waits["gathering"] = times * (job.target_bytes * (ranks - 1) / ranks) / link
    bound = max(waits, key=lambda name: waits[name])
    # AdamW reads weight, gradient and both moments and writes all but the gradient: 28 bytes.
    update = 28 * job.parts.num_trained / bandwidth
    sent = 2 * job.parts.num_trained  # numbers of the gradients' all-reduce
    if job.muon:  # each rank its share of the matrices, by products in bfloat16
        flops = job.parts.muon_flops
        shares = [0.0] * ranks
        for rank, each_flops in zip(balanced(flops, ranks), flops, strict=True):
            shares[rank] += each_flops
        update += max(shares) / (chip.flops["bfloat16"] * chip.efficiency)
        sent += job.parts.num_muon
    if ranks > 1:
        update += 4 * sent * (ranks - 1) / ranks / link
    drafting = load.tokens_per_step / ranks * drafter_flops / speed
    drafting = max(drafting, times * step.operations * chip.launch_s)
    return Throughput(
        target_s=waits[bound],
        drafter_s=drafting,
        optimizer_s=update,
        target_flops=target_flops,
        drafter_flops=drafter_flops,
        bound=bound,
        tokens_per_s=load.tokens_per_step / (waits[bound] + drafting + update),
    )
