"""The content of a page, in order, before it is rendered as Markdown or HTML."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from drafttrain.report.results import Flag, Table


@dataclass(frozen=True)
class Tile:
    """One number at the top of a page; mood: good, bad, or empty."""

    label: str
    value: str
    unit: str
    detail: str
    mood: str = ""


@dataclass(frozen=True)
class Listing:
    """Sentences under a title, each with a key, or all without.

    look: flags or mild (coloured, always shown), notes (always shown), details (collapsed).
    """

    title: str
    items: list[tuple[str, str]]
    look: str = "details"


@runtime_checkable
class Picture(Protocol):
    """What a figure shows: `plots.Drawing`, without importing matplotlib."""

    def __html__(self) -> str:
        """Return it as an element of a page."""

    def pixels(self) -> np.ndarray:
        """Return it as colours: bytes, "height width 3"."""


@dataclass(frozen=True)
class Figure:
    """A picture with its title and caption; Markdown leaves it out."""

    title: str
    caption: str
    picture: Picture


@dataclass(frozen=True)
class Document:
    """The content of a page, in order: `first` is above the figures, `rest` below."""

    subject: str  # the kind of page
    title: str
    lead: list[str]  # the answer in sentences
    conditions: str = ""
    tiles: list[Tile] = field(default_factory=list)
    first: list[Table | Listing] = field(default_factory=list)
    rest: list[Table | Listing] = field(default_factory=list)


def flagged(title: str, flags: list[Flag], look: str = "flags") -> Listing:
    """Return flags as a coloured list, each with its row."""
    return Listing(title, [(flag.row, flag.text) for flag in flags], look)


def notes(title: str, sentences: list[str]) -> Listing:
    """Return sentences as a list that is always shown."""
    return Listing(title, [("", sentence) for sentence in sentences], "notes")
