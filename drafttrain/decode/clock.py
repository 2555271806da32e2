"""What a decoding's parts take, without a wait of the host for the device."""

import time
from collections.abc import Callable, Sequence

import torch

from drafttrain.decode.rows import Row

Moment = float | torch.cuda.Event
Spans = Sequence[tuple[Moment, Moment]]
Kind = tuple[int, int]  # of a pass: the depth and the nodes of its proposals
PARTS = ("draft_s", "verify_s", "other_s")


class Clock:
    """Charges rows for spans between moments, all of them at the end.

    A moment is a time of the host, in seconds; on CUDA an event in the queue of the device's work,
    as a time of the host says nothing there unless the host first waits for that work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.charges: list[tuple[Sequence[Row], Kind | None, dict[str, Spans]]] = []

    def now(self) -> Moment:
        """Return the moment at which the work so far is done."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def charge(self, rows: Sequence[Row], kind: Kind | None = None, **parts: Spans) -> None:
        """Charge rows in equal shares, which add up to the wall time, for each part's spans.

        kind: of a pass, which is then listed among each row's passes.
        """
        self.charges.append((rows, kind, parts))

    def settle(self) -> None:
        """Add the seconds of all charges to the rows; on CUDA this waits."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for rows, kind, parts in self.charges:
            shares = {
                part: round(sum(seconds(*span) for span in spans) / len(rows), 7)
                for part, spans in parts.items()
            }
            draft, verify, other = (shares.get(part, 0.0) for part in PARTS)
            for row in rows:
                for part, share in shares.items():
                    setattr(row.stats, part, getattr(row.stats, part) + share)
                if kind is not None:
                    row.stats.passes.append((len(rows), *kind, draft, verify, other))
        self.charges.clear()


def seconds(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments of one clock."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that first waits for the device's queued work."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
