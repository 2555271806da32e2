"""The kernel's lock on a file, which ends with its process: alone, or shared.

It is flock and not POSIX's lockf, which releases the lock as soon as the process closes any other
descriptor of the file, in whatever library.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
OF_ONE_MACHINE = {
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs"),
    *("tmpfs", "ramfs", "overlay"),
}

_opened: set[int] = set()  # descriptors: a fork must not keep a lock after its parent's end


def open_file(file: Path) -> int:
    """Open a lock file for this process, not for its programs and forks; a link is refused."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0o666)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it must be a file of its own, and is something else", file)
    _opened.add(descriptor)
    return descriptor


def open_locked(file: Path, kind: int) -> int:
    """Return an open lock file once it is locked, or at once where there are no locks."""
    while True:
        descriptor = open_file(file)
        try:
            if not try_lock(descriptor, kind, wait=True) or is_named(descriptor, file):
                return descriptor
        except BaseException:
            close(descriptor)
            raise
        close(descriptor)


def close(descriptor: int) -> None:
    _opened.discard(descriptor)
    os.close(descriptor)


def _close_in_fork() -> None:
    # flock belongs to the open file, which a fork shares: it would outlive a parent that is killed.
    # Closing it here leaves the parent's lock as it is.
    for descriptor in _opened:
        with suppress(OSError):
            os.close(descriptor)
    _opened.clear()


os.register_at_fork(after_in_child=_close_in_fork)


def try_lock(descriptor: int, kind: int, wait: bool = False) -> bool | None:
    """Lock an open file; return whether that was possible, None where there are no locks."""
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


@contextmanager
def opened(file: Path, access: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file, but no link, for a moment: NFS then asks its server. A pipe does not block."""
    descriptor = os.open(file, access | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_named(descriptor: int, file: Path) -> bool:
    """Whether a name is still that of the open file: its holder may have removed it meanwhile."""
    with suppress(OSError), opened(file) as fresh:
        return os.path.sameopenfile(fresh, descriptor)
    return False


def is_locked(file: Path) -> bool:
    """Whether any process has a lock on a file, a shared one included."""
    with suppress(FileNotFoundError), opened(file, os.O_RDWR) as descriptor:
        return try_lock(descriptor, fcntl.LOCK_EX) is False
    return False


def is_of_one_machine(file: Path) -> bool:
    """Whether a file's file system is known to be of this machine alone."""
    best, kind = "", ""
    with suppress(OSError, IndexError):
        place = str(file.parent.resolve())
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            point = fields.split()[4].encode().decode("unicode_escape")  # a space is \040
            inside = place == point or place.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, rest.split()[0]
    return kind in OF_ONE_MACHINE
