"""What this machine is used for: device, dtype and threads, chosen on purpose and said aloud."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VERIFIED_TOKENS = 8  # dtype "auto" asks which type verifies this many tokens fastest


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Settings that change speed and memory, never what is computed (up to the dtype)."""

    name: str
    device: str
    dtype: str
    train_dtype: str
    threads: int
    micro_batch: int

    def __post_init__(self) -> None:
        for key in ("dtype", "train_dtype"):
            if getattr(self, key) not in ("auto", *DTYPES):
                raise ValueError(
                    f"hardware.{key} must be auto, float32 or bfloat16, got {getattr(self, key)}"
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


def choose_device(config: HardwareConfig) -> str:
    """Return the device that `config` asks for and set the CPU threads of this process.

    ValueError where there is no such device. Each of several ranks on a machine takes its share of
    the cores; which GPU a rank takes is for `join_ranks`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.threads or max(1, (cores or 1) // ranks_here))
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"hardware.device={config.device} needs a CUDA GPU and a CUDA build of torch, "
            "found none; use hardware=cpu or hardware=auto"
        )
    return device


def choose_train_dtype(config: HardwareConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the products in training; auto: bfloat16 where the hardware has it."""
    if config.train_dtype != "auto":
        return DTYPES[config.train_dtype]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype for decoding and why; seconds of one target pass by dtype and tokens."""

    dtype: torch.dtype
    reason: str
    seconds: dict[str, dict[int, float]]


def choose_dtype(
    config: HardwareConfig,
    device: torch.device,
    pass_of: Callable[[torch.dtype], Callable[[int], None]],
) -> DtypeChoice:
    """Return the dtype to decode in; auto times passes over 1 and 8 tokens, interleaved.

    pass_of(dtype) gives a function that runs one target pass over so many tokens.
    """
    if config.dtype != "auto":
        return DtypeChoice(DTYPES[config.dtype], f"hardware.dtype={config.dtype}", {})
    if device.type == "cuda":
        return DtypeChoice(torch.bfloat16, "bfloat16: a GPU's fast type", {})
    passes = {name: pass_of(dtype) for name, dtype in DTYPES.items()}
    best: dict[str, dict[int, float]] = {name: {} for name in passes}
    for _ in range(12):
        for name, run in passes.items():
            for tokens in (1, VERIFIED_TOKENS):
                started = time.perf_counter()
                run(tokens)
                elapsed = time.perf_counter() - started
                # The minimum: on a shared machine everything above it is somebody else's work.
                best[name][tokens] = min(elapsed, best[name].get(tokens, elapsed))
    name = min(best, key=lambda name: best[name][VERIFIED_TOKENS])
    told = ", ".join(
        f"{name} {seconds[1] * 1e3:.1f} ms for 1 token and {seconds[VERIFIED_TOKENS] * 1e3:.1f} ms "
        f"for {VERIFIED_TOKENS}"
        for name, seconds in best.items()
    )
    return DtypeChoice(DTYPES[name], f"{name}: verifies fastest here ({told})", best)
