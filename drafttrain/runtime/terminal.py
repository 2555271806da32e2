"""What a user sees while waiting: progress with ETA, on a terminal or as plain lines in a log."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from drafttrain.runtime.untrusted_input import escaped


class Terminal(Console):
    """Prints text from outside as it is: without markup, and with control characters escaped."""

    def __init__(self, width: int | None = None, soft_wrap: bool = False) -> None:
        super().__init__(
            width=width, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False
        )
        if os.environ.get("FORCE_COLOR") and not self.is_terminal:
            self._color_system = ColorSystem.STANDARD

    @property
    def is_terminal(self) -> bool:
        """Whether a bar can move here; FORCE_COLOR, rich's own sign, asks for colours in a pipe."""
        if self._force_terminal is not None or not os.environ.get("FORCE_COLOR"):
            return super().is_terminal
        try:
            return self.file.isatty()
        except (AttributeError, ValueError):  # not a file, or a closed one
            return False

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments to draw, their texts without control characters."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(escaped(text), style)


console = Terminal(soft_wrap=True)
LINE_EVERY_S = 10.0  # how often a log that is not a terminal gets a line


class Ticker(Protocol):
    """Advances a progress bar; `note` is a short text next to it, such as the current loss."""

    def __call__(self, advance: int = 1, note: str = "") -> None: ...


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
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
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
        times = f"{_duration(now - start)} left {_duration(left)}"
        print(escaped(f"{description} {count}/{total} {times} {note}".rstrip()), flush=True)

    yield tick
