"""Write results as JSON and documents as pages, in files that appear whole or not at all."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from drafttrain.report.document import Document
from drafttrain.report.html import html
from drafttrain.report.markdown import markdown
from drafttrain.report.results import Table
from drafttrain.report.tables import texts
from drafttrain.runtime.disk import write_whole, writing

if TYPE_CHECKING:
    from drafttrain.report.plots import Figure  # matplotlib takes a second


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
    folder: Path, name: str, document: Document, figures: Sequence["Figure"], content: object = None
) -> Path:
    """Write a document as Markdown and HTML, and its content as JSON; return the HTML page."""
    texts = {} if content is None else {f"{name}.json": as_json(as_data(content))}
    texts |= {f"{name}.md": markdown(document), f"{name}.html": html(document, figures)}
    write_texts(texts, folder)
    return folder / f"{name}.html"


def write_texts(files: Mapping[str, str], folder: Path) -> None:
    """Write files by name into a folder; each appears whole or not at all."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(folder / name, text)
