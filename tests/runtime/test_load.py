"""How busy others keep the machine: this process and a waiting disk do not count."""

from typing import NamedTuple

import psutil
import pytest

from drafttrain.runtime import load
from drafttrain.runtime.load import Busy, LoadWatch, SpeedWatch


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


def readings(monkeypatch: pytest.MonkeyPatch, others: list[float]) -> None:
    """Let others use so many cores during each measurement of the speed."""
    left = iter(others)

    class Watch:
        def so_far(self) -> Busy:
            return Busy(next(left), 0.0)

    monkeypatch.setattr(load, "LoadWatch", Watch)


@pytest.mark.parametrize(
    ("tokens", "others", "lines"),
    [
        ([4000, 3900, 3800, 700, 700, 700, 700], [0.1, 0, 0, 1, 1, 1, 1], 1),
        ([4000, 3900, 3800, 700, 3900, 700, 3900], [0.1, 0, 0, 1, 1, 1, 1], 0),  # one is a moment
        ([4000, 3900, 3800, 700, 700, 700], [0, 0, 0, 0.1, 0.1, 0.1], 0),  # long texts, say
        ([4000, 3900, 3800, 2700, 2700, 2700], [0, 0, 0, 1, 1, 1], 0),  # its share of the cores
        ([700, 700, 700, 700, 700, 700], [1, 1, 1, 1, 1, 1], 0),  # no slower than it began
    ],
    ids=["far below", "a moment", "not by others", "a fair share", "as it began"],
)
def test_a_command_that_others_made_far_slower_says_so_once_and_what_to_set(
    tokens: list[int], others: list[float], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings(monkeypatch, others)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(load.torch, "get_num_threads", lambda: 2)
    said: list[str] = []
    watch = SpeedWatch("training", said.append)
    for each in tokens:
        for _ in range(10):  # steps of a second
            watch.add(each, 1.0)
    assert len(said) == lines
    if said:
        assert said[0] == (
            "training: 700 tokens/s, and 4,000 at the start; other processes use 1.0 of 2 cores: "
            "set hardware.threads=1, which waits least for them, or end them"
        )


def test_without_a_time_the_time_since_the_last_call_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings(monkeypatch, [0.0] * 9)
    clock = iter(float(second) for second in range(0, 10_000, 4))
    monkeypatch.setattr(load.time, "monotonic", lambda: next(clock))
    watch = SpeedWatch("answers", lambda _: None)
    for _ in range(3):
        watch.add(40)
    assert watch.first == [(10.0, 0.0)]
