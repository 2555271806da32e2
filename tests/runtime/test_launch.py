"""Several ranks from one command, whoever starts them: one log, one voice, one end."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from paths import ROOT

import drafttrain.__main__ as cli
from drafttrain.config.compose import load_choice
from drafttrain.runtime.config import HardwareConfig
from drafttrain.runtime.launch import _how_to_resume, ranks_to_start, start
from drafttrain.runtime.rank_process import LauncherError, adopt, is_consequence, speaks_first
from drafttrain.runtime.signals import Stopped

STARTED = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def hardware(**keys: Any) -> HardwareConfig:
    return replace(load_choice("hardware", "auto"), **keys)


@pytest.mark.parametrize(
    ("keys", "gpus", "ranks"),
    [
        ({}, 0, 1),
        ({}, 1, 1),
        ({}, 8, 8),
        ({"device": "cuda"}, 8, 8),
        ({"device": "cuda"}, 0, 1),  # the error that there is none comes from where it is chosen
        ({"device": "cuda", "ranks": 8}, 0, 1),
        ({"device": "cpu"}, 8, 1),
        ({"device": "cpu", "ranks": 2}, 0, 2),
        ({"device": "cpu", "ranks": 2}, 1, 2),
        ({"ranks": 2}, 0, 2),
        ({"ranks": 2}, 8, 2),
        ({"ranks": 1}, 8, 1),
        ({"device": "cuda:3"}, 8, 1),
        ({"target_placement": "device_map"}, 8, 1),
        ({"target_placement": "device_map", "ranks": 8}, 8, 1),
        ({"target_placement": "vllm"}, 8, 1),
        ({"target_placement": "zero3"}, 8, 8),
    ],
)
def test_as_many_ranks_are_started_as_there_are_gpus_or_as_asked(
    keys: dict[str, Any], gpus: int, ranks: int
) -> None:
    assert ranks_to_start(hardware(**keys), {}, gpus, 8) == ranks
    if "ranks" not in keys:
        assert ranks_to_start(hardware(**keys), STARTED, gpus, 8) == 1, "already started"


def test_what_cannot_be_started_is_said() -> None:
    with pytest.raises(ValueError, match=r"hardware\.ranks must be at most 1, .* got 2; leave it"):
        ranks_to_start(hardware(ranks=2), {}, 1, 8)
    with pytest.raises(ValueError, match=r"hardware\.device must be cuda for hardware\.ranks=2"):
        ranks_to_start(hardware(ranks=2, device="cuda:1"), {}, 8, 8)
    with pytest.raises(ValueError, match=r"hardware\.ranks must be auto, or 4 as the launcher"):
        ranks_to_start(hardware(ranks=2, device="cpu"), STARTED, 0, 8)
    with pytest.raises(ValueError, match=r"hardware\.ranks must be at most 2 on a CPU, .* got 99;"):
        ranks_to_start(hardware(ranks=99), {}, 0, 2)
    assert ranks_to_start(hardware(ranks=3, threads=1), {}, 0, 2) == 3
    assert ranks_to_start(hardware(ranks=4, device="cpu"), STARTED, 0, 8) == 1
    assert ranks_to_start(hardware(ranks=8), {"RANK": "0", "WORLD_SIZE": "8"}, 8, 8) == 1


def test_a_launcher_that_hardware_ranks_contradicts_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for key, value in (STARTED | {"RANK": "0"}).items():
        monkeypatch.setenv(key, value)
    for expected in (1, 0):  # the second rank to find it says nothing
        assert cli.main(["train", "hardware=cpu", "hardware.ranks=2"]) == 2
        said = capfd.readouterr()
        assert said.out == ""
        assert said.err.count("error: hardware.ranks must be auto, or 4 as the") == expected
        assert said.err.count("\n") == expected


def test_every_launcher_looks_like_torchrun() -> None:
    step = {
        "SLURM_JOB_ID": "41002",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "MASTER_ADDR": "n1",
    }
    expected = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert adopt(step) == expected | {"MASTER_PORT": "21002"}
    assert adopt(step | {"SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"
    assert adopt(step | {"CUDA_VISIBLE_DEVICES": "3"})["LOCAL_RANK"] == "0"
    assert adopt(step | {"CUDA_VISIBLE_DEVICES": "2,3"})["LOCAL_RANK"] == "1"
    assert adopt(step | STARTED) == {}, "torchrun under srun"
    alone = {key: value for key, value in step.items() if key != "MASTER_ADDR"}
    with pytest.raises(LauncherError, match=r"MASTER_ADDR must name .* export MASTER_ADDR=\$\(sco"):
        adopt(alone)
    assert adopt(alone | {"SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"
    job = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "3"}
    assert adopt(job) == {}, "a batch script is none of its job's tasks"
    deepspeed = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    assert adopt(deepspeed) == {"LOCAL_WORLD_SIZE": "2"}


def test_the_first_rank_to_fail_speaks_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [speaks_first(), speaks_first(), speaks_first()] == [True, False, False]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert speaks_first()


def test_of_ranks_that_are_asked_to_stop_the_first_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 may be gone: a launcher of others ends the rest, and each has the same parent."""

    def stop(config: Any) -> None:
        raise Stopped("stopped by SIGTERM; the same command resumes")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("drafttrain.commands.capture.capture", stop)
    told = []
    for rank in ("2", "1"):
        ranks = STARTED | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        for key, value in (ranks | {"RANK": rank, "LOCAL_RANK": rank}).items():
            monkeypatch.setenv(key, value)
        assert cli.main(["capture", "store.dir=store"]) == 143
        told.append("the same command resumes" in capfd.readouterr().err)
    assert told == [True, False]


