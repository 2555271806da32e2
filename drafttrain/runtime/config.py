"""The settings of the machine: devices, dtypes, threads, ranks, memory."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

from drafttrain.runtime import limits
from drafttrain.runtime.settings import AUTO, Limit, Settings

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
PLACEMENTS = ("auto", "device", "device_map", "zero3", "vllm")


def _is_device(device: str) -> bool:
    kind, colon, number = device.partition(":")
    known = kind in DEVICES or kind == _added_to_torch()
    return known and (not colon or (number.isdecimal() and kind != AUTO))


Dtype = Annotated[str, limits.one_of(AUTO, *DTYPES)]


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Settings):
    """Settings that change speed and memory, never what is computed (up to the dtype)."""

    section = "hardware"

    name: str
    device: Annotated[str, Limit("be auto, cpu or cuda[:N]", _is_device)]
    dtype: Dtype
    draft_dtype: Dtype
    train_dtype: Dtype
    weights_dtype: Annotated[str, limits.one_of(*DTYPES)]
    threads: limits.NonNegativeInt  # 0: every core
    micro_batch: limits.PositiveInt
    ranks: limits.CountOrAuto  # of processes
    target_placement: Annotated[str, limits.one_of(*PLACEMENTS)]
    graphs: Annotated[Any, limits.or_auto("be true or false", lambda _: True, bool)]  # to capture
    compile: bool
    gradient_checkpointing: bool
    accelerator: str | None
    check_fit: bool


def _added_to_torch() -> str | None:
    """Return the device that an extension of torch has added in this process, if any."""
    torch: Any = sys.modules.get("torch")
    name = torch and torch._C._get_privateuse1_backend_name()
    return name if name and hasattr(torch, name) else None
