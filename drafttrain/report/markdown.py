"""A document as Markdown: for a pull request, a model card, a log."""

import re
from collections.abc import Sequence
from html import escape

from drafttrain.report.document import Document, Listing, Outputs
from drafttrain.report.phrases import NOTHING, cell
from drafttrain.report.results import Cell, Table
from drafttrain.runtime.untrusted_input import shown

LONGEST_TEXT = 100_000  # characters; no text of a report is longer


def escaped(value: object) -> str:
    """Return text as one line, escaped for Markdown, HTML and terminals."""
    text = escape(shown(" ".join(str(value).split()), LONGEST_TEXT), quote=False)
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", text) or NOTHING


def cells(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Return a Markdown table; the brackets of an interval do not become a link."""
    aligned = ["---", *["---:"] * (len(columns) - 1)]
    texts = [
        [escaped(value) if isinstance(value, str) else cell(value) for value in row] for row in rows
    ]
    return [f"| {' | '.join(line)} |" for line in (map(escaped, columns), aligned, *texts)]


def markdown(document: Document) -> str:
    """Return the whole document."""
    lines = [f"# {escaped(document.title)}", ""]
    for text in (*document.lead, document.conditions):
        lines += [escaped(text), ""] if text else []
    for block in (*document.first, *document.rest):
        content = block.table if isinstance(block, Outputs) else block
        lines += _table(content) if isinstance(content, Table) else _listing(content)
    return "\n".join(lines)


def _table(content: Table) -> list[str]:
    caption = [escaped(content.caption), ""] if content.caption else []
    lines = [f"## {escaped(content.title)}", "", *caption]
    lines += [*cells(content.columns, content.rows), ""]
    return [
        *lines,
        *(f"- {escaped(note)}" for note in content.notes),
        *([""] * bool(content.notes)),
    ]


def _listing(content: Listing) -> list[str]:
    if not content.items:
        return []
    lines = [
        f"- {_key(key)}: {escaped(text)}" if key else f"- {escaped(text)}"
        for key, text in content.items
    ]
    return [f"## {escaped(content.title)}", "", *lines, ""]


def _key(key: str) -> str:
    return f"`{key}`" if key.isidentifier() and key.isascii() else f"**{escaped(key)}**"
