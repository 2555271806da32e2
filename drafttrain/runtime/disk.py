"""Writing files: a kill leaves the old or the new content, a full disk is reported in one line."""

import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drafttrain.runtime.untrusted_input import UntrustedError, shown

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
WANDB = "wandb"  # W&B's folder in a run, in which it makes links of its own
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors that no program can prevent: a traceback would add nothing.
OF_THE_MACHINE = (*FULL, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE)


class MachineError(ValueError):
    """The machine, or another process on it, made a valid command fail: status 1."""


class DiskError(MachineError):
    """A file could not be written; the message says which, why, and what to do."""


def errno_of(error: BaseException) -> int | None:
    """Return the operating system's number of an error, which libraries in Rust tell in words."""
    number = getattr(error, "errno", None)
    if number is None and (told := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(told[1])
    if number is None and "No space left" in str(error):
        number = errno.ENOSPC
    if number is None and isinstance(error, DiskError) and error.__cause__ is not None:
        number = errno_of(error.__cause__)
    return number


class LinkError(UntrustedError):
    """A link, or another special file, in a folder that may hold files and folders alone."""


def require_own(path: Path, or_folder: bool = False) -> None:
    """Raise LinkError unless `path` is a file, or a folder if allowed; FileNotFoundError if gone.

    What a link names is not part of the run, store or evaluation that the link is in, which may
    come from anyone: it must not be read, overwritten or removed.
    """
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or (or_folder and stat.S_ISDIR(mode))):
        what = "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "special file"
        kind = "file or folder" if or_folder else "file"
        raise LinkError(
            f"{shown(path, 400)} must be a {kind} itself, got a {what}; put a copy there, or remove"
            " it"
        )


def refuse_links(root: Path, *names: str, of_runs: bool = False) -> None:
    """Raise LinkError for a link below `root`: in the path of `names`, or in the folder they name.

    Links in the path of `root`, which the user typed, are followed. W&B's own are left alone: in
    the folder itself, or, of_runs, in the folders of runs in it.
    """
    with suppress(FileNotFoundError):
        for name in names:
            root /= name
            require_own(root, or_folder=True)
    runs = [str(root), *(map(str, root.glob("*")) if of_runs else ())]
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # another command has removed it meanwhile
                require_own(Path(folder, name), or_folder=True)
        folders[:] = [name for name in folders if name != WANDB or folder not in runs]


@contextmanager
def _opened_below(root: Path, folder: Path) -> Iterator[int]:
    """Yield a descriptor of `folder`, which is `root` or below it; OSError for a link below `root`.

    What is done by this descriptor cannot be led elsewhere, even if a link replaces a folder
    meanwhile.
    """
    descriptor = os.open(root, FOLDER)
    try:
        for part in folder.relative_to(root).parts:
            outer = descriptor
            descriptor = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=outer)
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


def remove(path: Path, root: Path) -> None:
    """Remove a file, a link or a whole folder below `root`; OSError where a link leads to it."""
    with _opened_below(root, path.parent) as parent:
        mode = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            shutil.rmtree(path.name, dir_fd=parent)
        else:
            os.unlink(path.name, dir_fd=parent)


def rename(old: Path, new: Path, root: Path) -> None:
    """Rename a file or folder within its folder below `root`; OSError where a link leads to it."""
    assert old.parent == new.parent, f"{old} and {new} must be in one folder"
    with _opened_below(root, old.parent) as parent:
        os.replace(old.name, new.name, src_dir_fd=parent, dst_dir_fd=parent)


def reason(error: Exception, place: Path) -> str:
    """Return why a file at or below `place` could not be written, for a user."""
    number = errno_of(error)
    if number == errno.ELOOP:
        return "it is a link, which is not followed: remove it, or name another place"
    if number not in FULL:
        return getattr(error, "strerror", None) or str(error)
    free = shutil.disk_usage(_existing(place)).free / 1e9
    if number == errno.EDQUOT:
        return "the quota is used up: make room there"
    if number == errno.EFBIG:
        return "File too large: raise the limit on file sizes (ulimit -f)"
    return f"the disk is full ({free:.2f} GB free): make room there"


