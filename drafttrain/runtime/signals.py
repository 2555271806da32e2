"""A request to stop, a scheduler's signal or Ctrl-C: deferred while a step runs, else at once."""

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The second is Ctrl-C, the third what SLURM's --signal often sends, the fourth a closed terminal.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
# A scheduler, a launcher and a shell may each pass the same request on: a signal that comes again
# within this time is an echo.
ECHO_S = 3.0
SHOW_CURSOR = b"\x1b[?25h"  # which a progress bar hides
# The message of `Stopped` after the name of the signal, where nothing more is known.
OF_TRAINING = (
    " outside the steps of training: checkpoints are as they were, and the same command with "
    "run.resume=true resumes"
)


class Stopped(BaseException):
    """The process was asked to end and did so cleanly; the message says how to resume.

    Like KeyboardInterrupt, it is no Exception, so that libraries do not catch it and try something
    else. code: of the exit, 130 for Ctrl-C and else 143.
    """

    def __init__(self, text: str, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(text)
        self.code = code


class StopRequest:
    """Whether this process was asked to stop, once `listening`; other ranks may not know yet.

    how_to_resume: what to say after "stopped by SIGNAL", or "interrupted".
    """

    def __init__(self, how_to_resume: str = OF_TRAINING) -> None:
        self.how_to_resume = how_to_resume
        self.name: str | None = None  # of the signal that came first
        self._deferred = False
        self._meanwhile = ""
        self._raised: Stopped | None = None
        self._first: dict[int, float] = {}  # when a signal came first

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.name is not None

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Receive signals while this is open: one that comes raises Stopped, unless `deferred`.

        A second SIGTERM, or Ctrl-C, ends the process at once.
        """
        try:
            with answered_by(self._receive):
                yield self
        except (Exception, BaseExceptionGroup) as error:
            # C code that calls Python for an item (safetensors through torch, reading a storage)
            # may replace what our handler raised with an error of its own; tasks of asyncio
            # (httpx, as it connects) raise it in a group.
            if self._raised is not None:
                raise self._raised from error
            raise

    @contextmanager
    def deferred(self, meanwhile: str = "") -> Iterator[None]:
        """While this is open, only remember a signal: the caller checks `asked`, or calls `obey`.

        meanwhile: what Ctrl-C is told, where it takes a while until the caller does.
        """
        self._deferred, self._meanwhile = True, meanwhile
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While this is open, let a signal end the process at once: nothing can be lost yet.

        For calls that let no handler run while they wait, such as joining ranks when one is gone.
        """
        with answered_by(signal.SIG_DFL):
            yield

    def obey(self) -> None:
        """Raise Stopped if a signal has come, for code such as asyncio's that hides a handler's."""
        if self.asked:
            raise self.stopped(self.how_to_resume)

    def stopped(self, text: str) -> Stopped:
        """Return a Stopped whose message is how the process was asked to end, and this text."""
        if self.name == "SIGINT":
            return Stopped(f"interrupted{text}", 128 + signal.SIGINT)
        return Stopped(f"stopped by {self.name or 'a signal to another rank'}{text}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A terminal and a launcher may both pass Ctrl-C on to a rank; a single process has no echo.
        echo = ECHO_S if number != signal.SIGINT or "RANK" in os.environ else 0.0
        again = now - self._first.setdefault(number, now) > echo
        if again and number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGINT and os.isatty(2):
                os.write(2, SHOW_CURSOR + b"\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        first, self.name = not self.asked, self.name or signal.Signals(number).name
        if not first:
            return
        if not self._deferred:
            self._raised = self.stopped(self.how_to_resume)
            raise self._raised
        if number == signal.SIGINT and self._meanwhile and os.environ.get("RANK", "0") == "0":
            # Not by sys.stderr, which may be in use right now.
            told = f"\ninterrupted: {self._meanwhile}; Ctrl-C again ends at once\n"
            os.write(2, told.encode())


def answered() -> list[signal.Signals]:
    """Return the signals that ask this process to end, without those that nohup has it ignore."""
    both = signal.SIGHUP, signal.SIGQUIT  # a shell's `cmd &` has the second ignored
    ignored = [number for number in both if signal.getsignal(number) == signal.SIG_IGN]
    return [number for number in SIGNALS if number not in ignored]


@contextmanager
def answered_by(answer: Any, numbers: Iterable[signal.Signals] = ()) -> Iterator[None]:
    """While this is open, handle these signals, else `answered`, with a handler or SIG_DFL."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = {number: signal.signal(number, answer) for number in numbers or answered()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
