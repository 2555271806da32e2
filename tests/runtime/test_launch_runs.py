"""Real runs of two ranks on a CPU, by each launcher, and what a user sees when they go wrong."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from paths import ROOT

from drafttrain.__main__ import main

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
PYTHON = [sys.executable, "-m", "drafttrain"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
LONG = ["trainer.max_steps=100000", "trainer.save_every=5", "trainer.validate_every=100000"]
FAULTY = '''
"""A drafter of the user's own, which fails on rank 1."""
import os, sys, time
from dataclasses import dataclass
from drafttrain.drafters.eagle3 import Eagle3Config

@dataclass(frozen=True, kw_only=True)
class FaultyConfig(Eagle3Config):
    def build(self, spec):
        os.system("echo a library talks")
        if os.environ["RANK"] == "1" and os.environ["FAULT"] == "exit":
            print("the card has left the bus", file=sys.stderr, flush=True)
            os._exit(3)
        if os.environ["RANK"] == "1":
            while not os.path.exists("built"):  # a launcher ends rank 0 as soon as rank 1 fails
                time.sleep(0.01)
            raise KeyError("page 7")
        open("built", "w").close()
        return super().build(spec)
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with conversations, and the environment of a user's shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    with (tmp_path / "data.jsonl").open("w") as file:
        for n in range(40):
            messages = [
                {"role": "user", "content": f"What is {n} plus {n}?"},
                {"role": "assistant", "content": f"{n} plus {n} is {2 * n}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    own = tmp_path / "own/drafter/faulty.yaml"
    own.parent.mkdir(parents=True)
    eagle3 = (ROOT / "conf/drafter/eagle3.yaml").read_text()
    faulty = re.sub(r"_target_: \S+", "_target_: faulty.FaultyConfig", eagle3)
    own.write_text(faulty.replace("name: eagle3", "name: faulty"))
    (tmp_path / "faulty.py").write_text(FAULTY)
    return tmp_path


def arguments(run: str, *others: str) -> list[str]:
    """Return a `train` of two steps on a random target, with the later of equal keys."""
    keys = ["model=random", "data=jsonl", "data.path=data.jsonl", "data.holdout=2"]
    keys += ["hardware=cpu", "hardware.threads=1", "trainer.tokens_per_step=256"]
    keys += ["trainer.log_every=1", "trainer.validation_prompts=1", "trainer.validation_tokens=8"]
    return ["train", f"run.dir={run}", *keys, "trainer.max_steps=2", *others]


def finished(command: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **settings}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def losses(run: str) -> list[float]:
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def steps(run: str) -> int:
    try:
        return Path(run, "metrics.jsonl").read_text().count("\n")
    except OSError:
        return 0


def until(condition: Any, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen[Any]) -> dict[int, psutil.Process]:
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        if "RANK" in child.environ():
            found[int(child.environ()["RANK"])] = child
    return found


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def once(pattern: str, text: str) -> bool:
    return len(re.findall(pattern, text)) == 1


def test_plain_python_trains_on_two_ranks_as_on_one(place: Path) -> None:
    assert main(arguments("one")) == 0
    # To resume where there is nothing yet starts anew: a batch script says the same every time.
    two = finished([*PYTHON, *arguments("two", "hardware.ranks=2", "run.resume=true")])
    assert (two.returncode, two.stderr) == (0, "")
    assert losses("two") == pytest.approx(losses("one"), rel=2e-6)
    assert len(losses("two")) == 2
    for line in ("2 ranks on this machine, 1 CPU threads each", "drafter: ", "train 2/2", "next: "):
        assert once(f"(?m)^{line}", two.stdout), two.stdout
    lines = two.stdout.splitlines()
    assert len(set(lines)) == len(lines), two.stdout  # nothing is said by both
    left = {"checkpoints", "config.yaml", "metrics.jsonl", "provenance.json", "train.log"}
    assert {file.name for file in Path("two").iterdir()} == left

    again = finished([*PYTHON, *arguments("two", "hardware.ranks=2")])
    assert again.returncode == 2
    assert once("error: run.dir must be a folder without checkpoints", again.stderr)
    assert again.stderr.count("\n") == 1, again.stderr


def test_ranks_of_one_machine_listen_to_nobody_outside_it(place: Path) -> None:
    command = [*PYTHON, *arguments("run", "hardware.ranks=2", *LONG)]
    cluster = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}  # what a shell of a cluster may say
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=cluster) as process:
        until(lambda: steps("run") > 1, process)
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        own = [one.net_connections("inet") for one in tree]
        process.terminate()
    listening = {c.laddr.ip for found in own for c in found if c.status == psutil.CONN_LISTEN}
    assert listening, "gloo's own, between the ranks"
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_rank_that_is_killed_ends_all_within_seconds(place: Path) -> None:
    command = [*PYTHON, *arguments("run", "hardware.ranks=2", *LONG)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        until(lambda: steps("run") > 8, process)
        ranks = ranks_of(process)
        ranks[1].kill()
        begin = time.monotonic()
        _, errors = process.communicate(timeout=60)
        seconds = time.monotonic() - begin
    assert errors == (
        "error: rank 1 of 2 was killed by SIGKILL, perhaps by the system for want of memory; "
        "the other ranks were ended; resume with run.resume=true\n"
    )
    assert process.returncode == 137
    assert seconds < 15
    assert not any(alive(rank) for rank in ranks.values())


def test_ranks_do_not_outlive_their_launcher(place: Path) -> None:
    command = [*PYTHON, *arguments("run", "hardware.ranks=2", *LONG)]
    # Not into a pipe: whoever writes to one that nobody reads dies of that.
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until(lambda: steps("run") > 1, process)
        ranks = ranks_of(process)
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(list(ranks.values()), timeout=30)
    left = [rank for rank in left if alive(rank)]
    for rank in left:
        rank.kill()
    assert left == []


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (
            "raise",
            1,
            r"error: rank 1 of 2 ended with exit code 1: KeyError: 'page 7' \(the traceback is in "
            r"run/error_rank1\.log; DRAFTTRAIN_DEBUG=1 shows it here\); the other ranks "
            r"were ended; there is no checkpoint yet: start again\n",
        ),
        (
            "exit",
            3,
            r"error: rank 1 of 2 ended with exit code 3 and no error; its stderr is in run/"
            r"error_rank1\.log and ends: the card has left the bus; the other ranks were [^\n]*\n",
        ),
    ],
)
def test_the_error_of_one_rank_is_said_once(fault: str, code: int, said: str, place: Path) -> None:
    call = arguments("run", "hardware.ranks=2", "drafter=faulty", "--config-dir=own")
    done = finished([*PYTHON, *call], FAULT=fault)
    assert re.fullmatch(said, done.stderr), done.stderr
    assert done.returncode == code
    if fault == "raise":
        assert 'raise KeyError("page 7")' in Path("run/error_rank1.log").read_text()