def require_writable(folder: Path, key: str) -> None:
    """Raise ValueError unless files can be written in `folder`, which need not exist yet.

    Call it before a target is loaded for results that cannot be kept. key: the setting's name.
    """
    place = _existing(folder.absolute())
    try:
        if not os.path.isdir(place):
            raise OSError(errno.ENOTDIR, f"{place} is no folder")
        with suppress(FileNotFoundError):
            folder.lstat()  # a name may be too long
        # Tried, because permissions are no proof: a network file system or /proc may still refuse.
        os.rmdir(tempfile.mkdtemp(prefix=".drafttrain_", dir=place))
    except OSError as error:
        kind = DiskError if error.errno in FULL else ValueError
        raise kind(
            f"{key} must lie where files can be written, got {shown(folder, 400)}: "
            f"{reason(error, place)}; name another place"
        ) from error


def _existing(place: Path) -> Path:
    """Return `place`, or the nearest folder above it that exists."""
    while not os.path.exists(place):
        place = place.parent
    return place


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the operating system on writing `path` into a DiskError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and errno_of(error) not in OF_THE_MACHINE:
            raise
        raise DiskError(f"{path} could not be written: {reason(error, path)}") from error


@contextmanager
def written(
    folder: Path, key: str, numbers: Container[int | None] = OF_THE_MACHINE, then: str = ""
) -> Iterator[None]:
    """Turn an error of the operating system, one of these numbers, on writing into a DiskError.

    It names the folder that the user gave as `key`, not the temporary one that is written first.
    then: what it ends with.
    """
    try:
        yield
    except Exception as error:
        if errno_of(error) not in numbers:
            raise
        why = reason(error, folder)
        raise DiskError(f"{key}={folder} could not be written: {why}{then}") from error


def flush(path: Path) -> None:
    """Wait until a file, or a folder with the files in it, is on the disk."""
    for place in path.iterdir() if path.is_dir() else ():
        with suppress(FileNotFoundError):  # another command's, such as its lock
            if not place.is_dir():
                _sync(place)
    _sync(path)


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new, empty file to write, which replaces `path` at the end, on the disk.

    A file or link that a killed process left under its name is removed; no link is followed.
    """
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.unlink(missing_ok=True)
        os.close(os.open(beside, NEW_FILE, 0o666))
        yield beside
        flush(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)  # the disk may be full
        raise
    _sync(path.parent)  # the entry of this file; other files there are left alone


def put_folder(made: Path, folder: Path, root: Path | None = None) -> None:
    """Give a finished folder its name, on the disk, in place of an earlier one beside it.

    That one is kept beside it until then: a kill between the two leaves it whole, as `MADE.old`.
    root: a folder above it, below which no link is followed; None: the one that it is in.
    """
    root = root or folder.parent
    flush(made)
    old = made.with_name(f"{made.name}.old") if os.path.lexists(folder) else None
    if old is not None:
        rename(folder, old, root)
    try:
        rename(made, folder, root)
    except BaseException:
        if old is not None:
            rename(old, folder, root)
        raise
    _sync(folder.parent)
    if old is not None:
        remove(old, root)


def write_whole(path: Path, text: str) -> None:
    """Write a file that, whatever happens, holds either its old content or all of `text`."""
    with writing(path), replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def append_text(path: Path, text: str) -> None:
    """Append `text`, which ends its last line, to a file, and wait until it is on the disk.

    A torn last line is cut off first; where the disk is full, the part of `text` on it is too.
    """
    left = text.encode()
    new = not os.path.lexists(path)
    with writing(path), open(path, "ab", 0, opener=no_link) as file:  # a buffer is written on close
        end = _cut_torn_line(path)
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
            if new:
                _sync(path.parent)
        except OSError:
            with suppress(OSError):
                os.truncate(path, end)
            raise


def sha256_of(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(plain: Any) -> str:
    """Return the checksum of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def no_link(path: str, flags: int) -> int:
    """Open a file but no link, which in another's folder may lead anywhere; an opener of open()."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # a pipe may have no reader


def _cut_torn_line(path: Path) -> int:
    """Cut off a last line without its end; return the bytes that are left."""
    end = path.stat().st_size
    if end == 0:  # which cannot be mapped
        return 0
    # Mapped, because a file may be larger than memory: what is searched, from its end, is read.
    with path.open("rb") as file, mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as content:
        whole = content.rfind(b"\n") + 1
    if whole < end:
        os.truncate(path, whole)
    return whole
