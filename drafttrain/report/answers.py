"""An answer as it is decoded, on a terminal: who wrote which text, and how fast it came."""

from rich.console import Console
from rich.text import Text

from drafttrain.decode.stream import ACCEPTED, Stream
from drafttrain.report.phrases import things
from drafttrain.runtime.untrusted_input import escaped

DRAFTED = "bold green"  # bold stays where a terminal has no colours
LEGEND = "what was drafted and accepted is "


def show(stream: Stream, console: Console, marks: bool, plain: float | None = None) -> None:
    """Write an answer as it comes: its text alone, or on a terminal its numbers below it too.

    marks: the terminal shows what was drafted in another style. plain: tokens per second of the
    target alone, to compare with. The numbers are written whatever ends the answer.
    """
    try:
        with stream:
            for piece in stream:
                if console.is_terminal:
                    style = DRAFTED if marks and piece.writer == ACCEPTED else ""
                    console.print(Text(escaped(piece.text), style), end="", soft_wrap=True)
                else:
                    console.file.write(piece.text)
                console.file.flush()
    finally:
        console.file.write("\n")
        if console.is_terminal:
            console.print(Text(numbers_of(stream, plain), "dim"))


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
