"""Where records come from: local files, read a record at a time, or a data set of the Hub."""

import glob
import gzip
import io
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafttrain.data import parquet
from drafttrain.data.records import Unusable, parse
from drafttrain.data.skips import NothingUsable, SkipReport
from drafttrain.runtime.settings import require
from drafttrain.runtime.untrusted_input import MAX_LINE_BYTES, lines_of, shown

Record = tuple[str, Any]  # where it is; what it holds, or the Unusable with the reason why not
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".parquet")
# How a file begins that is compressed, or is no text.
MAGIC = {
    **{".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"},
    **{".zip": b"PK\x03\x04", ".bz2": b"BZh", ".xz": b"\xfd7zXZ", ".arrow": b"ARROW1"},
}
UNREAD = (".zip", ".bz2", ".xz", ".arrow", ".csv", ".tsv")
ELSE = "data=hub data.repo=csv data.files=FILE reads csv, data.repo=arrow arrow; unpack archives"
EXPANSION, SMALL = 1000, 64 << 20  # text shrinks to a tenth; a bomb to a hundred-thousandth
LONG = Unusable(f"a record of more than {MAX_LINE_BYTES >> 20} MB")
READ = 1 << 16  # characters
NOT_WHITE = re.compile(r"[^ \t\r\n]")  # no white space of JSON
NOTHING_AFTER = "and nothing after it was read"


def find_files(path: str) -> list[Path]:
    """Return the files that a path names: itself, those of a directory, or those of a glob.

    ValueError for none, and for one that is no regular file: a pipe or a device may never end.
    """
    place = Path(path).expanduser()
    with readable(place, "data.path"):
        inside = sorted(place.iterdir()) if place.is_dir() else None
    if inside is not None:
        files = [file for file in inside if file.name.endswith(SUFFIXES)]
        must, got = f"hold files named {', '.join(SUFFIXES)}", f"{path}, with none; {ELSE}"
    else:
        matches = [place] if place.exists() else map(Path, glob.glob(str(place), recursive=True))
        files = [file for file in sorted(matches) if not file.is_dir()]
        must, got = "name existing files", f"{path}, which names none"
    require(bool(files), "data.path", must, got)
    require_regular(files, "data.path")
    return files


def require_regular(files: Iterable[Path], key: str) -> None:
    """Raise ValueError, naming it, for a file that is neither regular nor a link to such a file."""
    for file in files:
        if os.path.lexists(file) and not file.is_file():  # reading says that a file is gone
            got = f"{shown(file, 400)}, which is a pipe, a device or a broken link; remove it"
            raise ValueError(f"{key} must name regular files, got {got}")


