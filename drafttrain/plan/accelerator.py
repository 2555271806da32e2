"""What trains and serves: an entry of conf/accelerator, or this machine, found and measured."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafttrain.plan.config import AcceleratorConfig

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Accelerator:
    """One accelerator, every number known; flop/s and bytes/s are peaks, `efficiency` of them."""

    name: str
    how: str  # where the numbers are from
    memory: float  # bytes
    flops: dict[str, float]  # by dtype
    bandwidth: float
    interconnect: float
    watts: float
    price_per_hour: float
    efficiency: float  # of training
    serving_efficiency: float
    bandwidth_efficiency: float
    overhead: float
    pass_s: float
    collective_s: float
    is_cpu: bool


def find_accelerator(
    name: str | None,
    device: str,
    dtype: torch.dtype,
    entry: Callable[[str], AcceleratorConfig],
    entries: Callable[[], Mapping[str, AcceleratorConfig]],
    measure_s: float,
) -> Accelerator:
    """Return the accelerator called `name`, or what this machine has for hardware.device.

    entry, entries: how one, and all, of conf/accelerator are read. measure_s: how long a CPU's
    products are timed, and its memory as long again.
    """
    if name is not None and name != "cpu":
        return _known(entry(name), f"Peaks of conf/accelerator/{name}.yaml")
    if name is None and device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.device(device.replace("auto", "cuda")))
        found = matching(properties.name, entries())
        base = found or entry("a100_80gb")
        how = f"{properties.name}, found here"
        if found is None:
            how += f"; not in conf/accelerator: peaks of {base.name} are assumed"
        memory = properties.total_memory / GIB
        return _known(replace(base, memory_gib=memory), how)
    return _processor(entry("cpu"), dtype, measure_s)


def matching(name: str, entries: Mapping[str, AcceleratorConfig]) -> AcceleratorConfig | None:
    """Return the entry with the longest mark that is part of a device's name."""
    marks = {mark: e for e in entries.values() for mark in e.matches if mark in name}
    return marks[max(marks, key=len)] if marks else None


def _known(config: AcceleratorConfig, how: str) -> Accelerator:
    numbers = (config.memory_gib, config.bf16_tflops, config.fp32_tflops, config.bandwidth_gb_s)
    for key, value in zip(
        ("memory_gib", "bf16_tflops", "fp32_tflops", "bandwidth_gb_s"), numbers, strict=True
    ):
        if value is None:
            raise ValueError(f"accelerator={config.name} must state {key}, got null")
    memory, bf16, fp32, bandwidth = (float(value or 0) for value in numbers)
    return Accelerator(
        name=config.name,
        how=how,
        memory=memory * GIB,
        flops={"bfloat16": bf16 * 1e12, "float32": fp32 * 1e12},
        bandwidth=bandwidth * 1e9,
        interconnect=config.interconnect_gb_s * 1e9,
        watts=config.watts,
        price_per_hour=config.price_per_hour,
        efficiency=config.efficiency,
        serving_efficiency=config.serving_efficiency,
        bandwidth_efficiency=config.bandwidth_efficiency,
        overhead=config.overhead_gib * GIB,
        pass_s=config.pass_us / 1e6,
        collective_s=config.collective_us / 1e6,
        is_cpu=config.name == "cpu",
    )


def _processor(config: AcceleratorConfig, dtype: torch.dtype, measure_s: float) -> Accelerator:
    flops, bandwidth = measured_peaks(dtype, measure_s)
    threads = torch.get_num_threads()
    how = (
        f"This machine's processor, measured now in {str(dtype).removeprefix('torch.')} with "
        f"{threads} thread{'s' if threads > 1 else ''}: {flops / 1e9:,.0f} GFLOP/s, "
        f"{bandwidth / 1e9:.0f} GB/s"
    )
    return _known(
        replace(
            config,
            memory_gib=config.memory_gib or host_memory() / GIB,
            bf16_tflops=config.bf16_tflops or flops / 1e12,
            fp32_tflops=config.fp32_tflops or flops / 1e12,
            bandwidth_gb_s=config.bandwidth_gb_s or bandwidth / 1e9,
        ),
        how,
    )


def host_memory() -> float:
    """Return the bytes that this machine, or this container, may use."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = CGROUP.read_text().strip()
    except OSError:
        return total
    return min(total, float(limit)) if limit.isdigit() else total


def measured_peaks(dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """Return this process's flop/s in products of `dtype`, and its bytes/s: the best of many."""
    left, right = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    flops = 2 * 512**3 / _fastest(lambda: left @ right, seconds)
    table = torch.ones(4 << 20)  # larger than most caches
    bandwidth = table.nbytes / _fastest(table.sum, seconds)
    return flops, bandwidth


def _fastest(work: Callable[[], object], seconds: float) -> float:
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
