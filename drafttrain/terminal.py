"""What a user sees while waiting: progress with ETA, on a terminal or as plain lines in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(soft_wrap=True, highlight=False)
LINE_EVERY_S = 10.0  # how often a log that is not a terminal gets a line


@runtime_checkable
class Ticker(Protocol):
    """Advances a progress bar; `note` is a short text beside it, such as the current loss."""

    def __call__(self, advance: int = 1, note: str = "") -> None:
        """Advance by so many units."""
        ...


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextmanager
def progress(description: str, total: int, done: int = 0, show: bool = True) -> Iterator[Ticker]:
    """Show progress of `total` units, `done` of them before; only rank 0 passes show=True."""
    if not show:
        yield lambda advance=1, note="": None
        return
    if console.is_terminal:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        with bar:
            task = bar.add_task(description, total=total, completed=done, note="")
            yield lambda advance=1, note="": bar.update(task, advance=advance, note=note)
        return
    start = last = time.monotonic()
    count = done

    def tick(advance: int = 1, note: str = "") -> None:
        nonlocal last, count
        count += advance
        now = time.monotonic()
        if (count < total or not advance) and now - last < LINE_EVERY_S:
            return
        last = now
        left = (now - start) / max(count - done, 1) * (total - count)
        line = (
            f"{description} {count}/{total} {_duration(now - start)} left {_duration(left)} {note}"
        )
        print(line.rstrip(), flush=True)

    yield tick
    sys.stdout.flush()