@contextmanager
def readable(place: Path, key: str) -> Iterator[None]:
    """Turn an error of the operating system on reading what `key` names into ours."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{key} must name files that can be read, got {place}: {error.strerror or error}; "
            "see that it is there and that you may read it (chmod u+r), or leave it out"
        ) from error


def file_records(file: Path, key: str = "data.path") -> Iterator[Record]:
    """Yield the records of one file, broken ones as `Unusable`; ValueError if it cannot be read.

    Its first bytes say how it is compressed. key: the setting that names it.
    """
    require_regular([file], key)
    with readable(file, key):
        raw = file.open("rb")
    with raw:
        kind = next((kind for kind, magic in MAGIC.items() if raw.peek(8).startswith(magic)), None)
        name = file.name.removesuffix(".gz").removesuffix(".zst")
        known = not name.endswith(UNREAD) and kind not in UNREAD
        require(known, key, f"name files of the kinds {', '.join(SUFFIXES)}", f"{file}; {ELSE}")
        number = 0
        most = max(SMALL, EXPANSION * file.stat().st_size)  # bytes
        try:
            with _opened(file, raw, kind) as stream:
                if name.endswith(".json") and not _has_lines(stream):
                    for number, record in enumerate(list_records(stream)):
                        yield f"{file}[{number}]", record
                    return
                for number, line in enumerate(lines_of(stream), 1):
                    most -= MAX_LINE_BYTES if line is None else len(line)
                    if most < 0:
                        reason = f"the file expands to more than {EXPANSION:,} times its size"
                        yield f"{file}:{number}", Unusable(f"{reason}, {NOTHING_AFTER}")
                        return
                    if line is None or line.strip():
                        yield f"{file}:{number}", LONG if line is None else parse(line)
        except (EOFError, OSError, zlib.error) as error:
            damage = Unusable(f"the file is damaged here, {NOTHING_AFTER}", str(error))
            yield f"{file}:{number + 1}", damage


@contextmanager
def _opened(file: Path, raw: Any, kind: str | None) -> Iterator[Any]:
    """Yield the content of a file, decompressed; for parquet a line of JSON for each row."""
    if kind == ".gz":
        with gzip.open(raw) as stream:
            yield stream
    elif kind == ".zst":
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd") as stream:
            yield io.BufferedReader(stream)
    elif kind == ".parquet":
        place = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", parquet.__file__, str(file)]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env={"PYTHONPATH": place}
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            ended = False
            try:
                yield process.stdout
                ended = not process.stdout.read(1)
            finally:
                process.kill() if not ended else process.wait()
            if ended and process.returncode:
                told = process.stderr.read(4096).decode(errors="replace").strip()
                raise OSError(told or f"the process that reads it died ({process.returncode})")
    else:
        yield raw


def _has_lines(stream: Any) -> bool:
    """Return whether the first line of a .json file is a whole record; the stream is rewound."""
    line = stream.readline(MAX_LINE_BYTES)
    stream.seek(0)
    return isinstance(parse(line), dict)


def list_records(stream: Any) -> Iterator[Any]:
    """Yield the records of a stream that holds one json list, one at a time, whatever its size.

    The first that is not JSON is the last: nothing tells where the one after it begins.
    """
    decode, text, at = json.JSONDecoder().raw_decode, "", 0
    # Bytes that are not UTF-8 stay in the text, for `parse` to find: they spoil one record only.
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")

    def more(size: int) -> bool:
        nonlocal text, at
        if found := reader.read(size):
            text, at = text[at:] + found, 0
        return bool(found)

    def next_character() -> str:
        nonlocal at
        while not (found := NOT_WHITE.search(text, at)):
            at = len(text)
            if not more(READ):
                return ""
        at = found.start()
        return found[0]

    try:
        if next_character() != "[":
            yield Unusable(
                "neither a json list nor a record a line", f"it begins with {text[at : at + 1]!r}"
            )
            return
        at += 1
        follows = next_character()
        while follows != "]":
            size, end = READ, 0
            while not end:
                try:
                    end = decode(text, at)[1]
                    if end == len(text) and more(READ):  # a number may continue
                        end = 0
                except (ValueError, RecursionError) as error:
                    reason = getattr(error, "msg", str(error))
                    if len(text) - at > MAX_LINE_BYTES:
                        yield Unusable(f"{LONG.reason}, or not JSON, {NOTHING_AFTER}", reason)
                        return
                    if isinstance(error, RecursionError) or not more(size):
                        yield Unusable(f"not JSON, {NOTHING_AFTER}", reason)
                        return
                    size *= 2
            record, at = text[at:end].encode(errors="surrogateescape"), end
            yield LONG if len(record) > MAX_LINE_BYTES else parse(record)
            follows = next_character()
            if follows == ",":
                at += 1
                next_character()
            elif follows != "]":
                yield Unusable(f"not JSON, {NOTHING_AFTER}", "no , or ] after this record")
                return
        at += 1
        if next_character():
            yield Unusable("text after the json list, which was not read")
    finally:
        reader.detach()


def dataset_records(
    key: str,
    repo: str,
    subset: str | None,
    split: str,
    revision: str | None,
    instead: str,
    **options: Any,
) -> Iterator[Record]:
    """Yield the rows of a split, of the Hub or of a directory; ValueError if it cannot be read.

    key: the setting that names it; `instead` names a file. options: `load_dataset`'s.
    """
    import datasets

    place = Path(repo).expanduser()
    if place.is_dir():
        require_regular((file for file in place.rglob("*") if not file.is_dir()), key)
    try:
        source = str(place) if place.exists() else repo
        if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
            rows: Any = datasets.load_from_disk(str(place))  # what `save_to_disk` wrote
            rows = rows[split] if isinstance(rows, dict) else rows
        elif downloaded := _parquet_files(source, subset, split, revision, **options):
            rows = (row for file in downloaded for _, row in file_records(file, key))
        else:
            rows = datasets.load_dataset(source, subset, split=split, revision=revision, **options)
        for number, row in enumerate(rows):
            yield f"{repo}:{split}[{number}]", row
    except Exception as error:  # every library below has its own errors for "not there"
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{key} must name a data set that can be read, got {repo} (split {split}): {reason}; "
            f"without access to the Hub, download it elsewhere and use {instead}, or "
            f"{key}=DIRECTORY"
        ) from error


def _parquet_files(
    source: str, subset: str | None, split: str, revision: str | None, **options: Any
) -> list[Path]:
    """Return the files of a split, downloaded, if all are parquet: `datasets` has no bounds.

    A part of a split ("train[:100]") and a stream are left to `datasets`.
    """
    import datasets

    if options.pop("streaming", False):
        return []
    builder = datasets.load_dataset_builder(source, subset, revision=revision, **options)
    files = [str(file) for file in (builder.config.data_files or {}).get(split, ())]
    if not all(file.endswith(".parquet") for file in files):
        return []
    return list(map(Path, datasets.DownloadManager().download(files)))


def usable_of(
    records: Iterable[Record],
    limit: int | None,
    take: Callable[[Any, int, str], Any],
    must: str,
    what: str = "conversations",
) -> tuple[list[Any], SkipReport]:
    """Return what `take` makes of each record, its place and its source, and what was skipped.

    take: raises Unusable for a record to skip. what: a name for the records. ValueError that begins
    with `must` and carries the report if nothing is left.
    """
    report = SkipReport(what=what)
    usable: list[Any] = []
    for where, record in records:
        if report.num_read == limit:
            break
        report.num_read += 1
        with report.skipping(where):
            if isinstance(record, Unusable):
                raise record
            usable.append(take(record, len(usable), where))
    if not usable:
        advice = "correct what is named here" if report.counts else "give it some records"
        raise NothingUsable(f"{must}, got none", report, advice)
    return usable, report