def test_what_follows_from_a_lost_rank_is_told_from_its_cause() -> None:
    from drafttrain.runtime.ranks import LostRankError

    assert is_consequence(LostRankError("rank 0 lost another"))
    assert is_consequence(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert not is_consequence(RuntimeError("shapes differ"))
    assert not is_consequence(ValueError("NCCL"))


# Ranks that are not drafttrain but torch starts them alike, at once. The first lines wait
# until all are up, so that none is ended before it came to its end.
TOGETHER = """
import os, pathlib, signal, sys, time
from drafttrain.runtime.rank_process import is_ours, leave_word
rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert is_ours()
signal.alarm(90)
pathlib.Path(f"up{rank}").touch()
while not all(pathlib.Path(f"up{i}").exists() for i in range(count)): time.sleep(0.01)
"""


@pytest.fixture
def ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, float]]:
    """Return a function that runs code as two ranks: exit code, what was said, seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(code: str) -> tuple[int, str, float]:
        begin = time.monotonic()
        exit_code = start(["-c", TOGETHER + code], 2, 3, tmp_path)
        seconds = time.monotonic() - begin
        captured = capfd.readouterr()
        assert captured.out == ""
        return exit_code, captured.err, seconds

    return run


def test_ranks_that_all_end_well_are_silent(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (dict(os.environ), signal.getsignal(signal.SIGTERM))
    assert ranks("print('heard', file=sys.stderr) if rank else 0")[:2] == (0, "")
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
    code = "assert os.environ['OMP_NUM_THREADS'] == '3', os.environ['OMP_NUM_THREADS']"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert ranks(code)[:2] == (0, "")


def test_nothing_of_the_launcher_listens_while_ranks_run(ranks: Any) -> None:
    code = f"""
import psutil
connections = psutil.Process(os.getppid()).net_connections("inet")
listening = [c.laddr for c in connections if c.status == "LISTEN"]
assert set(listening) <= set({listening(os.getpid())}), listening
"""
    assert ranks(code)[:2] == (0, "")


def listening(pid: int) -> list[tuple[str, int]]:
    """Return where a process listens: another test's server may be in this one."""
    connections = psutil.Process(pid).net_connections("inet")
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


STAYS = "\nelse: signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