def test_under_torchrun_the_error_of_one_rank_is_said_once_too(place: Path) -> None:
    call = arguments("run", "drafter=faulty", "--config-dir=own")
    done = finished([*TORCHRUN, *PYTHON[1:], *call], FAULT="raise")
    assert done.returncode == 1
    assert once("KeyError", done.stderr), done.stderr
    assert once("(?m)^error: ", done.stderr)
    # The first rank builds the drafter twice: for the plan, and then for training.
    assert len(re.findall("a library talks", done.stdout)) == 2, done.stdout


def test_a_terminal_shows_one_bar_and_ctrl_c_is_said_once(place: Path) -> None:
    ours, theirs = pty.openpty()
    call = [*PYTHON, *arguments("run", "hardware.ranks=2", *LONG)]
    shown = b""
    files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(call, **files, start_new_session=True) as process:
        os.close(theirs)
        for chunk in iter(lambda: _read(ours), b""):
            shown += chunk
            if steps("run") > 8 and process.poll() is None and b"interrupting" not in shown:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                shown += b"interrupting"
    os.close(ours)
    text = shown.decode()
    assert process.returncode == 130
    assert once(r"interrupted after step \d+ of 100000, which is saved; resume with run", text), (
        text
    )
    assert once("this step is saved first; Ctrl-C again ends at once", text), text
    assert "Traceback" not in text
    bars = [line for line in text.split("\n") if "━" in line]
    assert len(bars) <= 2, "rich draws over the one line it has, and below what Ctrl-C is told"
    assert bars[0].count("/100000") > 1


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux: the last process has closed its end
        return b""


def test_deepspeeds_launcher_with_a_hostfile(place: Path) -> None:
    Path("hostfile").write_text("localhost slots=2\n")
    launcher = [str(BIN / "deepspeed"), "--hostfile=hostfile", "--no_ssh_check", "--quiet"]
    launcher += ["--master_addr=127.0.0.1", "--module", "drafttrain"]
    done = finished([*launcher, *arguments("run", "deepspeed=zero1")], DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    assert len(losses("run")) == 2
    assert once("train 2/2", done.stdout), done.stdout
    assert done.stderr == ""


FAKE_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
FAKE_SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> scontrol.log; fi
"""


@pytest.fixture
def slurm(place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A job of one node: srun and scontrol as this machine can have them."""
    tools = place / "tools"
    tools.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "2",
    }


def test_slurms_script_saves_is_queued_again_and_goes_on(
    place: Path, slurm: dict[str, str]
) -> None:
    keys = ["hardware.ranks=2", "trainer.max_steps=150", "trainer.save_every=5"]
    call = arguments("run", *keys, "trainer.validate_every=1000", "--slurm=time=0:10:00")
    made = finished([*PYTHON, *call])
    assert (made.returncode, made.stderr) == (0, "")
    Path("job.sh").write_text(made.stdout)
    environment = {**os.environ, **slurm}
    with subprocess.Popen(["bash", "job.sh"], env=environment, stdout=-1, stderr=-1) as job:
        until(lambda: steps("run") > 8, job)
        job.send_signal(signal.SIGUSR1)  # out of time
        job.communicate(timeout=60)
    assert job.returncode != 0
    assert Path("scontrol.log").read_text() == f"requeue {os.getpid()}\n"
    before = steps("run")
    assert before < 150
    again = finished(["bash", "job.sh"], **slurm, SLURM_RESTART_COUNT="1")
    assert again.returncode == 0, again.stderr
    assert len(losses("run")) == 150
    assert once("train 150/150", again.stdout)
    assert Path("scontrol.log").read_text().count("requeue") == 1
    assert again.stderr == ""


def test_tasks_of_srun_are_ranks(place: Path) -> None:
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    tasks = []
    for number in ("0", "1"):
        environment = {**os.environ, **step, "SLURM_PROCID": number, "SLURM_LOCALID": number}
        command = [*PYTHON, *arguments("run")]
        tasks.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True))
    told = [task.communicate(timeout=90) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], told
    assert once("train 2/2", told[0][0])
    assert (told[1], told[0][1]) == (("", ""), "")
    assert len(losses("run")) == 2
