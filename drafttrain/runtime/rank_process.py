"""A process among the ranks of a launcher: its rank, who reports errors, how it ends."""

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drafttrain.runtime.disk import MachineError, write_whole

TOGETHER = ("train", "capture")  # commands that several ranks run; any other is one process
LAUNCHER = "DRAFTTRAIN_LAUNCHER"  # in the ranks that `launch` started: the pid of their launcher
SWEEP = "DRAFTTRAIN_SWEEP"  # in a job of a sweep, until it has read it: the pid of its sweep
STORE = "DRAFTTRAIN_STORE"  # the file at which these ranks meet, in a folder that is the user's own
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torch's launcher looks for a rank's last words
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl(2)


class LauncherError(ValueError):
    """The variables that a launcher set do not tell which rank this process is."""


def adopt(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment, so that every launcher looks like torchrun.

    DeepSpeed's has another name for the ranks of this machine; under SLURM's srun of several tasks
    each task is a rank. Raises LauncherError where a variable is no number, or where SLURM does not
    tell where rank 0 listens.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not environ.get(name, "0").isdecimal():
            raise LauncherError(
                f"{name} must be a number, got {environ[name]!r}; unset it, or start by a launcher"
            )
    if "RANK" in environ:
        if "LOCAL_SIZE" in environ and "LOCAL_WORLD_SIZE" not in environ:
            return {"LOCAL_WORLD_SIZE": environ["LOCAL_SIZE"]}
        return {}
    # The step's tasks, not the job's: a batch script runs in a job of many tasks but is not one.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "SLURM_PROCID" not in environ:
        return {}
    names = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
    }
    # SLURM writes 2(x3),1 where the machines have 2, 2, 2 and 1 tasks.
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", tasks).split(","):
        each, _, times = part.partition("(x")
        counts += [int(each)] * int(times.rstrip(")") or 1)
    names["LOCAL_WORLD_SIZE"] = str(counts[int(environ.get("SLURM_NODEID", "0"))])
    if environ.get("CUDA_VISIBLE_DEVICES", "").isdecimal():
        names["LOCAL_RANK"] = "0"  # --gpus-per-task=1: each task sees the one GPU that is its own
    if "MASTER_ADDR" not in environ:
        if environ.get("SLURM_STEP_NUM_NODES") != "1":
            raise LauncherError(
                "MASTER_ADDR must name the machine of rank 0 under srun on several, got nothing; "
                "export MASTER_ADDR=$(scontrol show hostnames | head -n 1) before srun, or let "
                "--slurm write the script"
            )
        names["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" not in environ:
        names["MASTER_PORT"] = str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000)
    return names


def rank() -> int:
    """Return which rank this process is; 0 when it is alone, or its launcher does not tell."""
    told = os.environ.get("RANK", "0")
    return int(told) if told.isdecimal() else 0  # `adopt` refuses it


def is_ours() -> bool:
    """Whether `launch` started this process as one of its ranks (its own children do not count)."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def settle() -> None:
    """Adopt a launcher's variables, let only rank 0 print, and end with our launcher or sweep."""
    os.environ.update(adopt(os.environ))
    try:
        os.getcwd()
    except FileNotFoundError:
        raise MachineError("the working directory was deleted: cd to one that exists") from None
    if rank() > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries' C++ code bypasses sys.stdout
        if not is_ours():  # else stderr goes to a file, which is read if this rank dies
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
    parent = os.environ.pop(SWEEP, os.environ[LAUNCHER] if is_ours() else None)
    if parent is not None and sys.platform == "linux":
        # A launcher or a sweep that is killed by -9 cannot end its ranks or its job: the kernel
        # signals them, and they may save.
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if parent != str(os.getppid()):  # it died before we asked
            os.kill(os.getpid(), signal.SIGTERM)


def is_consequence(error: BaseException) -> bool:
    """Whether an error says that another rank is gone: then that rank's error is the cause."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"LostRankError", "DistNetworkError", "DistBackendError"}:
        return True
    marks = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "NCCL")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)


def leave_word(text: str, code: int, foreseen: bool, consequence: bool) -> None:
    """Write why this rank fails to a file; the launching process tells the user, once."""
    place = Path(os.environ[ERROR_FILE])
    word = {"message": text, "timestamp": int(time.time())}  # torch's own reader requires these
    word |= {"time": time.time(), "code": code, "foreseen": foreseen, "consequence": consequence}
    write_whole(place, json.dumps(word))  # torch's reader fails on half a file


def speaks_first() -> bool:
    """Whether this rank is the first on its machine to fail, and so the one that tells the user.

    All ranks of another launcher have the same parent; a file named after it is made only once.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    parent = os.getppid()
    name = f"drafttrain_failed_{os.getuid()}_{parent}"
    with suppress(OSError, IndexError):  # no /proc: the parent's number has to do
        # The 22nd field is its start time: process numbers are reused.
        name += "_" + Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    try:
        os.close(os.open(Path(tempfile.gettempdir()) / name, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


class Output:
    """Standard output or error. If it cannot be written, a command that shows progress goes on.

    stream: a text stream; None where the shell has closed it. A failure is reported once, on
    standard error. A command whose result is printed ends with an error.
    """

    def __init__(self, stream: Any, name: str, is_progress: bool) -> None:
        self.stream, self.name, self.is_progress = stream, name, is_progress
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, call: Callable[[Any], Any]) -> None:
        try:
            if self.stream is not None:  # the shell has closed it
                call(self.stream)
        except OSError as error:
            problem = f"{self.name} could not be written ({error.strerror})"
            said, self.failed = self.failed, True
            if not self.is_progress:
                if isinstance(error, BrokenPipeError):
                    raise
                raise MachineError(problem) from error
            if not said:
                say_error(f"{problem}; the command goes on without its lines")


@contextmanager
def guarded_output() -> Iterator[Output]:
    """Replace sys.stdout and sys.stderr by `Output` while this is open, and yield the first."""
    before = sys.stdout, sys.stderr
    output = Output(sys.stdout, "standard output", is_progress=False)
    sys.stdout, sys.stderr = output, Output(sys.stderr, "standard error", is_progress=True)
    try:
        yield output
    finally:
        sys.stdout, sys.stderr = before


def say_error(text: str) -> None:
    """Print a line for the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def end(code: int) -> None:
    """End this process; a rank that failed does not wait for the others in its clean-up."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # said already; Python would flush again, and fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code and os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(code)
    sys.exit(code)
