"""A run as its plan sees it, and what each way to place and shard it costs."""

from dataclasses import dataclass, fields, replace

import torch

from drafttrain.drafters.base import DrafterConfig
from drafttrain.plan.accelerator import Accelerator
from drafttrain.plan.config import PlanSettings
from drafttrain.plan.memory import Memory, Sharding, feature_bytes, memory
from drafttrain.plan.serving import Host, Serving
from drafttrain.plan.shapes import Shape, inflated, settings_of, shape_of
from drafttrain.plan.throughput import Load, Throughput, throughput
from drafttrain.plan.trace import DrafterCost, trace
from drafttrain.runtime.config import HardwareConfig
from drafttrain.target.pretrained.config import ModelConfig


@dataclass(frozen=True)
class Job:
    """A run as its plan sees it."""

    target: str
    drafter: str
    shape: Shape
    parts: DrafterCost
    knobs: tuple[str, ...]  # the drafter's settings
    load: Load
    chip: Accelerator
    max_steps: int
    data_tokens: int | None  # different ones, at most; None: not known without the data
    target_bytes: float
    price_per_hour: float

    @property
    def trained_tokens(self) -> int:
        """Tokens that training reads, every epoch anew."""
        return self.max_steps * self.load.tokens_per_step

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's features."""
        width = 2 if self.load.dtype == "bfloat16" else 4
        return feature_bytes(self.parts.captures, self.shape.hidden_size, width)


@dataclass(frozen=True)
class Cost:
    """What the training of a job takes, one way to shard."""

    memory: Memory
    speed: Throughput
    hours: float
    kilowatt_hours: float
    dollars: float


@dataclass(frozen=True)
class Plan:
    """All that `plan` says."""

    job: Job
    chosen: Cost
    others: tuple[Cost, ...]
    store_tokens: int
    depth: int  # asked for while serving
    host: Host
    serving: tuple[Serving, ...]
    break_even: int | None
    advice: tuple[str, ...]


def describe_job(
    model: ModelConfig,
    drafter: DrafterConfig,
    hardware: HardwareConfig,
    settings: PlanSettings,
    chip: Accelerator,
    *,
    dtype: str,
    ranks: int,
    ranks_here: int,
    max_length: int,
    conversations: int | None,
    max_steps: int,
    tokens_per_step: int,
) -> Job:
    """Count target and drafter. UnknownCostError where the target's architecture is not known.

    ranks_here: of the run's, those that share a machine, and on a CPU its memory.
    max_length: of the data's conversations, in tokens. conversations: how many of them there are
    at most, None where only reading the data would say.
    """
    plain = shape_of(model)
    length = settings.length or min(max_length, model.max_positions or plain.max_positions)
    shape = inflated(plain, model.inflate)
    # A step of fewer tokens than micro batches would hold has fewer rows in them.
    rows = max(1, min(hardware.micro_batch, -(-tokens_per_step // (length * ranks))))
    load = Load(
        rows=rows,
        length=length,
        ranks=ranks,
        ranks_here=ranks_here,
        tokens_per_step=tokens_per_step,
        loss_share=settings.loss_share,
        dtype=dtype,
        checkpointing=hardware.gradient_checkpointing,
        low=hardware.weights_dtype == "bfloat16",
        on_cpu=chip.is_cpu,
    )
    parts = trace(
        drafter,
        plain.spec(model.name, model.max_positions),
        lambda: settings_of(model, plain),
        dtype=getattr(torch, dtype),
        low=load.low,
        trained=load.tokens * load.loss_share,
        share=load.loss_share,
        on_cpu=load.on_cpu,
    )
    price = chip.price_per_hour if settings.price_per_hour is None else settings.price_per_hour
    width = 2 if dtype == "bfloat16" else 4
    return Job(
        target=model.label,
        drafter=drafter.name,
        shape=shape,
        parts=parts,
        knobs=tuple(field.name for field in fields(drafter)),
        load=load,
        chip=chip,
        max_steps=max_steps,
        data_tokens=None if conversations is None else conversations * length,
        target_bytes=shape.bytes(width, model.quantization),
        price_per_hour=price,
    )


def memory_of(job: Job, sharding: Sharding, placement: str) -> Memory:
    """Return what one accelerator holds, one way to shard."""
    return memory(job.shape, job.parts, job.load, job.chip, sharding, placement, job.target_bytes)


def place(job: Job, sharding: Sharding, placement: str) -> Memory:
    """Return the memory of hardware.target_placement; auto: whole where it fits, else sharded."""
    if placement == "vllm":  # the target lives in the engine's process, on accelerators of its own
        return memory_of(job, sharding, "stored")
    if placement != "auto":
        return memory_of(job, sharding, placement)
    whole = memory_of(job, sharding, "device")
    if whole.fits or job.load.ranks == 1:
        return whole
    return memory_of(job, sharding, "zero3")


def cost(job: Job, found: Memory, stored: bool = False) -> Cost:
    """Return time, energy and money of a job, one way to shard.

    stored: features come from the disk, and a target that is held is held for validation alone.
    """
    load = job.load if found.placement != "device_map" else replace(job.load, ranks=1)
    speed = throughput(
        job.shape,
        job.parts,
        load,
        job.chip,
        target_bytes=job.target_bytes,
        sharded=found.placement == "zero3",
        stored=stored or found.placement == "stored",
    )
    hours = job.max_steps * job.load.tokens_per_step / speed.tokens_per_s / 3600
    each = hours * job.load.ranks  # accelerators wait for each other, and are paid while they do
    if job.chip.is_cpu:
        each = hours
    return Cost(
        memory=found,
        speed=speed,
        hours=hours,
        kilowatt_hours=each * job.chip.watts / 1000,
        dollars=each * job.price_per_hour,
    )
