"""A page before it is Markdown or HTML: what it says, in order."""

from dataclasses import dataclass, field

from markupsafe import Markup

from drafttrain.report.results import Flag, Table


@dataclass(frozen=True)
class Tile:
    """One number at the top of a page; mood: good or bad, or nothing of either."""

    label: str
    value: str
    unit: str
    detail: str
    mood: str = ""


@dataclass(frozen=True)
class Listing:
    """Sentences under a title, each with what it is about, or all without.

    look: flags or mild (in colour, in sight), notes (open), details (folded on a page).
    """

    title: str
    items: list[tuple[str, str]]
    look: str = "details"


@dataclass(frozen=True)
class Figure:
    """A picture with its title and caption; Markdown does without."""

    title: str
    caption: str
    picture: Markup


@dataclass(frozen=True)
class Document:
    """Everything that a page says, in order: `first` stands above the figures, `rest` below."""

    subject: str  # what kind of page it is
    title: str
    lead: list[str]  # the answer in sentences
    conditions: str = ""
    tiles: list[Tile] = field(default_factory=list)
    first: list[Table | Listing] = field(default_factory=list)
    rest: list[Table | Listing] = field(default_factory=list)


def flagged(title: str, flags: list[Flag], look: str = "flags") -> Listing:
    """Return flags by their rows, in colour."""
    return Listing(title, [(flag.row, flag.text) for flag in flags], look)


def notes(title: str, sentences: list[str]) -> Listing:
    """Return sentences as a list in sight."""
    return Listing(title, [("", sentence) for sentence in sentences], "notes")
