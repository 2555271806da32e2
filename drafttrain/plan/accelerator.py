"""The accelerator that trains and serves: an entry of conf/accelerator, or this one, measured."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drafttrain.plan.config import PEAKS, AcceleratorConfig
from drafttrain.plan.units import GIB
from drafttrain.report.phrases import things

CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Accelerator:
    """One accelerator, every number known; flop/s and bytes/s are peaks, `efficiency` a share."""

    name: str
    how: str  # the source of the numbers
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
    launch_s: float
    collective_s: float
    is_cpu: bool


def processor(config: AcceleratorConfig, dtype: torch.dtype, measure_s: float) -> Accelerator:
    """Return this machine's processor as an accelerator: what `config` leaves open is measured.

    measure_s: how long its products are timed, and its memory as long again.
    """
    flops, bandwidth = measured_peaks(dtype, measure_s)
    here = (host_memory() / GIB, flops / 1e12, flops / 1e12, bandwidth / 1e9)
    peaks = dict(zip(PEAKS, here, strict=True))
    stated: dict[str, Any] = {key: getattr(config, key) or peaks[key] for key in PEAKS}
    return accelerator(
        replace(config, **stated),
        f"This machine's processor, measured now in {str(dtype).removeprefix('torch.')} with "
        f"{things(torch.get_num_threads(), 'thread')}: {flops / 1e9:,.0f} GFLOP/s, "
        f"{bandwidth / 1e9:.0f} GB/s",
    )


def matching(name: str, entries: Mapping[str, AcceleratorConfig]) -> AcceleratorConfig | None:
    """Return the entry with the longest mark that is part of a device's name."""
    marks = {mark: e for e in entries.values() for mark in e.matches if mark in name}
    return marks[max(marks, key=len)] if marks else None


def accelerator(config: AcceleratorConfig, how: str) -> Accelerator:
    """Return an entry of conf/accelerator in bytes and seconds; how: the source of its numbers."""
    memory, bf16, fp32, bandwidth = (float(getattr(config, key)) for key in PEAKS)
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
        launch_s=config.launch_us / 1e6,
        collective_s=config.collective_us / 1e6,
        is_cpu=config.name == "cpu",
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
    """Return the flop/s of this process in products of `dtype`, and its bytes/s, best of many."""
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
