"""Locks: one command at a time writes a place, and an error names the command that does.

A lock is the kernel's flock on a file, by filelock: it ends with its process, however that ends.
Where a file system keeps locks on each machine apart (NFS mounted with nolock or local_lock, Lustre
with localflock), the commands of two machines do not notice each other.
"""

import errno
import json
import math
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from drafttrain.runtime.disk import DiskError, MachineError, reason, writing
from drafttrain.runtime.untrusted_input import UntrustedError, read_bytes, shown, typed

FILE = ".lock"  # in the locked folder; it exists while a command runs, or after one was killed
PATIENCE_S = 5.0  # the ranks of a run whose launcher was killed need some seconds to end
POLL_S = 0.1
MAX_BYTES = 1024  # of a lock file


class HeldError(MachineError):
    """Another command has the lock of a place; the message says which."""


@dataclass(frozen=True)
class Holder:
    """The content of a lock file: the command that has the lock."""

    command: str
    process: int
    host: str
    since: str

    def __str__(self) -> str:
        where = "this machine" if self.host == socket.gethostname() else shown(self.host, 64)
        what, since = shown(self.command, 64), shown(self.since, 64)
        return f"{what} (process {self.process} on {where}, since {since})"


def beside(path: Path) -> Path:
    """Return the lock file of a file, or of a folder that is replaced as a whole."""
    return path.with_name(f".{path.name}{FILE}")


def of_answers(file: Path) -> Path:
    """Return the lock file of what `regenerate` writes: several files of one name."""
    return beside(file.with_suffix(""))


@contextmanager
def hold(
    place: Path,
    key: str,
    command: str,
    say: Callable[[str], None],
    *,
    file: Path | None = None,
    patience: float | None = None,
) -> Iterator[None]:
    """Lock a place for this command; raise HeldError where another command has the lock.

    place: a folder, made if it is not there, or what `file` is the lock file of. key: the setting
    that names the place. patience: seconds to wait for another command to end, else PATIENCE_S;
    if infinite, `say` gets a line that names the other command.
    """
    file = file or place / FILE
    lock, made_folder = _lock_of(file, command), False

    def take() -> str | None:
        nonlocal made_folder
        if not file.parent.is_dir():
            file.parent.mkdir(parents=True, exist_ok=True)
            made_folder = True
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return _holder(file)
        except FileNotFoundError:  # whoever made the folder has just removed it
            return "another command"
        if any(map(_is_locked, file.parent.glob(f"{file.name}.rank*"))):
            lock.release()
            return "the ranks of a run that is ending"
        return None

    try:
        _await_free(take, place, key, patience, say)
    except OSError as error:
        raise DiskError(f"{key}={place} could not be written: {reason(error, place)}") from error
    process = os.getpid()
    try:
        with _released(lock):
            yield
    finally:
        if made_folder and os.getpid() == process:
            with suppress(OSError):  # something was written there
                file.parent.rmdir()


def require_free(
    place: Path, key: str, *, file: Path | None = None, patience: float | None = None
) -> None:
    """Raise HeldError where another command has the lock of a place; make and lock nothing."""
    _await_free(lambda: holder_of(place, file), place, key, patience)


def _await_free(
    holder_now: Callable[[], str | None],
    place: Path,
    key: str,
    patience: float | None,
    say: Callable[[str], None] | None = None,
) -> None:
    until = time.monotonic() + (PATIENCE_S if patience is None else patience)
    while (holder := holder_now()) is not None:
        if time.monotonic() >= until:
            raise HeldError(
                f"{key} must name a place that no other command writes, got {place}, which is held "
                f"by {holder}; wait for it to end, or name another place"
            )
        if say is not None and patience == math.inf:
            say(f"waiting for {holder}, which writes {place}")
            say = None
        time.sleep(POLL_S)


def holder_of(place: Path, file: Path | None = None) -> str | None:
    """Return which command has the lock of a place now, None where it is not locked."""
    file = file or place / FILE
    return _holder(file) if _is_locked(file) else None


@contextmanager
def attend(place: Path, rank: int) -> Iterator[None]:
    """Mark that a rank other than 0 may still write to the place.

    Rank 0, which has the lock, may be killed alone: the next command waits until all ranks have
    ended.
    """
    lock = _lock_of(place / f"{FILE}.rank{rank}", "rank")
    with writing(place):
        lock.acquire()
    with _released(lock):
        yield


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time change a file that several commands write, for a moment each."""
    # The holder's name is not written: a full disk has no space for another file's text.
    lock = _lock_of(beside(path))
    with writing(path):
        lock.acquire(poll_interval=0.01)
    with _released(lock):
        yield


def _lock_of(file: Path, command: str = "") -> FileLock:
    """Return the lock of a file, which names its holder as soon as it is taken, if a command."""
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    holder = Holder(command[:64], os.getpid(), socket.gethostname()[:64], since)

    def write(descriptor: int) -> None:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(errno.EINVAL, "it must be a file of its own, and is something else", file)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)

    # Without the kernel's lock a file would stay locked after its process was killed.
    named = write if command else None
    return FileLock(file, thread_local=False, fallback_to_soft=False, on_acquired=named)


@contextmanager
def _released(lock: FileLock) -> Iterator[None]:
    """Release a lock at the end; a fork of the process that took it releases nothing."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:
            with suppress(OSError):  # before the release: who waits for the lock notices it
                os.unlink(lock.lock_file)
            lock.release()


def _is_locked(file: Path) -> bool:
    """Whether a process has the lock of a file."""
    if not file.is_file():  # the probe would make it
        return False
    probe = _lock_of(file)
    try:
        probe.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:
        return False
    probe.release()
    return False


def _holder(file: Path) -> str:
    """Return who has the lock of a file, for a message."""
    with suppress(OSError, UntrustedError):
        return str(typed(Holder, read_bytes(file, MAX_BYTES), "a lock"))
    return "another command"
