"""An answer as it is decoded, on a terminal: who wrote which text, and how fast it comes."""

from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from drafttrain.decode.stream import ACCEPTED, Piece, Stream
from drafttrain.runtime.untrusted_input import escaped

DRAFTED = "bold green"  # bold stays where a terminal has no colours
LEGEND = "what was drafted and accepted is "


class AnswerView:
    """Shows one answer while it grows: whole lines above, the last one and the numbers below.

    The terminal is left as it was, whatever ends the block. status: the numbers so far.
    """

    def __init__(self, console: Console, status: Callable[[], str], marks: bool) -> None:
        self.console, self.status, self.marks = console, status, marks
        self.line = Text()
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "AnswerView":
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.live.stop()
        self.console.print(self.line, soft_wrap=False)
        self.console.print(Text(self.status(), "dim"), soft_wrap=False)

    def add(self, piece: Piece) -> None:
        """Show more text."""
        style = DRAFTED if self.marks and piece.writer == ACCEPTED else ""
        *whole, rest = escaped(piece.text).split("\n")
        for text in whole:
            self.line.append(text, style)
            self._above(self.line)
            self.line = Text()
        self.line.append(rest, style)
        # What a narrow terminal breaks into lines will not change any more, but for the last.
        *full, self.line = self.line.wrap(self.console, self.console.width) or [Text()]
        for line in full:
            self._above(line)
        self.live.update(Group(self.line, Text(self.status(), "dim")), refresh=True)

    def _above(self, line: Text) -> None:
        self.live.console.print(line, soft_wrap=False)


def numbers_of(stream: Stream, plain: float | None) -> str:
    """Return what an answer has cost so far; plain: tokens per second of the target alone."""
    told = [f"{len(stream.tokens)} tokens"]
    if stream.tokens_per_second is not None and stream.tokens_per_pass is not None:
        told.append(f"{stream.tokens_per_second:.1f} a second")
        told.append(f"{stream.tokens_per_pass:.2f} a pass")
        if plain:
            told.append(f"about {stream.tokens_per_second / plain:.2f} x plain")
    return ", ".join(told)
