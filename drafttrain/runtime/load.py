"""How busy other processes, and other machines on the same host, keep the processors."""

import time
from dataclasses import dataclass

import psutil


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


def _own_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system
