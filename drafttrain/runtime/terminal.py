"""What a user sees while waiting: progress with ETA, on a terminal or as plain lines in a log."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.text import Text

from drafttrain.runtime.rank_process import rank
from drafttrain.runtime.untrusted_input import escaped


class Terminal(Console):
    """Prints text from outside as it is: without markup, and with control characters escaped."""

    def __init__(self, width: int | None = None, soft_wrap: bool = False) -> None:
        super().__init__(
            width=width, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False
        )
        self.is_working = False
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
SPEED_OF_S = 3600.0  # the speed is that of at most so many seconds, and of 1000 steps


Item = TypeVar("Item")


@runtime_checkable
class Ticker(Protocol):
    """Advances a progress bar; `note` is a short text next to it, such as the current loss."""

    def __call__(self, advance: int = 1, note: str = "") -> None: ...


def silent(advance: int = 1, note: str = "") -> None:
    """Advance nothing: a `Ticker` for where nobody watches."""


Tell = Callable[[str], None]  # shows a note beside a bar


def silently(note: str) -> None:
    """Tell nobody: a `Tell`."""


class TimeLeft(ProgressColumn):
    """The time left, by the speed of the last units; the very first, a slow one, never counts."""

    def render(self, task: Task) -> Text:
        return Text(_duration(task.time_remaining))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextmanager
def progress(description: str, total: int, done: int = 0, show: bool = True) -> Iterator[Ticker]:
    """Show progress of `total` units, `done` of them before; only rank 0 passes show=True."""
    if not show:
        yield silent
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeLeft(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=SPEED_OF_S,
        get_time=time.monotonic,
    )
    last = time.monotonic()
    with bar:
        bar.add_task(description, total=total, completed=done, note="")
        (task,) = bar.tasks

        def tick(advance: int = 1, note: str = "") -> None:
            nonlocal last
            bar.update(task.id, advance=advance, note=note)
            now, unfinished = time.monotonic(), task.completed < total or not advance
            if console.is_terminal or (unfinished and now - last < LINE_EVERY_S):
                return
            last = now
            times = f"{_duration(task.elapsed)} left {_duration(task.time_remaining)}"
            text = f"{description} {int(task.completed)}/{total} {times} {note}"
            print(escaped(text.rstrip()), flush=True)

        yield tick


def followed(description: str, items: Sequence[Item], show: bool = True) -> Iterator[Item]:
    """Yield the items and show how many are done."""
    with progress(description, len(items), show=show) as tick:
        for item in items:
            yield item
            tick()


@contextmanager
def working(description: str) -> Iterator[None]:
    """Show that something takes its time whose units nobody counts; on rank 0 only.

    Within another, nothing more is shown.
    """
    if rank() != 0 or console.is_working:
        yield
        return
    console.is_working = True
    try:
        with _spinner(description) if console.is_terminal else _lines(description):
            yield
    finally:
        console.is_working = False


@contextmanager
def _spinner(description: str) -> Iterator[None]:
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as spinner:
        spinner.add_task(description, total=None)
        spinner.refresh()  # what was never drawn would leave an empty line
        yield


@contextmanager
def _lines(description: str) -> Iterator[None]:
    over, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(LINE_EVERY_S):
            text = f"{description} {_duration(time.monotonic() - start)}"
            print(escaped(text), flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
