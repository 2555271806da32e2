"""Write results as JSON and documents as pages, in files that appear whole or not at all."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from drafttrain.report.document import LONGEST_TEXT, Document, markdown
from drafttrain.report.phrases import positions, value_and_range
from drafttrain.report.plots import Figure
from drafttrain.report.results import Badge, Cell, Change, Estimate, Table
from drafttrain.report.tables import texts
from drafttrain.runtime.disk import write_whole, writing
from drafttrain.runtime.untrusted_input import escaped, shown

LONG = 28  # characters; a longer cell takes several lines


def as_data(value: Any) -> Any:
    """Return plain data for JSON: dataclasses as objects, numbers that are not finite as null."""
    if isinstance(value, Table):
        return {**vars(value), "rows": texts(value)}
    if is_dataclass(value):
        return {field.name: as_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_data(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str | int) or value is None:
        return value
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a report cannot hold {type(value).__name__}: {value!r}")


def as_json(content: Mapping[str, Any]) -> str:
    """Return plain data without NaN as the text of a .json file."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Lone surrogates, which no file can hold, are written as JSON escapes.
    return text.encode("utf-8", "backslashreplace").decode()


def write_pages(
    folder: Path, name: str, document: Document, figures: Sequence[Figure], content: object = None
) -> Path:
    """Write a document as Markdown and HTML, and its content as JSON; return the HTML page."""
    texts = {} if content is None else {f"{name}.json": as_json(as_data(content))}
    texts |= {f"{name}.md": markdown(document), f"{name}.html": html(document, figures)}
    write_texts(texts, folder)
    return folder / f"{name}.html"


def pictures(figures: Sequence[Figure]) -> dict[str, np.ndarray]:
    """Return figures by title, as bytes, "height width 3"."""
    return {figure.title: figure.pixels() for figure in figures}


def write_texts(files: Mapping[str, str], folder: Path) -> None:
    """Write files by name into a folder; each appears whole or not at all."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(folder / name, text)


def html(document: Document, figures: Sequence[Figure] = ()) -> str:
    """Return the page: style and figures inline, every text escaped."""
    environment = Environment(
        loader=PackageLoader("drafttrain.report"),
        autoescape=True,
        finalize=_text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        document=document, figures=figures, rows_of=rows_of, lines=_lines
    )


def rows_of(table: Table) -> list[list[Markup]]:
    """Return the cells of a table as HTML; bars are relative to their column's largest value."""
    widest = [
        max((value.value or 0.0 for value in column if isinstance(value, Estimate)), default=0.0)
        for column in zip(*table.rows, strict=True)
    ]
    return [
        [_cell(value, most) for value, most in zip(row, widest, strict=True)] for row in table.rows
    ]


def _cell(value: Cell, widest: float) -> Markup:
    if isinstance(value, Estimate):
        number, *bounds = value_and_range(value)
        told = Markup('{} <span class="range">{}</span>').format(number, bounds[0].strip("[]")) \
            if bounds else escape(number)  # fmt: skip
        if isinstance(value, Change):
            return told
        width = 100 * max(value.value or 0.0, 0.0) / (widest or 1.0)
        return Markup('<span class="track"><span style="width: {:.1f}%"></span></span>{}').format(
            width, told
        )
    if isinstance(value, Badge):
        return Markup('<span class="badge {}">{}</span>').format(value.replace(" ", "-"), value)
    if isinstance(value, str):
        text = escape(_text(value))
        return Markup('<span class="long">{}</span>').format(text) if len(value) > LONG else text
    bars = Markup("").join(
        Markup('<span><span style="height: {:.1f}%"></span></span>').format(100 * (rate or 0))
        for rate in value
    )
    return Markup('<span class="spark" title="{}">{}</span>').format(positions(value), bars)


def _lines(text: str) -> Markup:
    """Return a text with its line breaks, but without what would reverse or hide it."""
    return escape(escaped(text))


def _text(value: Any) -> Any:
    """Return a text without the characters that reverse its direction or that no file can hold."""
    return shown(value, LONGEST_TEXT) if type(value) is str else value
