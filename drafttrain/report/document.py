"""The content of a page, in order, before it is rendered as Markdown or HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drafttrain.report.results import Example, Flag, Table

WRONG = ("lossless", "certificate")  # kinds of flags: a check failed


@dataclass(frozen=True)
class Tile:
    """One number at the top of a page; mood: good, fair, bad (it is wrong), or empty."""

    label: str
    value: str
    unit: str
    detail: str
    mood: str = ""


@dataclass(frozen=True)
class Listing:
    """Sentences under a title, each with a key, or all without.

    look: wrong, flags or mild (coloured, always shown), notes (always shown), details (collapsed).
    """

    title: str
    items: list[tuple[str, str]]
    look: str = "details"


@dataclass(frozen=True)
class Outputs:
    """Example outputs, told apart by who wrote what; Markdown shows the table instead."""

    writers: Mapping[str, str]  # what each name means
    examples: Sequence[Example]
    table: Table


Block = Table | Listing | Outputs


@dataclass(frozen=True)
class Document:
    """The content of a page, in order: `first` is above the figures, `rest` below."""

    subject: str  # the kind of page
    title: str
    lead: list[str]  # the answer in sentences
    conditions: str = ""
    tiles: list[Tile] = field(default_factory=list)
    first: list[Block] = field(default_factory=list)
    rest: list[Block] = field(default_factory=list)


def flagged(flags: Sequence[Flag], mild: Sequence[Flag] = ()) -> list[Block]:
    """Return flags as coloured lists, each with its row: what is wrong, to read with care, mild."""
    wrong = [flag for flag in flags if flag.kind in WRONG]
    looks = {
        "wrong": ("Wrong", wrong),
        "flags": ("Read with care", [flag for flag in flags if flag not in (*wrong, *mild)]),
        "mild": ("Good to know", mild),
    }
    return [
        Listing(title, [(flag.row, flag.text) for flag in found], look)
        for look, (title, found) in looks.items()
    ]


def notes(title: str, sentences: list[str]) -> Listing:
    """Return sentences as a list that is always shown."""
    return Listing(title, [("", sentence) for sentence in sentences], "notes")
