"""Memory per accelerator while training, by component, for every way to shard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from drafttrain.plan.job import Job
from drafttrain.plan.shapes import Shape
from drafttrain.plan.trace import DrafterCost, Load
from drafttrain.plan.units import gib
from drafttrain.training.engine.config import DeepSpeedConfig

BUCKET = 500_000_000  # elements that DeepSpeed reduces at a time by default
LIVE_LAYERS = 2  # of a sharded target: the one in use, and the one that is being gathered
DOUBT = 0.15  # relative error of what is estimated: activations and features in flight
NAMES = {
    "target": "target's weights",
    "engine": "vLLM, with the target",
    "gathered": "target's layers, gathered",
    "readout": "embedding and head, whole",
    "weights": "drafter's weights",
    "masters": "master weights",
    "copies": "weights cast to bfloat16",
    "gradients": "gradients",
    "moments": "optimizer's state",
    "buckets": "DeepSpeed's buffers",
    "features": "target features",
    "working": "activations",
    "overhead": "context and kernels",
}
STATES = ("weights", "masters", "gradients", "moments")
EXACT = ("target", "engine", "readout", *STATES)


@dataclass(frozen=True)
class Memory:
    """Bytes on one accelerator by component, and on the host."""

    sharding: DeepSpeedConfig
    placement: str
    parts: dict[str, float]
    limit: float
    host: float
    spilled: float = 0.0  # bytes of the target's layers that fit on no accelerator
    host_room: float = inf

    @property
    def total(self) -> float:
        """Bytes that one accelerator needs."""
        return sum(self.parts.values())

    @property
    def least(self) -> float:
        """Bytes that it needs at least: estimates are reduced by their relative error."""
        exact = sum(value for name, value in self.parts.items() if name in EXACT)
        return exact + (self.total - exact - self.parts["overhead"]) * (1 - DOUBT)

    @property
    def fits(self) -> bool:
        """Whether that much memory is there, on the host too."""
        return self.total <= self.limit and self.on_host <= self.host_room

    @property
    def on_host(self) -> float:
        """Bytes that all ranks of a machine need of its host's memory."""
        return self.host + self.spilled


def memory_of(job: Job, sharding: DeepSpeedConfig, placement: str) -> Memory:
    """Return the memory that training takes on one accelerator.

    A device map is one process, whose layers lie on all accelerators and on the host: the first has
    a share of the target like the others, and everything else. With vLLM the target is in the
    training processes as well, to validate.
    """
    shape, parts, load, target_bytes = job.shape, job.parts, job.load, job.target_bytes
    lies = job.placement.kind if placement == "vllm" else placement
    ranks = job.maps if lies == "device_map" else load.ranks
    table = shape.readout_parameters * load.width
    found, spilled = dict.fromkeys(NAMES, 0.0), 0.0
    if placement == "vllm":
        found["engine"] = job.engine_bytes
    if lies == "device":
        found["target"] = target_bytes
    elif lies == "device_map":
        found["target"], spilled = job.spread
        found["readout"] = max(0.0, table - found["target"])
    elif lies == "stored":
        found["readout"] = table
    elif lies == "zero3":
        found["target"] = target_bytes / ranks
        live = min(LIVE_LAYERS, shape.num_layers) if ranks > 1 else 0
        found["gathered"] = live * ((target_bytes - table) / shape.num_layers)
        found["readout"] = table if ranks > 1 else 0.0
    if job.chip.is_cpu and load.width < 4:  # losses multiply by a float32 copy of the head
        found["readout"] += 4.0 * shape.table_parameters
    step = parts.step(load.checkpointing)
    found |= training_bytes(parts, sharding, ranks, load.low, load.averaged)
    if job.muon and not sharding.enabled:  # DeepSpeed has AdamW alone
        found["moments"] -= 4.0 * parts.num_muon
    found["copies"] = step.copies
    found["features"] = job.token_bytes * load.tokens
    theirs = 0.0 if placement in ("stored", "vllm") else target_activations(shape, load)
    found["working"] = max(step.peak(load.tokens), theirs)
    found["overhead"] = job.chip.overhead
    host = found.pop("host")
    # One host memory holds what all ranks of the machine need.
    here = min(ranks, load.ranks_here)
    times = here if job.chip.is_cpu else 1
    found = {name: float(value * times) for name, value in found.items()}
    return Memory(sharding, placement, found, job.chip.memory, host * here, spilled, job.host_room)


def place(job: Job, sharding: DeepSpeedConfig, placement: str) -> Memory:
    """Return the memory of hardware.target_placement; auto: where the run puts the target."""
    return memory_of(job, sharding, job.placement.kind if placement == "auto" else placement)


