"""Locks: one command at a time writes a place, an error names its holder, a dead one holds nothing.

The lock is the kernel's flock on a file, which ends with its process. Some file systems refuse it
(ENOLCK, ENOSYS), and some grant it on each machine apart (NFS with nolock, Lustre with localflock,
BeeGFS), which looks like a lock that all machines see. So where a file system may be shared, the
holder also rewrites its record in the file every second, and a command that finds a record of
another machine there waits to see whether it changes.
"""

import fcntl
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from drafttrain.runtime.disk import DiskError, MachineError, reason, writing
from drafttrain.runtime.flock import (
    close,
    is_locked,
    is_named,
    is_of_one_machine,
    open_file,
    open_locked,
    opened,
    try_lock,
)
from drafttrain.runtime.untrusted_input import UntrustedError, shown, typed

FILE = ".lock"  # in the locked folder; it exists while a command runs, or after one was killed
PATIENCE_S = 5.0  # the ranks of a run whose launcher was killed need some seconds to end
POLL_S = 0.1
BEAT_S = 1.0  # how often a record is rewritten
SETTLE_S = 2.5 * BEAT_S  # after it, a holder has written over the record of an intruder
SILENT_S = 10 * BEAT_S  # a holder that was silent for this long is dead
RECORD_BYTES = 512  # the length of every record: one is written over another


class HeldError(MachineError):
    """Another command holds the place; the message says which."""


@dataclass(frozen=True)
class Record:
    """The content of a lock file: its holder."""

    command: str
    process: int
    host: str
    machine: str  # and when it was started
    since: str
    token: str  # of this holder and no other
    beat: int = 0

    def __str__(self) -> str:
        where = "this machine" if self.machine == machine() else shown(self.host, 64)
        what, since = shown(self.command, 64), shown(self.since, 64)
        return f"{what} (process {self.process} on {where}, since {since})"

    def encoded(self) -> bytes:
        """Return the content of a lock file."""
        return json.dumps(asdict(self)).encode().ljust(RECORD_BYTES - 1) + b"\n"


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
    """Lock a place for this command; raise HeldError where another command holds it.

    place: a folder, made if it is not there, or what `file` is the lock file of. key: the setting
    that names the place. patience: seconds to wait for another command to end, else PATIENCE_S;
    if infinite, `say` gets a line that names the other command.
    """
    lock = _Lock(file or place / FILE, command, say)
    try:
        _await_free(lock.take, place, key, patience, say)
    except OSError as error:
        raise DiskError(f"{key}={place} could not be written: {reason(error, place)}") from error
    try:
        yield
    finally:
        lock.release()


def require_free(
    place: Path, key: str, *, file: Path | None = None, patience: float | None = None
) -> None:
    """Raise HeldError where another command holds a place; make and lock nothing."""
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
    """Return which command holds a place now, None where it is not locked."""
    with suppress(OSError), opened(file or place / FILE) as descriptor:
        if try_lock(descriptor, fcntl.LOCK_SH) is False:
            return _named(descriptor)
    return None


