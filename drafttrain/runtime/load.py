"""How busy other processes, and other machines on the same host, keep the processors."""

import time
from dataclasses import dataclass

import psutil
import torch

from drafttrain.runtime.terminal import Tell

WINDOW_S = 10.0  # one measurement of the speed
FIRST_WINDOWS = 3  # the fastest of these is the speed of the start
FAR_BELOW = 0.5  # of the speed of the start: beside one busy process two thirds are left
MORE_CORES = 0.5  # that others must use for the slowness to be theirs


@dataclass(frozen=True)
class Busy:
    """What others used of this machine: cores on average, and the share that the host took."""

    others_cores: float
    stolen: float


class LoadWatch:
    """Watches the machine from its creation on."""

    def __init__(self) -> None:
        self._began, self._own, self._all = time.perf_counter(), _own_s(), psutil.cpu_times()

    def so_far(self) -> Busy:
        """Return what others used since the beginning."""
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        before, now = self._all, psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(before, name) for name in now._fields}
        stolen = spent.get("steal", 0.0)
        # A guest's time is within the user's, and waiting for a disk is idle.
        unused = ("idle", "iowait", "steal", "guest", "guest_nice")
        used = sum(seconds for name, seconds in spent.items() if name not in unused)
        others = max(used - (_own_s() - self._own), 0.0)
        cores = psutil.cpu_count() or 1
        return Busy(round(others / elapsed, 2), round(stolen / elapsed / cores, 4))


class SpeedWatch:
    """Says once if other processes have made a command far slower than it was at its start."""

    def __init__(self, what: str, say: Tell) -> None:
        self.what, self.say = what, say
        self.first: list[tuple[float, float]] = []  # speed, and cores that others used
        self.slow = 0  # windows in a row
        self._begin()

    def _begin(self) -> None:
        self.load, self.count, self.seconds, self.since = LoadWatch(), 0, 0.0, time.monotonic()

    def add(self, count: int, seconds: float | None = None) -> None:
        """Count tokens, and the seconds that they took; None: those since the last call."""
        now = time.monotonic()
        self.count += count
        self.seconds += now - self.since if seconds is None else seconds
        self.since = now
        if self.seconds < WINDOW_S:
            return
        speed, others = self.count / self.seconds, self.load.so_far().others_cores
        self._begin()
        if len(self.first) < FIRST_WINDOWS:
            self.first.append((speed, others))
            return
        before, others_before = max(self.first)
        theirs = others - others_before > MORE_CORES
        self.slow = self.slow + 1 if theirs and speed < FAR_BELOW * before else 0
        if self.slow == 2:
            several = torch.get_num_threads() > 1
            advice = "set hardware.threads=1, which waits least for them, or end them"
            self.say(
                f"{self.what}: {speed:,.0f} tokens/s, and {before:,.0f} at the start; other "
                f"processes use {others:.1f} of {psutil.cpu_count()} cores: "
                f"{advice if several else 'end them'}"
            )


def _own_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system
