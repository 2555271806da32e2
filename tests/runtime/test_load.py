"""How busy others keep the machine: this process and a waiting disk do not count."""

from typing import NamedTuple

import psutil
import pytest

from drafttrain.runtime import load
from drafttrain.runtime.load import Busy, LoadWatch


class CpuTimes(NamedTuple):
    user: float
    system: float
    idle: float
    iowait: float
    steal: float
    guest: float


def test_what_others_used_is_what_this_process_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = iter([100.0, 110.0]), iter([5.0, 14.0])
    times = iter([CpuTimes(50, 10, 900, 5, 0, 3), CpuTimes(62, 11, 904, 6, 2, 6)])
    monkeypatch.setattr(load.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(load, "_own_s", lambda: next(own))
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(times))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    # In 10 s: 13 s of processor time used, 9 of them here; 2 s of 20 stolen.
    assert LoadWatch().so_far() == Busy(others_cores=0.4, stolen=0.1)


def test_a_real_machine_can_be_asked() -> None:
    busy = LoadWatch().so_far()
    assert busy.others_cores >= 0
    assert 0 <= busy.stolen <= 1
