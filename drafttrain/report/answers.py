"""An answer as it is decoded, on a terminal: who wrote which text, and how fast it comes."""

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from drafttrain.decode.stream import ACCEPTED, Piece, Stream
from drafttrain.report.phrases import things
from drafttrain.runtime.untrusted_input import escaped

DRAFTED = "bold green"  # bold stays where a terminal has no colours
LEGEND = "what was drafted and accepted is "


class AnswerView:
    """Shows one answer while it grows: whole lines above, the last one and the numbers below.

    The terminal is left as it was, whatever ends the block. plain: tokens per second of the target
    alone, to compare with.
    """

    def __init__(
        self, console: Console, stream: Stream, marks: bool, plain: float | None = None
    ) -> None:
        self.console, self.stream, self.marks, self.plain = console, stream, marks, plain
        self.line = Text()  # the last one, as it was written
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "AnswerView":
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.live.stop()
        self._keep(self.line)
        self._keep(self._numbers())

    def add(self, piece: Piece) -> None:
        """Show more text."""
        style = DRAFTED if self.marks and piece.writer == ACCEPTED else ""
        *whole, rest = escaped(piece.text).split("\n")
        for text in whole:
            self._keep(self.line.append(text, style))
            self.line = Text()
        self.line.append(rest, style)
        # What a narrow terminal breaks into lines will not change any more, but for the last. That
        # one is taken from the text: a line that is broken loses the spaces at its end.
        *full, last = self.line.wrap(self.console, self.console.width) or [Text()]
        for line in full:
            self._keep(line)
        if full:
            self.line = self.line[len(self.line.plain.rstrip()) - len(last.plain.rstrip()) :]
        self.live.update(Group(self.line, self._numbers()), refresh=True)

    def _keep(self, line: Text) -> None:
        self.console.print(line, soft_wrap=False)

    def _numbers(self) -> Text:
        return Text(numbers_of(self.stream, self.plain), "dim")


def show(stream: Stream, console: Console, marks: bool, plain: float | None = None) -> None:
    """Write an answer as it comes: on a terminal by `AnswerView`, else its text alone."""
    if console.is_terminal:
        with AnswerView(console, stream, marks, plain) as view:
            for piece in stream:
                view.add(piece)
        return
    with stream:
        for piece in stream:
            console.file.write(piece.text)
            console.file.flush()
    console.file.write("\n")


def numbers_of(stream: Stream, plain: float | None) -> str:
    """Return what an answer has cost so far, and whether it was cut."""
    told = [things(len(stream.tokens), "token")]
    if stream.tokens_per_second is not None and stream.tokens_per_pass is not None:
        told.append(f"{stream.tokens_per_second:.1f} a second")
        told.append(f"{stream.tokens_per_pass:.2f} a pass")
        if plain:
            told.append(f"about {stream.tokens_per_second / plain:.2f} x plain")
    if stream.cut:
        told.append(f"cut at {stream.limit}")
    return ", ".join(told)
