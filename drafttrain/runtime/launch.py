"""Several ranks from one command: torch's own launcher starts them, a failure is reported once."""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from drafttrain.runtime.config import HardwareConfig
from drafttrain.runtime.disk import no_link
from drafttrain.runtime.hardware import num_cores
from drafttrain.runtime.rank_process import LAUNCHER, STORE, say_error
from drafttrain.runtime.run_folder import MANIFEST, has_checkpoints
from drafttrain.runtime.settings import require
from drafttrain.runtime.signals import SIGNALS, answered
from drafttrain.runtime.terminal import console

# Time to save for ranks that were asked to end (SIGTERM); torch's own variable overrides it.
GRACE_S = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300"))
# Time for the other ranks to end when one has died: a collective over NCCL would wait for long.
LOST_S = 3.0
ENDED_ON_REQUEST = {128 + signal.SIGTERM, 128 + signal.SIGINT}  # exit codes; not a failure
QUOTED = 300  # characters of a dead rank's last line
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def ranks_to_start(
    hardware: HardwareConfig, environ: Mapping[str, str], gpus: int, cores: int
) -> int:
    """Return how many ranks to start on this machine; 1: none, this process does the work.

    environ: after `adopt`. gpus, cores: how many this machine shows. Raises ValueError where
    hardware.ranks contradicts the launcher that started this process, or exceeds the GPUs, or
    without GPUs the cores, unless hardware.threads lets ranks share them.
    """
    wanted, device = hardware.ranks, hardware.device
    if "RANK" in environ:
        started = int(environ.get("LOCAL_WORLD_SIZE", "0"))
        need = f"be auto, or {started} as the launcher started on this machine"
        other = f"; leave it out, or start {wanted} per machine"
        require(not started or wanted in ("auto", started), "hardware.ranks", need, wanted, other)
        return 1
    if device.startswith("cuda:"):
        need = f"be cuda for hardware.ranks={wanted}, each rank takes a GPU of its own"
        use = "; use hardware.device=cuda and CUDA_VISIBLE_DEVICES"
        require(wanted in ("auto", 1), "hardware.device", need, device, use)
        return 1
    if device == "cpu" or gpus == 0:
        # Without a GPU, hardware.device=cuda is refused once, where the device is chosen.
        if wanted == "auto" or device == "cuda":
            return 1
        need = f"be at most {cores} on a CPU, the cores that this machine gives"
        share = "; leave it out, or let them share the cores by hardware.threads=1"
        require(wanted <= cores or hardware.threads > 0, "hardware.ranks", need, wanted, share)
        return wanted
    placement = hardware.target_placement
    if wanted == "auto":
        wanted = 1 if placement == "vllm" else gpus
    need = f"be at most {gpus}, the GPUs that this machine shows"
    use = "; leave it out, or use hardware.device=cpu"
    require(wanted <= gpus, "hardware.ranks", need, wanted, use)
    return 1 if placement == "device_map" else wanted  # one process spreads the target over all


