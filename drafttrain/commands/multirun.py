"""A sweep: its jobs one after the other, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drafttrain.config.groups import follow_up
from drafttrain.config.overrides import UsageError
from drafttrain.config.sweep import Sweep, listed, several, sweep_of
from drafttrain.runtime.disk import no_link, refuse_links, require_writable
from drafttrain.runtime.journal import read_records, replace_records
from drafttrain.runtime.lock import hold
from drafttrain.runtime.rank_process import SWEEP, say_error
from drafttrain.runtime.signals import Stopped, answered_by
from drafttrain.runtime.terminal import console
from drafttrain.runtime.untrusted_input import escaped

RECORD = "jobs.jsonl"
LOGS = "logs"
BEGUN, DONE, FAILED, STOPPED = "begun", "done", "failed", "stopped"
SHOWN = 300  # characters of a job's last line of output
POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job: a line of the record."""

    name: str
    overrides: list[str]
    result: str
    status: int | None = None
    last_line: str = ""  # of its output
    seconds: float = 0.0


def multirun(command: str, overrides: Sequence[str], config_dir: Path | None) -> int:
    """Run every job of a sweep; return 1 if any failed, else 0.

    The record in the sweep's folder has a line for each job. The same command line skips the jobs
    that the record has as done, and resumes a training that was begun. Raises Stopped after a
    signal, which is passed on to the running job.
    """
    if "RANK" in os.environ:
        raise UsageError("--multirun starts every job itself: it takes plain python, no launcher")
    sweep = sweep_of(command, overrides)
    require_writable(sweep.folder, "hydra.sweep.dir")
    refuse_links(sweep.folder, of_runs=True)
    with hold(sweep.folder, "hydra.sweep.dir", f"{command} --multirun", console.print):
        (sweep.folder / LOGS).mkdir(exist_ok=True)
        record = sweep.folder / RECORD
        text = record.read_bytes() if record.is_file() else b""
        if text and not text.endswith(b"\n"):
            raise UsageError(f"{record} must be whole lines of JSON, got a cut one at its end")
        before_now = read_records(record, Outcome) if text else ()
        outcomes = {outcome.name: outcome for outcome in before_now}
        console.print(
            f"{len(sweep.jobs)} jobs; their output is in {sweep.folder / LOGS}, their record in "
            f"{record}"
        )
        for number, job in enumerate(sweep.jobs, 1):
            place = f"{number}/{len(sweep.jobs)}  {job.name}  {' '.join(job.told)}"
            before = outcomes.get(job.name)
            begun = before is not None and before.overrides == job.overrides
            if before is not None and begun and before.result == DONE:
                console.print(f"{place}  done before: {before.last_line}")
                continue
            own = [f"--config-dir={config_dir}"] if config_dir else []
            words = [command, *own, *job.overrides]
            resumes = any(text.startswith("run.resume=") for text in words)
            if command == "train" and begun and not resumes:
                words.append("run.resume=true")
            log = sweep.folder / LOGS / f"{job.name}.log"
            _keep(sweep, outcomes, Outcome(job.name, job.overrides, BEGUN))
            start = time.monotonic()
            with console.status(f"{place}  running; its output: {log}"):
                status, stop, last_line = _run(words, log)
            result = DONE if status == 0 else STOPPED if stop else FAILED
            seconds = round(time.monotonic() - start, 1)
            _keep(
                sweep,
                outcomes,
                Outcome(job.name, job.overrides, result, status, last_line, seconds),
            )
            console.print(f"{place}  {result} after {seconds:.0f} s: {last_line}")
            if stop:
                how, code = f"stopped by {stop.name}", 128 + signal.SIGTERM
                if stop == signal.SIGINT:
                    how, code = "interrupted", 128 + stop
                raise Stopped(f"{how}; the same command resumes the sweep", code)
    return _conclude(command, sweep, outcomes)


def _conclude(command: str, sweep: Sweep, outcomes: dict[str, Outcome]) -> int:
    """Print the commands to run next and the jobs that failed; return the sweep's status."""
    done = [job for job in sweep.jobs if outcomes[job.name].result == DONE]
    runs = list(dict.fromkeys(job.run for job in done if job.run is not None))
    names = list(dict.fromkeys(job.evaluation for job in done))
    if command == "train" and runs:
        console.print(f"next: {follow_up('evaluate', '--multirun', several('run.dir', runs))}")
    if command in ("train", "evaluate") and len(runs) > 1 and len(names) == 1:
        other = [f"compare.evaluation={names[0]}"] if names[0] not in (None, "default") else []
        lead = "then: " if command == "train" else "next: "
        console.print(f"{lead}{follow_up('compare', listed('runs', runs), *other)}")
    if any(sweep.folder.glob("*/tensorboard")):
        console.print(f"all curves: tensorboard --logdir {sweep.folder}")
    failed = [job.name for job in sweep.jobs if job not in done]
    if failed:
        say_error(
            f"error: {len(failed)} of {len(sweep.jobs)} jobs failed: {', '.join(failed)}; their "
            f"output is in {sweep.folder / LOGS}; the same command tries them again"
        )
    return 1 if failed else 0


def _run(words: Sequence[str], log: Path) -> tuple[int, signal.Signals | None, str]:
    """Run a command line; return its status, a signal received meanwhile, and its last line.

    Every signal that asks this process to end is passed on to the job.
    """
    came: list[signal.Signals] = []
    passed_on = 0
    listening = answered_by(lambda number, frame: came.append(signal.Signals(number)))
    with listening, open(log, "ab", opener=no_link) as output:
        start = output.tell()
        # In a group of its own: Ctrl-C reaches it once, through us.
        process = subprocess.Popen(
            [sys.executable, "-m", "drafttrain", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, SWEEP: str(os.getpid())},  # it ends with this process
            process_group=0,
        )
        while process.poll() is None:
            for number in came[passed_on:]:
                if not passed_on and number == signal.SIGINT:
                    say_error(
                        "\ninterrupted: the job is asked to end; Ctrl-C again ends it at once"
                    )
                process.send_signal(number)
                passed_on += 1
            time.sleep(POLL_S)
    with log.open("rb") as written:
        written.seek(start)
        lines = written.read().decode(errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("next: ")]
    told = escaped(lines[-1][:SHOWN]) if lines else "no output"
    return process.returncode, came[0] if came else None, told


def _keep(sweep: Sweep, outcomes: dict[str, Outcome], outcome: Outcome) -> None:
    outcomes[outcome.name] = outcome
    replace_records(sweep.folder / RECORD, map(asdict, outcomes.values()))
