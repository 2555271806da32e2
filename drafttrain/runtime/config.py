"""What the machine is used for."""

from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "bfloat16")
PLACEMENTS = ("auto", "device", "device_map", "zero3", "vllm")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Settings that change speed and memory, never what is computed (up to the dtype)."""

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
    compile: bool
    gradient_checkpointing: bool
    accelerator: str | None
    check_fit: bool

    def __post_init__(self) -> None:
        for key in ("dtype", "draft_dtype", "train_dtype"):
            if getattr(self, key) not in ("auto", *DTYPES):
                raise ValueError(
                    f"hardware.{key} must be auto, float32 or bfloat16, got {getattr(self, key)}"
                )
        if self.weights_dtype not in DTYPES:
            raise ValueError(
                f"hardware.weights_dtype must be float32 or bfloat16, got {self.weights_dtype}"
            )
        kind = self.device.split(":")[0]
        if kind not in ("auto", "cpu", "cuda"):
            raise ValueError(f"hardware.device must be auto, cpu or cuda[:N], got {self.device}")
        if self.threads < 0:
            raise ValueError(
                f"hardware.threads must be at least 0 (0: every core), got {self.threads}"
            )
        if self.micro_batch < 1:
            raise ValueError(f"hardware.micro_batch must be at least 1, got {self.micro_batch}")
        if self.ranks != "auto" and (type(self.ranks) is not int or self.ranks < 1):
            raise ValueError(
                f"hardware.ranks must be auto or a number of at least 1, got {self.ranks}"
            )
        if self.target_placement not in PLACEMENTS:
            raise ValueError(
                f"hardware.target_placement must be one of {', '.join(PLACEMENTS)}, "
                f"got {self.target_placement}"
            )