# Under load one rank may start seconds after the other.
MEET = """
pathlib.Path(f"there{rank}").touch()
while not pathlib.Path(f"there{1 - rank}").exists(): time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        (
            "if rank: os.kill(os.getpid(), signal.SIGKILL)" + STAYS,
            137,
            r"error: rank 1 of 2 was killed by SIGKILL, perhaps by the system for want of memory; "
            r"the other ranks were ended; there is no checkpoint yet: start again\n",
        ),
        (
            "if rank: print('terminate called', file=sys.stderr, flush=True); os._exit(7)" + STAYS,
            7,
            r"error: rank 1 of 2 ended with exit code 7 and no error; its stderr is in \S+/"
            r"error_rank1\.log and ends: terminate called; the other ranks were ended; [^\n]*\n",
        ),
        (
            "if rank == 0: leave_word('KeyError: x', 1, False, False); os._exit(1)" + STAYS,
            1,
            r"error: rank 0 of 2 ended with exit code 1: KeyError: x; the other [^\n]*\n",
        ),
        (  # the same mistake of the user's on every rank
            "leave_word('data.path must exist', 1, True, False); os._exit(1)",
            1,
            r"error: data\.path must exist\n",
        ),
        (  # who is lost is the cause, who notices it first is not
            MEET + "if rank == 0: leave_word('lost another', 1, True, True); os._exit(1)\n"
            "else: time.sleep(0.5); os.kill(os.getpid(), signal.SIGSEGV)",
            139,
            r"error: rank 1 of 2 was killed by SIGSEGV; the other ranks [^\n]*\n",
        ),
        (
            MEET + "if rank == 0: os.abort()\n"  # as NCCL's watchdog does when a fellow is gone
            "else: time.sleep(0.5); leave_word('disk full', 1, False, False); os._exit(1)",
            1,
            r"error: rank 1 of 2 ended with exit code 1: disk full; [^\n]*\n",
        ),
        (  # a signal to one process, of which rank 0 knows nothing
            MEET + "if rank: os._exit(143)\n"
            "else: time.sleep(0.5); leave_word('lost another', 1, True, True); os._exit(1)",
            143,
            r"rank 1 of 2 alone was asked to end; there is no checkpoint yet: start again\n",
        ),
    ],
)
def test_a_rank_that_dies_ends_all_and_its_error_is_said_once(
    ranks: Any, code: str, exit_code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if STAYS in code:
        monkeypatch.setattr("drafttrain.runtime.launch.LOST_S", 0.5)
    got, text, seconds = ranks(code)
    assert re.fullmatch(said, text), text
    assert got == exit_code
    assert seconds < 15, "at most 3 s for the others to notice by themselves, and the start"


def test_ranks_that_were_asked_to_end_by_a_scheduler_are_awaited(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank got the signal itself; one is done before the other, which is not cut short."""
    monkeypatch.setattr("drafttrain.runtime.launch.LOST_S", 0.5)
    code = "time.sleep(1.5 * rank); pathlib.Path(f'saved{rank}').touch(); os._exit(143)"
    assert ranks(code)[:2] == (143, "")
    assert Path("saved1").exists()


