"""Where a frozen target is placed: the choice, with its reason, and loading it there."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich import filesize

from drafttrain.core.ops.packed_weights import pack
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.settings import AUTO
from drafttrain.target.device_map import load_spread
from drafttrain.target.model import Target, load_target
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.models import load_model_config
from drafttrain.target.pretrained.shards import weight_bytes
from drafttrain.target.sharded import load_sharded

# The share of free memory that a target may take: features, logits and the drafter need the rest.
TARGET_SHARE = 0.7
PACKED_SHARE = 0.5  # of what is free then: reordered copies of its weights, which are only faster
SERVING_SHARE = 0.8  # of the memory: weights may take this much, an engine's cache has the rest
SPREADS = (1, 2, 4, 8, 16, 32)  # GPUs that an engine spreads a target over
# With vllm, an engine besides this target gives the features, and this target goes as with auto.
CHOSEN = ("auto", "vllm")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Placement:
    """One of device, device_map and zero3, and why."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return f"target placement: {self.kind} ({self.reason})"


def choose_placement(
    asked: str, config: ModelConfig, dtype: torch.dtype, ranks: Ranks
) -> Placement:
    """Return where the target goes, by the size that the headers of its files give.

    Every rank gets rank 0's choice. No weights are read.
    """
    size, settings = 0, None
    if asked in CHOSEN and can_be_spread(config):
        size, settings = weight_bytes(config, dtype), load_model_config(config)
    free, count = free_bytes(ranks.device), ranks.world_size
    chosen = placement_of(asked, config, settings, size, free, count)
    return Placement(**ranks.broadcast_object(vars(chosen)))


def placement_of(
    asked: str, config: ModelConfig, settings: Any, size: float, free: float, ranks: int
) -> Placement:
    """Return where a target of `size` bytes goes: as asked, or for "auto" the first that has room.

    One device if the weights take at most 70 % of its `free` bytes, else partitioned over the
    ranks (quantised weights cannot be), else spread. The plan, the check before training and
    loading all ask this function. settings: Transformers' own configuration of the target.
    ValueError where the files are read as they are, and the target is changed when it is loaded.
    """
    if asked not in ("auto", "device"):
        config.require_null(f"hardware.target_placement={asked}", "inflate", "adapter")
    if asked not in CHOSEN:
        return Placement(asked, "set by hardware.target_placement")
    if not can_be_spread(config):
        return Placement("device", "random, inflated or adapted weights allow no other")
    told = f"{filesize.decimal(int(size))} of weights, {filesize.decimal(int(free))} of free memory"
    if size <= TARGET_SHARE * free:
        return Placement("device", told)
    told += f", of which the target may take {TARGET_SHARE:.0%}"
    quantized = config.quantization or getattr(settings, "quantization_config", None)
    if ranks > 1 and not quantized:
        return Placement("zero3", f"{told}; partitioned over {ranks} ranks")
    return Placement("device_map", f"{told}; spread over GPUs, host and disk")


def can_be_spread(config: ModelConfig) -> bool:
    """Whether a target may lie on more than one device: weights that are changed may not."""
    drawn = isinstance(config, RandomModelConfig)
    return not drawn and config.inflate is None and config.adapter is None


def load_placed(
    config: ModelConfig, dtype: torch.dtype, ranks: Ranks, placement: Placement
) -> Target:
    """Load the target where it was placed; called by all ranks together."""
    target: Target
    if placement.kind == "zero3":
        target = load_sharded(config, dtype, ranks)
    elif placement.kind == "device_map":
        target = load_spread(config, dtype, str(ranks.device), room_of(ranks.device))
    else:
        assert placement.kind == "device", f"no placement is called {placement.kind}"
        target = load_target(config, dtype, str(ranks.device))
        if ranks.device.type == "cpu":
            spare = PACKED_SHARE * free_bytes(ranks.device)
            pack(target.model, target.readout.head, spare=spare)
    target.placed, target.config = f"{placement} on {ranks.device}", config
    return target


def room_of(device: torch.device) -> dict[int | str, int]:
    """Return the bytes that a target may take on this process's GPUs and on the host.

    Each of several processes on a machine has its own GPU and a share of the host's memory.
    """
    room: dict[int | str, int] = {}
    if device.type == "cuda":
        alone, own = _processes_here() == 1, device.index or 0
        for number in range(torch.cuda.device_count()) if alone else [own]:
            room[number] = int(TARGET_SHARE * free_bytes(torch.device("cuda", number)))
    room["cpu"] = int(TARGET_SHARE * free_bytes(torch.device("cpu")))
    return room


def gpus_to_serve(size: float, memory: float, heads: int, share: float = SERVING_SHARE) -> int:
    """Return on how many GPUs an engine spreads a target: the fewest that hold `size` bytes.

    memory: bytes of a GPU, of which weights may take `share`. heads: of attention, which engines
    deal out equally.
    """
    able = [number for number in SPREADS if heads % number == 0]
    return next((number for number in able if size <= number * memory * share), able[-1])


def engine_gpus(
    asked: int | str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    share: float,
    visible: str | None = None,
) -> int:
    """Return on how many GPUs an engine of this process spreads a target: as asked, or by its size.

    share: of each GPU, which weights may take. visible: the engine's GPUs, as CUDA_VISIBLE_DEVICES
    spells them; None: those of this process. One rank of several has its own GPU alone.
    """
    if asked != AUTO or device.type == "cpu":
        return 1 if asked == AUTO else int(asked)
    here = torch.cuda.device_count() if _processes_here() == 1 else 1
    if visible is not None:
        here = len(visible.split(","))
    heads = load_model_config(config).get_text_config(decoder=True).num_attention_heads
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(here, gpus_to_serve(weight_bytes(config, dtype), memory, heads, share))


def room_for(config: ModelConfig, device: torch.device) -> int:
    """Return the bytes that a target may take of a CPU's memory, or of all GPUs that it may use."""
    room = room_of(device)
    if device.type == "cpu" or not can_be_spread(config):
        return room["cpu" if device.type == "cpu" else device.index or 0]
    return sum(size for place, size in room.items() if place != "cpu")


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or this process's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, _free_in_cgroup()) // _processes_here()


def _free_in_cgroup() -> int:
    # A container's limit, which the machine's own figures do not show.
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = (CGROUP / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return 2**63
    if limit == "max":
        return 2**63
    cached = int(statistics[statistics.index("inactive_file") + 1])
    return max(0, int(limit) - used + cached)


def _processes_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
