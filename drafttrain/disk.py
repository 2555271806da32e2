"""Writing so that a kill leaves the old or the new, and a full disk is said in a plain line."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What no program can help: a traceback would say nothing more.
OF_THE_MACHINE = (*FULL, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE)


class DiskError(ValueError):
    """A file could not be written; the message says which, why, and what to do."""


def reason(error: Exception, place: Path) -> str:
    """Return why a file at or below `place` could not be written, for a user."""
    number = getattr(error, "errno", None)
    if number not in FULL and "No space left" not in str(error):
        return getattr(error, "strerror", None) or str(error)
    free = shutil.disk_usage(_existing(place)).free / 1e9
    if number == errno.EDQUOT:
        return "the quota is used up: make room there"
    if number == errno.EFBIG:
        return "File too large: raise the limit on file sizes (ulimit -f)"
    return f"the disk is full ({free:.2f} GB free): make room there"


def require_writable(folder: Path, key: str) -> None:
    """Raise ValueError unless files can be written in `folder`, which need not be there yet.

    Said before a target is loaded for what could not be kept. key: the setting that names it.
    """
    place = _existing(folder.absolute())
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return
    why = "is read-only for you" if place.is_dir() else "is no folder"
    raise ValueError(
        f"{key} must lie where files can be written, got {folder}: {place} {why}; "
        "name another place"
    )


def _existing(place: Path) -> Path:
    """Return `place`, or what is there of the folders above it."""
    while not place.exists():
        place = place.parent
    return place


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says against writing `path` into a DiskError."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"{path} could not be written: {reason(error, path)}") from error


def flush(path: Path) -> None:
    """Wait until a file, or a folder with the files in it, is on the disk."""
    for place in [*path.iterdir(), path] if path.is_dir() else [path]:
        if place.is_dir() and place != path:
            continue
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a file that, whatever happens, holds what it held before or all of `text`."""
    beside = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)  # it takes the room that is wanting
            raise
        flush(path.parent)


def append_text(path: Path, text: str) -> None:
    """Add `text`, which ends its last line, to the end of a file, and wait until it is on the disk.

    A torn last line, which a killed process leaves, is cut off before; what of `text` a full disk
    took is cut off again.
    """
    left = text.encode()
    with writing(path), path.open("ab", buffering=0) as file:  # a buffer would be written on close
        end = cut_torn_line(path)
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.truncate(path, end)
            raise


def cut_torn_line(path: Path) -> int:
    """Cut off a last line without its end; return the bytes that are left."""
    end = path.stat().st_size
    with path.open("rb") as file:
        whole = end
        while whole:  # backwards, a block at a time: a file may be larger than memory
            begin = max(0, whole - (1 << 20))
            file.seek(begin)
            block = file.read(whole - begin)
            at = block.rfind(b"\n")
            if at >= 0:
                whole = begin + at + 1
                break
            whole = begin
    if whole < end:
        os.truncate(path, whole)
    return whole