SAVES = """
done = []
signal.signal(signal.SIGTERM, lambda *_: done.append(1))
pathlib.Path(f"ready{rank}").touch()
while not done: time.sleep(0.01)
time.sleep(1); pathlib.Path(f"saved{rank}").touch(); sys.exit(143)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f"ready{rank}").touch(); time.sleep(60)
"""
LOSES = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(143) if rank else pathlib.Path("told").touch())
pathlib.Path(f"ready{rank}").touch()
while not pathlib.Path("told").exists(): time.sleep(0.01)
leave_word("lost another", 1, True, True); os._exit(1)
"""
DIES = """
pathlib.Path(f"ready{rank}").touch(); time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "said", "number", "exit_code"),
    [
        (SAVES, "", signal.SIGTERM, 143),
        (DIES, "ended by SIGTERM; there is no checkpoint yet", signal.SIGTERM, 143),
        (LOSES, "ended by SIGTERM; there is no checkpoint yet", signal.SIGTERM, 143),
        (STUBBORN, "error: 2 of 2 ranks did not end within 1 s of SIGTERM", signal.SIGTERM, 143),
    ],
)
def test_sigterm_reaches_the_ranks_and_their_end_is_awaited(
    ranks: Any,
    code: str,
    said: str,
    number: int,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if code is STUBBORN:
        monkeypatch.setattr("drafttrain.runtime.launch.GRACE_S", 1.0)

    def send() -> None:
        while not (Path("ready0").exists() and Path("ready1").exists()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    got, text, seconds = ranks(code)
    assert (got, text.count("\n")) == (exit_code, 1 if said else 0)
    assert text.startswith(said)
    assert Path("saved0").exists() == Path("saved1").exists() == (code is SAVES)
    assert seconds < 15


@pytest.mark.parametrize(
    ("code", "said"),
    [(SAVES, ""), (STUBBORN, "interrupted again: the ranks were ended at once; there is no check")],
)
def test_ctrl_c_saves_what_sigterm_saves_and_a_second_one_ends_at_once(
    code: str, said: str, ranks: Any
) -> None:
    code_of_ranks = code.replace("SIGTERM", "SIGINT").replace("143", "130")

    def send() -> None:
        while not (Path("ready0").exists() and Path("ready1").exists()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        if code is STUBBORN:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    got, text, seconds = ranks(code_of_ranks)
    assert got == 130
    assert text.startswith(said)
    assert text.count("\n") == (1 if said else 0)
    assert Path("saved0").exists() == Path("saved1").exists() == (code is SAVES)
    assert seconds < 15


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that prints a batch script and has bash read it."""

    def write(*arguments: str) -> str:
        command = [] if arguments[0] == "capture" else ["train", "data=jsonl"]
        assert cli.main([*command, *arguments]) == 0
        text = capsys.readouterr().out
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "-"], input=text, text=True, check=True)
        return text

    return write


def test_slurms_script_holds_the_call_and_what_sbatch_is_told(script: Any) -> None:
    text = script(
        "hardware=h100x8", "data.path=it's here/x y", "--slurm=nodes=2,exclusive,time=1:0:0"
    )
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    told = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert {"nodes=2", "time=1:0:0", "exclusive", "gpus-per-node=8", "requeue"} <= set(told)
    assert "job-name=eagle3-tiny" in told
    assert sum(option.startswith(("nodes", "time")) for option in told) == 2
    assert "--nproc-per-node 8" in text
    call = text[text.index("-m drafttrain") : text.index(" &\n")].replace("\\\n", " ")
    assert shlex.split(call) == [
        *("-m", "drafttrain", "train", "data=jsonl", "hardware=h100x8", "data.path=it's here/x y"),
        "run.resume=true",
    ]


def test_slurms_script_starts_a_rank_for_every_gpu_of_a_node(script: Any) -> None:
    path = "data.path=x"
    assert "--nproc-per-node 8" in script(path, "--slurm")
    assert "--nproc-per-node 4" in script(path, "--slurm=gpus-per-node=h100:4")
    text = script(path, "hardware=cpu", "hardware.ranks=2", "run.resume=false", "--slurm")
    assert "--nproc-per-node 2" in text
    assert "gpus" not in text
    assert "run.resume=true" not in text.split("-m drafttrain")[1]


def test_slurms_script_captures_too(script: Any) -> None:
    text = script("capture", "store.dir=features", "hardware=cpu", "hardware.ranks=2", "--slurm")
    assert "#SBATCH --job-name=capture-tiny\n" in text
    assert "run.resume" not in text
    call = text[text.index("-m drafttrain") : text.index(" &\n")].replace("\\\n", " ")
    assert shlex.split(call)[2:4] == ["capture", "store.dir=features"]


def test_slurm_is_for_what_ranks_do_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "drafter=ngram", "--slurm"]) == 2
    assert capsys.readouterr().err == "error: --slurm is for train, capture, got evaluate\n"
    for wrong in ("2 nodes", "$(reboot)", "nodes=2,wrap=x", "n1", "exclusive,n2", "nodez=2"):
        assert cli.main(["train", f"--slurm={wrong}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: --slurm must be options of sbatch such")
        assert said.count("\n") == 1
    assert "did you mean nodes?" in said
    for wrong in ("nodes=2 time=3", "comment=a\n#SBATCH --uid=0", "comment='a'", "comment=a#b"):
        assert cli.main(["train", f"--slurm={wrong}"]) == 2
        assert "must have a value on one line, without spaces" in capsys.readouterr().err
    assert cli.main(["train", "--slurm=cpus-per-task=$(reboot)"]) == 2
    assert "cpus-per-task must be a number" in capsys.readouterr().err


def test_a_name_is_one_word_in_slurms_script_and_a_value_keeps_its_commas(script: Any) -> None:
    text = script("run.name=my run --uid=0", "data.path=x", "--slurm=nodelist=n1,n2,exclusive")
    lines = text.splitlines()
    assert "#SBATCH --job-name=my_run_--uid_0" in lines
    assert {"#SBATCH --nodelist=n1,n2", "#SBATCH --exclusive"} <= set(lines)
    text = script("capture", "store.dir=f", "model.name='a\nsrun reboot'", "--slurm")
    assert "#SBATCH --job-name=capture-a_srun_reboot" in text.splitlines()


def test_help_explains_ranks_and_the_batch_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "--slurm[=KEY=VALUE,...]" in capsys.readouterr().out
    assert cli.main(["train", "--help", "hardware"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "auto (one per GPU, one on a CPU), or a number. Plain python starts them;" in said


def test_a_store_goes_on_by_the_same_command_and_a_run_by_its_checkpoint(tmp_path: Path) -> None:
    assert "start again" in _how_to_resume(tmp_path)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    assert "run.resume=true" in _how_to_resume(tmp_path)
    store = tmp_path / "store"
    store.mkdir()
    (store / "manifest.json").touch()
    assert _how_to_resume(store) == "; the same command resumes where it stopped"
