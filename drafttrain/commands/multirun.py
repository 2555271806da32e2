"""A sweep: its jobs one after the other, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from drafttrain.config.overrides import UsageError
from drafttrain.config.sweep import Sweep, SweepJob, listed, several, sweep_of
from drafttrain.runtime.disk import require_writable
from drafttrain.runtime.journal import read_records, replace_records
from drafttrain.runtime.lock import hold
from drafttrain.runtime.run_folder import call
from drafttrain.runtime.signals import SIGNALS, Stopped
from drafttrain.runtime.terminal import console
from drafttrain.runtime.untrusted_input import escaped

RECORD = "jobs.jsonl"
LOGS = "logs"
BEGUN, DONE, FAILED, STOPPED = "begun", "done", "failed", "stopped"
SHOWN = 300  # characters of what a job said last


@dataclass(frozen=True)
class Outcome:
    """What became of a job: a line of the record."""

    name: str
    overrides: list[str]
    result: str
    status: int | None = None
    said: str = ""  # the last line of its output
    seconds: float = 0.0


def multirun(command: str, overrides: Sequence[str], config_dir: Path | None) -> int:
    """Carry out every job of a sweep; return 1 where one failed, else 0.

    The record in the sweep's folder has a line for each job. The same command line skips those that
    are done there, and a training that was begun resumes. Raises Stopped after a signal, which the
    job at work was sent.
    """
    if "RANK" in os.environ:
        raise UsageError("--multirun starts every job itself: it takes plain python, no launcher")
    sweep = sweep_of(command, overrides)
    require_writable(sweep.folder, "hydra.sweep.dir")
    with hold(sweep.folder, "hydra.sweep.dir", f"{command} --multirun", console.print):
        (sweep.folder / LOGS).mkdir(exist_ok=True)
        outcomes = _read(sweep.folder / RECORD)
        console.print(
            f"{len(sweep.jobs)} jobs; their output is in {sweep.folder / LOGS}, their record in "
            f"{sweep.folder / RECORD}"
        )
        for number, job in enumerate(sweep.jobs, 1):
            place = f"{number}/{len(sweep.jobs)}  {job.name}  {' '.join(job.told)}"
            before = outcomes.get(job.name)
            if before is not None and before.overrides != job.overrides:
                before = None
            if before is not None and before.result == DONE:
                console.print(f"{place}  done before: {before.said}")
                continue
            words = [
                command,
                *([f"--config-dir={config_dir}"] if config_dir else []),
                *job.overrides,
            ]
            if command == "train" and before is not None and not _resumes(job):
                words.append("run.resume=true")
            log = sweep.folder / LOGS / f"{job.name}.log"
            _keep(sweep, outcomes, Outcome(job.name, job.overrides, BEGUN))
            start = time.monotonic()
            with console.status(f"{place}  runs; its output: {log}"):
                status, stop, said = _run(words, log)
            result = DONE if status == 0 else STOPPED if stop else FAILED
            seconds = round(time.monotonic() - start, 1)
            _keep(sweep, outcomes, Outcome(job.name, job.overrides, result, status, said, seconds))
            console.print(f"{place}  {result} after {seconds:.0f} s: {said}")
            if stop:
                how = "interrupted" if stop == signal.SIGINT else f"stopped by {stop.name}"
                raise Stopped(f"{how}; the same command goes on with the sweep", _status(stop))
    return _conclude(command, sweep, outcomes)


def _conclude(command: str, sweep: Sweep, outcomes: dict[str, Outcome]) -> int:
    """Say what to do with what the jobs made, and which of them failed."""
    done = [job for job in sweep.jobs if outcomes[job.name].result == DONE]
    runs = list(dict.fromkeys(job.run for job in done if job.run is not None))
    names = list(dict.fromkeys(job.evaluation for job in done))
    if command == "train" and runs:
        console.print(f"next: {call('evaluate', '--multirun', several('run.dir', runs))}")
    if command in ("train", "evaluate") and len(runs) > 1 and len(names) == 1:
        other = [f"compare.evaluation={names[0]}"] if names[0] not in (None, "default") else []
        lead = "then: " if command == "train" else "next: "
        console.print(f"{lead}{call('compare', listed('runs', runs), *other)}")
    failed = [job.name for job in sweep.jobs if job not in done]
    if failed:
        print(
            f"error: {len(failed)} of {len(sweep.jobs)} jobs failed: {', '.join(failed)}; their "
            f"output is in {sweep.folder / LOGS}; the same command tries them again",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _resumes(job: SweepJob) -> bool:
    return any(text.startswith("run.resume=") for text in job.overrides)


def _run(words: Sequence[str], log: Path) -> tuple[int, signal.Signals | None, str]:
    """Run a command line; return its status, the signal that came meanwhile, and its last line.

    Every signal that asks this process to end is passed on to the job.
    """
    came: list[signal.Signals] = []
    job: list[subprocess.Popen[bytes]] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if not came and number == signal.SIGINT:
            # Not by sys.stderr, which may be at work just now.
            os.write(2, b"\ninterrupted: the job is asked to end; Ctrl-C again ends it at once\n")
        came.append(signal.Signals(number))
        for process in job:
            process.send_signal(number)

    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        with log.open("ab") as output:
            start = output.tell()
            # In a group of its own: Ctrl-C reaches it once, through us.
            process = subprocess.Popen(
                [sys.executable, "-m", "drafttrain", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            job.append(process)
            if came:
                process.send_signal(came[0])
            status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with log.open("rb") as written:
        written.seek(start)
        lines = written.read().decode(errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith("next: ")]
    return status, came[0] if came else None, escaped(said[-1][:SHOWN]) if said else "no output"


def _status(stop: signal.Signals) -> int:
    return 128 + (stop if stop == signal.SIGINT else signal.SIGTERM)


def _read(record: Path) -> dict[str, Outcome]:
    if not record.is_file():
        return {}
    return {outcome.name: outcome for outcome in read_records(record, Outcome)}


def _keep(sweep: Sweep, outcomes: dict[str, Outcome], outcome: Outcome) -> None:
    outcomes[outcome.name] = outcome
    replace_records(sweep.folder / RECORD, map(asdict, outcomes.values()))
