"""A table on the terminal."""

import textwrap

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from drafttrain.report.results import Table
from drafttrain.report.tables import texts

LONGEST_CELL = 20  # letters; a longer cell, such as many positions, goes on in the next line


def rich_table(content: Table) -> RichTable:
    """Return a table for the terminal, with headings no wider than their columns."""
    shown = RichTable(
        title=Text(content.title),
        caption=Text("\n".join(content.notes)),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    rows = texts(content)
    for place, column in enumerate(content.columns):
        cells = [line for row in rows for line in row[place].split("\n")]
        width = max((len(cell) for cell in cells), default=1) or 1
        heading = textwrap.fill(column, width, break_long_words=False) or column
        shown.add_column(
            heading,
            justify="right" if place else "left",
            no_wrap=0 < place and width <= LONGEST_CELL,
            overflow="fold",  # a name that is too long is broken, not cut
        )
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown
