"""The content of a page, in order, and its Markdown: for a pull request, a model card, a log."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from drafttrain.report.phrases import NOTHING, cell
from drafttrain.report.results import Example, Flag, Table
from drafttrain.runtime.untrusted_input import shown

WRONG = ("lossless", "certificate")  # kinds of flags: a check failed
LONGEST_TEXT = 100_000  # characters; no text of a report is longer


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


@dataclass(frozen=True, kw_only=True)
class Outputs(Table):
    """Example outputs: Markdown shows a table of them, HTML marks who wrote what."""

    writers: Mapping[str, str]  # what each name means
    examples: Sequence[Example]


Block = Table | Listing


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


def flagged(flags: Sequence[Flag], mild: Sequence[str] = ()) -> list[Block]:
    """Return flags as coloured lists, each with its row: what is wrong, to read with care, mild.

    mild: kinds of flags that are good to know, and put nothing in doubt.
    """
    titles = {"wrong": "Wrong", "flags": "Read with care", "mild": "Good to know"}
    items: dict[str, list[tuple[str, str]]] = {look: [] for look in titles}
    for flag in flags:
        look = "wrong" if flag.kind in WRONG else "mild" if flag.kind in mild else "flags"
        items[look].append((flag.row, flag.text))
    return [Listing(title, items[look], look) for look, title in titles.items()]


def notes(title: str, sentences: list[str]) -> Listing:
    """Return sentences as a list that is always shown."""
    return Listing(title, [("", sentence) for sentence in sentences], "notes")


def escaped(value: object) -> str:
    """Return text as one line, escaped for Markdown, HTML and terminals."""
    text = escape(shown(" ".join(str(value).split()), LONGEST_TEXT), quote=False)
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", text) or NOTHING


def markdown(document: Document) -> str:
    """Return the whole document."""
    parts = [f"# {escaped(document.title)}"]
    parts += [escaped(text) for text in (*document.lead, document.conditions) if text]
    for block in (*document.first, *document.rest):
        if isinstance(block, Listing):
            lines = [
                f"- {f'{_key(key)}: ' * bool(key)}{escaped(text)}" for key, text in block.items
            ]
            parts += [f"## {escaped(block.title)}", "\n".join(lines)] if lines else []
        else:
            parts += [f"## {escaped(block.title)}", *table_parts(block)]
    return "\n\n".join(parts) + "\n"


def table_parts(content: Table) -> list[str]:
    """Return a table in Markdown, below its caption and above its notes."""
    aligned = ["---", *["---:"] * (len(content.columns) - 1)]
    # The brackets of an interval do not become a link.
    rows = [
        [escaped(value) if isinstance(value, str) else cell(value) for value in row]
        for row in content.rows
    ]
    lines = [f"| {' | '.join(line)} |" for line in (map(escaped, content.columns), aligned, *rows)]
    caption = [escaped(content.caption)] if content.caption else []
    notes = ["\n".join(f"- {escaped(note)}" for note in content.notes)] if content.notes else []
    return [*caption, "\n".join(lines), *notes]


def _key(key: str) -> str:
    return f"`{key}`" if key.isidentifier() and key.isascii() else f"**{escaped(key)}**"
