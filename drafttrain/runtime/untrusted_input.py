"""Input from outside, read with bounds and into types: JSON, yaml, names, headers, text.

Folders, data files and answers may be anyone's: sizes are bounded before anything is in memory,
and names of files cannot leave their folder. SECURITY.md states what is trusted and what is not.
"""

import difflib
import functools
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from unicodedata import category

import yaml
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

MAX_JSON_BYTES = 64 << 20  # the index of a 1T model has 10 MB
MAX_JSON_VALUES = 4_000_000  # a value of two bytes takes some 60 in memory
MAX_YAML_BYTES = 256 << 10  # PyYAML reads some 200 kB a second; a run's config.yaml has 6 kB
MAX_TENSORS = 250_000  # of one model; the largest published ones have 150,000, in many files
MAX_LINE_BYTES = 16 << 20  # one conversation
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
MAX_VOCABULARY = 4_000_000  # tokens; the largest published ones have 262,144
MAX_COUNT = 2**53  # what JSON's numbers hold exactly
SHOWN = 120  # characters of a text from outside in a message

Kind = TypeVar("Kind")
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Depth = Annotated[int, Field(ge=1, le=1024)]  # of a proposal
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]  # measured, or counted
# The name of a file in a folder: no path, nothing hidden, nothing that a terminal would obey.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,199}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,4096}$")]


class UntrustedError(ValueError):
    """Something from outside is not what it must be; the message names it."""


def shown(text: object, most: int = SHOWN) -> str:
    """Return a text from outside for a message: one line, no control characters, cut at `most`."""
    plain = re.sub(r"\s*[\r\n\t]+\s*", " ", str(text))
    cut = plain if len(plain) <= most else plain[: most - 3] + "..."
    return "".join(char if char.isprintable() else _as_escape(char) for char in cut)


OBEYED_BY_NONE = "\n\t\u200c\u200d"  # the last two join and part letters, in emoji and Persian


def escaped(text: str) -> str:
    """Return a text without characters that a terminal would obey; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in OBEYED_BY_NONE or category(char) == "Zs"
        else _as_escape(char)
        for char in text
    )


def _as_escape(char: str) -> str:
    return char.encode("unicode_escape", "replace").decode()


def read_bytes(file: Path, most: int, origin: str | None = None) -> bytes:
    """Return the content of a regular file; UntrustedError for another or above `most` bytes."""
    name = origin or shown(file, 400)
    file.stat()  # FileNotFoundError is for the caller
    if not file.is_file():
        raise UntrustedError(f"{name} must be a file, got something else of that name")
    with file.open("rb") as stream:
        # Python allocates as much as it is asked for, so it is asked for what the file has now.
        content = stream.read(min(most, os.fstat(stream.fileno()).st_size) + 1)
    if len(content) > most:
        raise UntrustedError(f"{name} must have at most {most:,} bytes, got more")
    return content


def parse_json(content: bytes | str, origin: str, most: int = MAX_JSON_VALUES) -> Any:
    """Return plain data of about `most` values; UntrustedError for more, or what is no JSON."""
    _check_count(content, origin, most)
    try:
        return _adapter(Any).validate_json(content)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Invalid JSON: ")
        raise UntrustedError(f"{origin} must be valid JSON, got: {shown(reason)}") from None


def _check_count(content: bytes | str, origin: str, most: int = MAX_JSON_VALUES) -> None:
    count = content.count(",") if isinstance(content, str) else content.count(b",")
    if count > most:
        raise UntrustedError(f"{origin} must hold at most {most:,} values, got more")


def read_object(file: Path, origin: str | None = None) -> dict[str, Any]:
    """Return the object that a JSON file holds; see `read_bytes` and `parse_json`."""
    name = origin or shown(file, 400)
    plain = parse_json(read_bytes(file, MAX_JSON_BYTES, name), name)
    if not isinstance(plain, dict):
        raise UntrustedError(f"{name} must hold an object, got {type(plain).__name__}")
    return plain


def typed(kind: type[Kind], content: bytes | str, origin: str) -> Kind:
    """Return JSON as a (frozen) dataclass or another type, every value checked against its hint.

    Strict: text is not read as a number. Keys that the type does not have are left out.
    """
    _check_count(content, origin)
    try:
        adapted: Any = kind  # unhashable to mypy
        return _adapter(adapted).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        got = "" if first["type"] in ("json_invalid", "missing") else f", got {first['input']!r}"
        raise UntrustedError(
            f"{origin}: {shown(where)}{': ' * bool(where)}{shown(first['msg'])}{shown(got)}"
        ) from None


def read_typed(kind: type[Kind], file: Path) -> Kind:
    """Return a JSON file as a type; see `read_bytes` and `typed`."""
    return typed(kind, read_bytes(file, MAX_JSON_BYTES), shown(file, 400))


@functools.cache
def _adapter(kind: Any) -> Any:
    return TypeAdapter(kind)


class _PlainLoader(yaml.SafeLoader):
    """yaml without aliases: a few of them can expand to more values than fit in memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("an alias, which plain data does not need")
        return super().compose_node(parent, index)


