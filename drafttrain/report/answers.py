"""An answer as it is decoded, on a terminal: who wrote which text, and how fast it comes."""

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from drafttrain.decode.stream import ACCEPTED, Piece, Stream
from drafttrain.report.phrases import things
from drafttrain.runtime.untrusted_input import escaped

DRAFTED = "bold green"  # bold stays where a terminal has no colours
LEGEND = "what was drafted and accepted is "


def show(stream: Stream, console: Console, marks: bool, plain: float | None = None) -> None:
    """Write an answer as it comes: on a terminal with its cost so far, else its text alone.

    A terminal gets whole lines above, the last one and the numbers below, and is left as it was,
    whatever ends the answer. plain: tokens per second of the target alone, to compare with.
    """
    if not console.is_terminal:
        with stream:
            for piece in stream:
                console.file.write(piece.text)
                console.file.flush()
        console.file.write("\n")
        return
    line = Text()  # the last one, as it was written
    live = Live(console=console, auto_refresh=False, transient=True)
    try:
        with live, stream:
            for piece in stream:
                line = with_piece(line, piece, console, marks)
                numbers = Text(numbers_of(stream, plain), "dim")
                live.update(Group(line, numbers), refresh=True)
    finally:
        console.print(line, soft_wrap=False)
        console.print(Text(numbers_of(stream, plain), "dim"), soft_wrap=False)


def with_piece(line: Text, piece: Piece, console: Console, marks: bool) -> Text:
    """Return the last line with more text; print what is before it and will not change any more."""
    style = DRAFTED if marks and piece.writer == ACCEPTED else ""
    *whole, rest = escaped(piece.text).split("\n")
    for text in whole:
        console.print(line.append(text, style), soft_wrap=False)
        line = Text()
    line.append(rest, style)
    # What a narrow terminal breaks into lines will not change any more, but for the last. That one
    # is taken from the text: a line that is broken loses the spaces at its end.
    *full, last = line.wrap(console, console.width) or [Text()]
    for broken in full:
        console.print(broken, soft_wrap=False)
    return line[len(line.plain.rstrip()) - len(last.plain.rstrip()) :] if full else line


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
