"""The settings of the machine: devices, dtypes, threads, ranks, memory."""

import sys
from dataclasses import dataclass
from typing import Any

from drafttrain.runtime.settings import Settings

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
PLACEMENTS = ("auto", "device", "device_map", "zero3", "vllm")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Settings):
    """Settings that change speed and memory, never what is computed (up to the dtype)."""

    section = "hardware"

    name: str
    device: str
    dtype: str
    draft_dtype: str
    train_dtype: str
    weights_dtype: str
    threads: int
    micro_batch: int
    ranks: Any  # "auto", or a number of processes
    target_placement: str
    graphs: Any  # "auto", or whether to capture
    compile: bool
    gradient_checkpointing: bool
    accelerator: str | None
    check_fit: bool

    def __post_init__(self) -> None:
        ranks = self.ranks == "auto" or (type(self.ranks) is int and self.ranks >= 1)
        placement = self.target_placement in PLACEMENTS
        either, dtypes = "auto, float32 or bfloat16", ("auto", *DTYPES)
        kind, colon, number = self.device.partition(":")
        device = kind in DEVICES or kind == _added_to_torch()
        device = device and (not colon or (number.isdecimal() and kind != "auto"))
        for key, holds, must in (
            ("dtype", self.dtype in dtypes, either),
            ("draft_dtype", self.draft_dtype in dtypes, either),
            ("train_dtype", self.train_dtype in dtypes, either),
            ("weights_dtype", self.weights_dtype in DTYPES, "float32 or bfloat16"),
            ("device", device, "auto, cpu or cuda[:N]"),
            ("threads", self.threads >= 0, "at least 0 (0: every core)"),
            ("micro_batch", self.micro_batch >= 1, "at least 1"),
            ("ranks", ranks, "auto or a number of at least 1"),
            ("graphs", self.graphs == "auto" or type(self.graphs) is bool, "auto, true or false"),
            ("target_placement", placement, f"one of {', '.join(PLACEMENTS)}"),
        ):
            self.require(key, holds, f"be {must}")


def _added_to_torch() -> str | None:
    """Return the device that an extension of torch has added in this process, if any."""
    torch: Any = sys.modules.get("torch")
    name = torch and torch._C._get_privateuse1_backend_name()
    return name if name and hasattr(torch, name) else None
