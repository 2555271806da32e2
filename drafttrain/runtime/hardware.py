"""How this machine is used: device, dtype and threads, chosen explicitly and reported."""

import functools
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._triton import has_triton

from drafttrain.runtime.config import DTYPES, HardwareConfig

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VERIFIED_TOKENS = 8  # "auto" takes what verifies this many tokens fastest
MEASURED_ROUNDS = 12
CACHE_BYTES = 32 * 2**20  # of a CPU; weights up to here are taken to stay in it


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as settings spell it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def choose_device(config: HardwareConfig, plan: Callable[[], str] | None = None) -> str:
    """Return the device that `config` asks for; set CPU threads, for each rank its share of cores.

    ValueError where there is no such device; plan() returns a command that it names. `join_ranks`
    decides which GPU a rank takes.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        _spin_briefly()
    torch.set_num_threads(config.threads or max(1, num_cores() // ranks_here))
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"hardware.device={config.device} needs a CUDA GPU and a CUDA build of torch, "
            "found none; use hardware=cpu or hardware=auto"
            + (f", or plan the same run: {plan()}" if plan else "")
        )
    if device.startswith("cuda"):
        # It plans anew for every shape, for milliseconds, and our shapes vary from pass to pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


@functools.cache
def _spin_briefly() -> None:
    """Let OpenMP's threads sleep soon after their work, where torch was imported before drafttrain.

    GOMP_SPINCOUNT comes too late then. But libgomp spins a hundred times only (its manual, under
    GOMP_SPINCOUNT) where it has more threads than there are cores: a thread that sleeps for good
    keeps a team of one per core.
    """
    started = threading.Event()

    def keep_a_team() -> None:
        torch.ones(32768 * num_cores()).add_(1)  # as much as gives every core a part
        started.set()
        threading.Event().wait()

    torch.set_num_threads(num_cores())
    threading.Thread(target=keep_a_team, name="openmp-team", daemon=True).start()
    started.wait()


def choose_compiler(config: HardwareConfig, device: torch.device) -> str | None:
    """Return torch.compile's backend for the drafter's layers, or None; ValueError without one."""
    if not config.compile:
        return None
    if device.type == "cuda":
        able, wanted = has_triton(), "Triton, and a GPU that it knows"
    else:
        able, wanted = bool(shutil.which(os.environ.get("CXX", "g++"))), "a C++ compiler (g++)"
    if not able:
        raise ValueError(
            f"hardware.compile=true needs {wanted} on {device.type}, found none; install it, or "
            "use hardware.compile=false"
        )
    return "inductor"


def choose_train_dtype(config: HardwareConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the products in training; auto: bfloat16 where the hardware has it."""
    if config.train_dtype != "auto":
        return TORCH_DTYPES[config.train_dtype]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def choose_draft_dtype(
    config: HardwareConfig, device: torch.device, target_dtype: torch.dtype, num_parameters: int
) -> torch.dtype:
    """Return the dtype that the drafter decodes in: it changes speed and acceptance, no output.

    On a CPU a drafter multiplies by one token at a time. Weights that stay in the cache are as fast
    in float32 (6.3 ms for a chain of four of EAGLE-3 on the tiny target, 6.7 in bfloat16). Others
    are read from memory each time, and then half the bytes take half the time.
    """
    if config.draft_dtype != "auto":
        return TORCH_DTYPES[config.draft_dtype]
    cached = device.type == "cpu" and 4 * num_parameters <= CACHE_BYTES
    return torch.float32 if cached else target_dtype


@dataclass(frozen=True)
class DecodeChoice:
    """How to decode here, and why."""

    dtype: torch.dtype
    threads: int
    reason: str


def choose_decoding(
    config: HardwareConfig,
    device: torch.device,
    pass_of: Callable[[torch.dtype], Callable[[int], None]],
) -> DecodeChoice:
    """Return the dtype and the threads to decode with, and set the threads.

    What `config` leaves open on a CPU is measured: target passes over 1 and over 8 tokens, all
    candidates in turn; what verifies 8 tokens fastest is taken. pass_of(dtype) gives a function
    that runs one pass over so many tokens.
    """
    names = list(DTYPES) if config.dtype == "auto" else [config.dtype]
    every_core = torch.get_num_threads()  # as `choose_device` left it
    threads = [every_core] if config.threads else sorted({1, every_core})
    candidates = [(name, count) for name in names for count in threads]
    if device.type == "cuda":
        name = "bfloat16" if config.dtype == "auto" else config.dtype
        return DecodeChoice(TORCH_DTYPES[name], every_core, f"{name} on {device}")
    if len(candidates) == 1:
        name = names[0]
        return DecodeChoice(TORCH_DTYPES[name], every_core, _candidate(name, every_core))
    passes = {name: pass_of(TORCH_DTYPES[name]) for name in names}
    best: dict[tuple[str, int], dict[int, float]] = {candidate: {} for candidate in candidates}
    for _ in range(MEASURED_ROUNDS):
        for (name, count), seconds in best.items():
            torch.set_num_threads(count)
            for tokens in (1, VERIFIED_TOKENS):
                started = time.perf_counter()
                passes[name](tokens)
                elapsed = time.perf_counter() - started
                # The minimum: on a shared machine any time above it is due to other processes.
                seconds[tokens] = min(elapsed, seconds.get(tokens, elapsed))
    chosen = min(best, key=lambda candidate: best[candidate][VERIFIED_TOKENS])
    torch.set_num_threads(chosen[1])
    told = "; ".join(
        f"{_candidate(*candidate)} {seconds[1] * 1e3:.1f} ms for 1 token, "
        f"{seconds[VERIFIED_TOKENS] * 1e3:.1f} ms for {VERIFIED_TOKENS}"
        for candidate, seconds in best.items()
    )
    reason = f"{_candidate(*chosen)}: verifies {VERIFIED_TOKENS} tokens fastest here ({told})"
    return DecodeChoice(TORCH_DTYPES[chosen[0]], chosen[1], reason)


def _candidate(name: str, threads: int) -> str:
    return f"{name} with {threads} thread{'s' if threads > 1 else ''}"