@contextmanager
def attend(place: Path) -> Iterator[None]:
    """Mark, on a rank other than 0, that this process may still write to the place.

    Rank 0, which holds it, may be killed alone: the next command waits until all ranks have ended.
    """
    file = _of_ranks(place / FILE)
    with writing(file):
        descriptor = open_locked(file, fcntl.LOCK_SH)
    mine = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == mine:
            with suppress(OSError):
                if try_lock(descriptor, fcntl.LOCK_EX) and is_named(descriptor, file):
                    file.unlink()  # this is the last
            close(descriptor)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time change a file that several commands write, for a moment each."""
    file = beside(path)
    with writing(path):
        descriptor = open_locked(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()
        close(descriptor)


class _Lock:
    """The lock file of a place, and whether this process holds the lock."""

    def __init__(self, file: Path, command: str, say: Callable[[str], None]) -> None:
        self.file, self.say = file, say
        self.record = Record(
            command=command[:64],
            process=os.getpid(),
            host=socket.gethostname()[:64],
            machine=machine(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            token=secrets.token_hex(8),
        )
        self.descriptor = -1
        self.made_folder = False
        self._ending = threading.Event()
        self._beats: threading.Thread | None = None

    def take(self) -> str | None:
        """Try to take the lock; return None where this process has it now, else its holder."""
        if not self.file.parent.is_dir():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.made_folder = True
        try:
            self.descriptor = open_file(self.file)
        except FileNotFoundError:  # whoever made the folder has just removed it
            return "another command"
        holder: str | None = ""
        try:
            holder = self._taken()
        finally:
            if holder is not None:
                close(self.descriptor)
        return holder

    def _taken(self) -> str | None:
        locked = try_lock(self.descriptor, fcntl.LOCK_EX)
        if locked is False:
            return _named(self.descriptor)
        if not is_named(self.descriptor, self.file):  # its last holder has just removed it
            return "another command"
        surely = locked is True and is_of_one_machine(self.file)
        earlier = os.pread(self.descriptor, RECORD_BYTES, 0)
        known = _record(earlier)
        # The kernel sees the end of all processes of its own machine.
        elsewhere = known is None or known.machine != machine()
        if not surely and earlier and (locked is None or elsewhere) and self._beating(earlier):
            return _named(self.descriptor)
        if is_locked(_of_ranks(self.file)):
            return "the ranks of a run that is ending"
        os.pwrite(self.descriptor, self.record.encoded(), 0)
        os.fsync(self.descriptor)
        if surely:
            return None
        if locked is None:
            self.say(
                f"{self.file.parent} is on a file system without locks: commands that start on it "
                "at one moment may not notice each other; start one at a time"
            )
        time.sleep(SETTLE_S)
        now = _record(self._read())
        if now is None or now.token != self.record.token:
            return _named(self.descriptor)
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()
        return None

    def release(self) -> None:
        """Release the lock; do nothing in a fork of the holder."""
        if os.getpid() != self.record.process:
            return
        self._ending.set()
        if self._beats is not None:
            self._beats.join()
        with suppress(OSError):
            if is_named(self.descriptor, self.file):
                self.file.unlink()
        close(self.descriptor)
        with suppress(OSError):  # something was written there
            if self.made_folder:
                self.file.parent.rmdir()

    def _read(self) -> bytes:
        """Return what other machines see: an open file may show this machine's cached content."""
        with suppress(OSError), opened(self.file) as descriptor:
            return os.pread(descriptor, RECORD_BYTES, 0)
        return b""

    def _beating(self, earlier: bytes) -> bool:
        """Whether the holder of a record rewrites it."""
        self.say(
            f"{_record(earlier) or 'another command'} did not let go of {self.file.parent}: "
            f"waiting {SILENT_S:g} s to see whether it is gone"
        )
        until = time.monotonic() + SILENT_S
        while time.monotonic() < until:
            time.sleep(BEAT_S / 2)
            if self._read() != earlier:
                return True
        return False

    def _beat(self) -> None:
        while not self._ending.wait(BEAT_S):
            self.record = replace(self.record, beat=self.record.beat + 1)
            with suppress(OSError):  # a disk may be unreachable for a while
                os.pwrite(self.descriptor, self.record.encoded(), 0)
                os.fsync(self.descriptor)


def machine() -> str:
    """Return an identifier of this machine since its last boot."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _of_ranks(file: Path) -> Path:
    return file.with_name(f"{file.name}.ranks")


def _record(content: bytes) -> Record | None:
    try:
        return typed(Record, content, "a lock")
    except UntrustedError:
        return None


def _named(descriptor: int) -> str:
    """Return who holds an open lock file, for a message."""
    try:
        record = _record(os.pread(descriptor, RECORD_BYTES, 0))
    except OSError:  # SMB lets nobody read what another has locked
        record = None
    return str(record or "another command")
