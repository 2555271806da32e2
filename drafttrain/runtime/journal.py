"""Files of JSON lines that grow: the complete lines of a killed command are read again."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from drafttrain.runtime.disk import append_text, write_whole
from drafttrain.runtime.untrusted_input import UntrustedError, lines_of, shown, typed

Kind = TypeVar("Kind")


def append_records(file: Path, records: Iterable[Any]) -> None:
    """Add records to the end of a file, each a line; they are on the disk when this returns."""
    append_text(file, _text(records))


def replace_records(file: Path, records: Iterable[Any]) -> None:
    """Replace all records of a file; whatever happens, it holds the old ones or the new."""
    write_whole(file, _text(records))


def read_records(file: Path, kind: type[Kind], first: int = 0) -> Iterator[Kind]:
    """Yield the records of a file from number `first` on; UntrustedError names one that is invalid.

    A torn last line is no record; it stays, because another process may be writing it.
    """
    with file.open("rb") as stream:
        for number, line in enumerate(lines_of(stream)):
            where = f"{shown(file, 400)}:{number + 1}"
            if line is None:
                raise UntrustedError(f"{where} is too long for a record")
            if number >= first and line.endswith(b"\n"):
                yield typed(kind, line, where)


def _text(records: Iterable[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