def launch(hardware: HardwareConfig, arguments: Sequence[str], folder: Path) -> int | None:
    """Run the command line on every GPU of this machine; None if this process is to do the work.

    folder: the run's, for the last output of a rank that died. Returns the exit code, after
    reporting the cause of a failure in one line.
    """
    cores = num_cores()
    count = ranks_to_start(hardware, os.environ, torch.cuda.device_count(), cores)
    if count == 1:
        return None
    threads = hardware.threads or max(1, cores // count)
    console.print(f"{count} ranks on this machine, {threads} CPU threads each")
    return start(["-m", "drafttrain", *arguments], count, threads, folder)


def start(arguments: Sequence[str], count: int, threads: int, folder: Path) -> int:
    """Run this Python interpreter as `count` ranks of one machine until all end; see `launch`."""
    settings = {
        LAUNCHER: str(os.getpid()),
        # Ranks of one machine listen to nobody outside it, whatever a cluster's shell sets.
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in answered()),
        # Set before any library reads it: else each rank would take every core.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    with tempfile.TemporaryDirectory(prefix="drafttrain_ranks_") as logs:
        settings[STORE] = str(Path(logs) / "store")
        with _as_launcher(settings):
            return _run(_Agent(list(arguments), count, logs), count, folder)


def _run(agent: "_Agent", count: int, folder: Path) -> int:
    try:
        agent.run()
    except SignalException as stop:
        _show_cursor()
        return _tell_stopped(agent, stop.sigval, count, folder)
    finally:
        agent.release()
    if not agent.ended:
        return 0
    _show_cursor()
    return _tell_failed(agent, count, folder)


class _OneMachine(RendezvousHandler):
    """A rendezvous of a single machine for torch's agent.

    torch's own rendezvous opens two ports to every network, and unpickles what arrives at one of
    them. Here the agent's store stays in its process, and the ranks meet at a file (`STORE`).
    """

    def get_backend(self) -> str:
        """Return a name for torch's log."""
        return "one machine"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return that this machine is the first of one."""
        nowhere = RendezvousStoreInfo("localhost", 0)
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=nowhere)

    def is_closed(self) -> bool:
        """Return whether nobody else may join; torch does not call it here."""
        return False

    def set_closed(self) -> None:
        """Let nobody else join: nobody can."""

    def num_nodes_waiting(self) -> int:
        """Return how many machines would like to join."""
        return 0

    def get_run_id(self) -> str:
        """Return a name for torch's log."""
        return "drafttrain"

    def shutdown(self) -> bool:
        """Release what was opened: nothing."""
        return True


class _Agent(LocalElasticAgent):
    """torch's agent of one machine, which records how each rank ended.

    torch sends SIGTERM to the other ranks when one died, and waits 30 s. SIGTERM asks a rank to
    save, which takes all ranks: here the others get a moment to notice the loss and are killed.
    """

    def __init__(self, arguments: list[str], count: int, logs: str) -> None:
        others = dict.fromkeys(range(1, count), Std.ALL)  # to files; rank 0 has the terminal
        spec = WorkerSpec(
            role="rank",
            local_world_size=count,
            entrypoint=sys.executable,
            args=tuple(arguments),
            rdzv_handler=_OneMachine(),
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="localhost",
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=logs, redirects=others))
        self.ended: dict[int, tuple[int, float]] = {}  # exit code, and when it was noticed
        self.killed: list[int] = []  # ranks that did not end when asked to
        self.hurried = False  # whether Ctrl-C came again

    @property
    def _processes(self) -> SubprocessContext:
        assert isinstance(self._pcontext, SubprocessContext), "the ranks are not started yet"
        return self._pcontext

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended; minus its number for a signal."""
        if self._pcontext is None:
            return {}
        handlers = self._processes.subprocess_handlers.items()
        codes = {rank: handler.proc.poll() for rank, handler in handlers}
        return {rank: code for rank, code in codes.items() if code is not None}

    def word(self, rank: int) -> dict[str, Any]:
        """Return what a rank wrote about its failure; empty if it could not."""
        if self._pcontext is None:
            return {}
        try:
            return json.loads(Path(self._processes.error_files[rank]).read_text())
        except (OSError, ValueError):
            return {}

    def errors(self, rank: int) -> Path | None:
        """Return the file with a rank's stderr, None if it has none or an empty one."""
        file = self._processes.stderrs.get(rank)
        return Path(file) if file and os.path.getsize(file) else None

    def release(self) -> None:
        """Close the ranks' files; torch leaves these to the garbage collector."""
        if self._pcontext is not None:
            for handler in self._processes.subprocess_handlers.values():
                for file in filter(None, (handler._stdout, handler._stderr)):
                    file.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._notice()
        if self.ended:
            on_request = {code for code, _ in self.ended.values()} <= ENDED_ON_REQUEST
            self._await(GRACE_S if on_request else LOST_S)
            self._processes.close(signal.SIGKILL, 5)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **unused: Any) -> None:
        if self._pcontext is not None and self._running():
            signal.signal(signal.SIGINT, self._hurry)
            for rank in self._running():
                # The rank alone: torch would signal its children too, such as the tracker's.
                self._processes.subprocess_handlers[rank].proc.send_signal(death_sig)
            self._await(GRACE_S)
            self.killed = self._running()
            self._processes.close(signal.SIGKILL, 5)
        super()._shutdown(death_sig)

    def _hurry(self, *_: Any) -> None:
        self.hurried = True

    def _running(self) -> list[int]:
        ended = self.exit_codes()
        return [rank for rank in self._processes.pids() if rank not in ended]

    def _notice(self) -> None:
        for rank, code in self.exit_codes().items():
            if code != 0:
                self.ended.setdefault(rank, (code, time.time()))

    def _await(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.hurried:
            self._notice()
            if not self._running():
                return
            time.sleep(0.05)


def _tell_failed(agent: _Agent, count: int, folder: Path) -> int:
    """Report why the ranks ended, once; return the exit code."""
    words = {rank: agent.word(rank) for rank in agent.ended}

    def order(rank: int) -> tuple[bool, float]:
        code, noticed = agent.ended[rank]
        # NCCL's watchdog aborts a process when another rank is gone.
        consequence = words[rank].get("consequence", code == -signal.SIGABRT)
        return consequence, words[rank].get("time", noticed)

    rank = min(agent.ended, key=order)
    code, word = agent.ended[rank][0], words[rank]
    if code in ENDED_ON_REQUEST and not word:
        if agent.ended.get(0, (1,))[0] not in ENDED_ON_REQUEST:  # else rank 0 has said so
            say_error(f"rank {rank} of {count} alone was asked to end{_how_to_resume(folder)}")
        return code
    if word.get("foreseen"):
        say_error(f"error: {word['message']}")
        return code
    if word:
        end = f"ended with exit code {code}: {word['message']}"
    elif code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            end += ", perhaps by the system for want of memory"
        end += _last_line(agent, rank, folder)
    else:
        end = f"ended with exit code {code} and no error{_last_line(agent, rank, folder)}"
    others = "; the other ranks were ended"
    say_error(f"error: rank {rank} of {count} {end}{others}{_how_to_resume(folder)}")
    return code if code > 0 else 128 - code


def _tell_stopped(agent: _Agent, stop: signal.Signals, count: int, folder: Path) -> int:
    """Report how ranks that were asked to end did so, unless rank 0 has; return the exit code."""
    words = [(rank, agent.word(rank)) for rank in range(count)]
    for rank, word in words:
        if word and not word["consequence"]:
            say_error(f"error: {stop.name}, and then rank {rank} of {count}: {word['message']}")
            return int(word["code"])
    codes = agent.exit_codes()
    if agent.hurried:
        say_error(f"interrupted again: the ranks were ended at once{_how_to_resume(folder)}")
    elif agent.killed:
        say_error(
            f"error: {len(agent.killed)} of {count} ranks did not end within {GRACE_S:g} s of "
            f"{stop.name} and were killed{_how_to_resume(folder)}; "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=SECONDS gives them longer"
        )
    elif codes.get(0, -1) >= 0 and not words[0][1]:
        return 128 + stop if codes[0] in ENDED_ON_REQUEST else codes[0]
    else:
        say_error(f"ended by {stop.name}{_how_to_resume(folder)}")
    return 128 + stop


def _how_to_resume(folder: Path) -> str:
    if (folder / MANIFEST).is_file():  # a store, which `capture` writes
        return "; the same command resumes where it stopped"
    if has_checkpoints(folder):
        return "; resume with run.resume=true"
    return "; there is no checkpoint yet: start again"


def _last_line(agent: _Agent, rank: int, folder: Path) -> str:
    """Keep a dead rank's stderr in a file, and return a note that quotes its last line."""
    file = agent.errors(rank)
    if file is None:
        return ""
    kept = (folder if folder.is_dir() else Path()) / f"error_rank{rank}.log"
    with open(kept, "ab", opener=no_link) as log, file.open("rb") as source:
        shutil.copyfileobj(source, log)
    lines = file.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; its stderr is in {kept} and ends: {last[:QUOTED]}"


@contextmanager
def _as_launcher(settings: Mapping[str, str]) -> Iterator[None]:
    """Give the ranks their environment, keep torch's launcher quiet, and undo both at the end."""
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    disabled = logging.root.manager.disable
    os.environ.update(settings)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(before)


def _show_cursor() -> None:
    if console.is_terminal:  # a killed rank 0 leaves its progress bar as it was
        console.show_cursor(True)