def refuse_unless_fitting(
    job: Job, sharding: DeepSpeedConfig, placement: str, plan: Callable[[], str]
) -> None:
    """Raise ValueError where training needs more memory than there is, even at the lowest estimate.

    A device map that is asked for may use the disk, slowly; one that auto chooses has the host.
    plan: returns the command that shows what fits.
    """
    asked = place(job, sharding, placement)
    enough = asked.spilled <= asked.host_room or placement == "device_map"
    if asked.least <= asked.limit and enough:
        return
    states = sum(asked.parts[name] for name in STATES)
    text = (
        f"hardware must hold the run: it takes at least {gib(asked.least)} where {job.machine} has "
        f"{gib(asked.limit)} (weights of model={job.target} {gib(asked.parts['target'])}, drafter "
        f"and optimizer {gib(states)}, activations of hardware.micro_batch={job.load.rows} "
        f"{gib(asked.parts['working'])})"
    )
    if asked.least <= asked.limit:
        text = (
            f"hardware must hold the run: {gib(asked.spilled)} of model={job.target} fit on no "
            f"accelerator, and the host has room for {gib(asked.host_room)}; "
            "hardware.target_placement=device_map reads them from the disk in every pass"
        )
    elif asked.placement == "zero3":
        mapped = memory_of(replace(job, maps=1), sharding, "device_map")
        if mapped.least <= mapped.limit and mapped.spilled <= mapped.host_room:
            text += "; hardware.target_placement=device_map fits, in one process, and is slower"
    raise ValueError(
        f"{text}; `{plan()}` shows what fits; hardware.check_fit=false tries all the same"
    )


def target_activations(shape: Shape, load: Load) -> float:
    """Return the peak of the target's pass, besides its weights and the features that stay.

    In the feed-forward layer: the stream, its norm, and three of gate, its activation, up, product.
    """
    query = shape.num_attention_heads * shape.head_dim
    keys = 2 * shape.num_key_value_heads * shape.head_dim
    feed_forward = 2 * shape.hidden_size + 3 * shape.intermediate_size
    attention = 2 * shape.hidden_size + 3 * query + 2 * keys
    return float(load.tokens * load.width * max(feed_forward, attention))


def training_bytes(
    parts: DrafterCost,
    sharding: DeepSpeedConfig,
    ranks: int,
    low: bool = False,
    averaged: bool = False,
) -> dict[str, float]:
    """Return the drafter's weights, gradients and optimizer state on one rank.

    Weights, AdamW's moments and their average are float32 (`memory_of` takes off what Muon does
    without); low: weights are bfloat16, with float32 masters. averaged: a moving average of the
    weights is kept. ZeRO 1 and 2 shard the moments and keep float32 masters of their own share of
    the weights; 2 shards gradients too; 3 also weights, with the two largest whole at a time.
    Copies of the target's weights are float32 and whole.
    """
    whole, trained, stage = parts.num_parameters, parts.num_trained, sharding.stage
    share, width = 1 / ranks if stage else 1.0, 2.0 if low else 4.0
    found = {
        "weights": width * (whole - trained + trained * (share if stage == 3 else 1))
        + 4.0 * parts.num_kept,
        "masters": 4.0 * trained * share if stage or low else 0.0,
        "gradients": 4.0 * trained * (share if stage >= 2 else 1),
        "moments": (12.0 if averaged else 8.0) * trained * share,
        "buckets": 4.0 * int(sharding.zero.get("reduce_bucket_size", BUCKET)) if stage else 0.0,
    }
    if stage == 3:
        found["buckets"] += width * min(LIVE_LAYERS * parts.largest, whole)
    moved = ["masters", "moments", "gradients"] if sharding.offloads_optimizer else []
    moved += ["weights"] if sharding.offloads_weights else []
    host = float(sum(found[name] for name in moved))
    return found | dict.fromkeys(moved, 0.0) | {"host": host}


def combinations(
    shardings: Sequence[DeepSpeedConfig], job: Job, asked: str
) -> list[tuple[DeepSpeedConfig, str]]:
    """Return every way that makes sense: a device map has one process, shards need several.

    vLLM is one of them where it is asked for.
    """
    mapped = job.gpus > 1 or "device_map" in (asked, job.placement.kind)
    return [
        (sharding, placement)
        for placement in ("device", "device_map", "zero3", *["vllm"] * (asked == "vllm"), "stored")
        for sharding in shardings
        if (job.load.ranks > 1 or placement != "zero3")
        and (mapped or placement != "device_map")
        and (placement != "device_map" or not sharding.enabled)
    ]