def read_yaml(file: Path) -> Any:
    """Return the plain data of a yaml file; UntrustedError where it is none, or too much."""
    content = read_bytes(file, MAX_YAML_BYTES)
    try:
        return yaml.load(content, _PlainLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UntrustedError(f"{shown(file, 400)} must be yaml, got: {shown(reason)}") from None


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in the header of a safetensors file; offsets count from the start of the data."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


def header_of(file: Path, origin: str | None = None) -> dict[str, TensorEntry]:
    """Return the tensors that a safetensors file holds, by name; no tensor is read.

    It is checked that each has the bytes of its dtype and shape, and that they fill the file.
    """
    name = origin or shown(file, 400)
    header = header_bytes(file, name)
    entries = parse_json(header, f"{name}, its header", 5 * MAX_TENSORS)  # of 4 commas each
    if isinstance(entries, dict):
        entries.pop("__metadata__", None)
    try:
        found: dict[str, TensorEntry] = _adapter(dict[str, TensorEntry]).validate_python(entries)
    except ValidationError:
        wrong = "its header must give dtype, shape and offsets of tensors"
        raise UntrustedError(f"{name} is no safetensors file: {wrong}") from None
    size = file.stat().st_size
    expected = 8 + len(header) + max((entry.data_offsets[1] for entry in found.values()), default=0)
    if size != expected:
        raise UntrustedError(f"{name} is torn: {size:,} bytes, its header says {expected:,}")
    try:
        with safe_open(file, "np"):  # its own checks: bytes of dtype and shape, without gaps
            return found
    except SafetensorError as error:
        raise UntrustedError(f"{name} is no safetensors file: {shown(error)}") from None


def header_bytes(file: Path, origin: str | None = None) -> bytes:
    """Return the raw header of a safetensors file; UntrustedError without one."""
    name = origin or shown(file, 400)
    if not file.is_file():
        raise UntrustedError(f"{name} must be a file, but is none")
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, file.stat().st_size - 8):
            raise UntrustedError(f"{name} is no safetensors file: its header cannot be read")
        return stream.read(length)


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, FileName]


def shards_of(index: Path, suffix: str, origin: str | None = None) -> list[str]:
    """Return the weight files that an index names, all in its folder and all of one suffix."""
    name = origin or shown(index, 400)
    content = read_bytes(index, MAX_JSON_BYTES, name)
    _check_count(content, name, 2 * MAX_TENSORS)
    listed = sorted(set(typed(_Index, content, name).weight_map.values()))
    other = next((shard for shard in listed if not shard.endswith(suffix)), None)
    if other is not None or not listed:
        got = f"got {other}" if listed else "got none"
        raise UntrustedError(f"{name}: its weight_map must name files that end in {suffix}, {got}")
    return listed


def lines_of(stream: Any, most: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """Yield the lines of a binary stream; None for one of more than `most` bytes, skipped."""
    while line := stream.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(1 << 20)
        yield None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return '; did you mean X?' for the nearest option, or nothing."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ";"
