"""--multirun: jobs one after the other, a record of them, and the same command taken up again."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from paths import PYTHONPATH

from drafttrain.__main__ import main

pytestmark = pytest.mark.usefixtures("plain_pictures")

# Each fails within a second, before anything heavy is imported.
FAILING = ["train", "-m", "hydra.sweep.dir=sweep", "trainer.lr=fast,-1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    return tmp_path


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep whose two jobs have failed."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", PYTHONPATH)
        assert main(FAILING) == 1
    return folder / "sweep"


@pytest.fixture
def again(here: Path, swept: Path) -> Path:
    """A folder in which the sweep of FAILING was run before."""
    shutil.copytree(swept, here / "sweep")
    return here


def record(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "jobs.jsonl").read_text().splitlines()]


def test_a_job_that_fails_is_named_and_the_rest_is_done(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(FAILING) == 1
    said = capsys.readouterr()
    assert "1/2  lr_fast  trainer.lr=fast  failed after " in said.out
    assert "2/2  lr_-1  trainer.lr=-1  failed after " in said.out
    assert ": error: trainer.lr must be a number above 0, or auto, got fast" in said.out
    assert said.err == (
        "error: 2 of 2 jobs failed: lr_fast, lr_-1; their output is in sweep/logs; the same "
        "command tries them again\n"
    )
    lines = record(here / "sweep")
    assert [(line["name"], line["result"], line["status"]) for line in lines] == [
        ("lr_fast", "failed", 2),
        ("lr_-1", "failed", 2),
    ]
    assert lines[0]["last_line"] == "error: trainer.lr must be a number above 0, or auto, got fast"
    assert (here / "sweep" / "logs" / "lr_fast.log").read_text().startswith("error: ")


def test_what_is_done_is_not_done_again(again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = record(again / "sweep")
    lines[0] |= {"result": "done", "status": 0, "last_line": "best checkpoint: x"}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (again / "sweep" / "jobs.jsonl").write_text(text)
    assert main(FAILING) == 1
    said = capsys.readouterr()
    assert "lr_fast  trainer.lr=fast  done before: best checkpoint: x\n" in said.out
    assert "next: python -m drafttrain evaluate --multirun run.dir=sweep/lr_fast\n" in said.out
    assert said.err.startswith("error: 1 of 2 jobs failed: lr_-1;")
    # A job that is told otherwise is another.
    log = (again / "sweep" / "logs" / "lr_-1.log").read_text()
    assert log.count("error: trainer.lr must be") == 2
    assert main([*FAILING, "trainer.max_steps=3"]) == 1
    assert "done before" not in capsys.readouterr().out


def test_a_record_that_was_cut_is_refused(again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (again / "sweep" / "jobs.jsonl").open("a") as file:
        file.write('{"name": "x"')
    assert main(FAILING) == 2
    said = capsys.readouterr().err
    assert "sweep/jobs.jsonl must be whole lines of JSON, got a cut one at its end" in said


def test_what_is_to_compare_is_printed_after_the_last(
    again: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line | {"result": "done", "status": 0} for line in record(again / "sweep")]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (again / "sweep" / "jobs.jsonl").write_text(text)
    assert main(FAILING) == 0
    said = capsys.readouterr().out.splitlines()
    both = "sweep/lr_fast,sweep/lr_-1"
    assert said[-2] == f"next: python -m drafttrain evaluate --multirun run.dir={both}"
    assert said[-1] == f"then: python -m drafttrain compare 'runs=[{both}]'"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("train -m drafter=eagel,medusa", "drafter=eagel is not a choice; did you mean eagle?"),
        ("train -m run.seed=0,1 --slurm", "--slurm is for one job: leave out --multirun"),
        ("train -m run.seed=0,1 --config", "--config is for one job"),
        ("train run.seed=0,1", "one run has one value, got 'run.seed=0,1'; --multirun makes a"),
        ("evaluate -m eval.depth=1,2", "run.dir must be given"),
    ],
)
def test_a_mistake_is_answered_and_no_job_begins(
    told: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(told.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert list(here.iterdir()) == []


def test_a_launcher_starts_no_sweep(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(FAILING) == 2
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "said", "code"),
    [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "stopped by SIGTERM", 143)],
)
def test_a_signal_stops_the_job_and_the_sweep(
    number: int, said: str, code: int, here: Path
) -> None:
    sweep = subprocess.Popen(
        [sys.executable, "-m", "drafttrain", *FAILING[:3], "run.seed=0,1", "model=random"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until = time.monotonic() + 100
    while not (here / "sweep" / "logs" / "seed_0.log").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
    sweep.send_signal(number)
    error = sweep.communicate(timeout=100)[1]
    assert sweep.returncode == code, error
    assert error.endswith(f"{said}; the same command resumes the sweep\n")
    (line,) = record(here / "sweep")
    assert (line["name"], line["result"]) == ("seed_0", "stopped")


@pytest.mark.slow
def test_a_training_that_was_stopped_resumes_in_its_sweep(here: Path) -> None:
    """The curve of one that is stopped in the middle is that of one that runs through."""
    train = [sys.executable, "-m", "drafttrain", "train"]
    settings = [
        *["model=random", "hardware=cpu", "hardware.threads=1", "drafter=medusa"],
        *["data.num_conversations=24", "data.holdout=4", "data.batch_size=24"],
        *["data.max_answer_tokens=24", f"data.cache_dir={here / 'answers'}"],
        *["trainer.max_steps=20", "trainer.tokens_per_step=128", "trainer.save_every=1"],
        *["trainer.validate_every=20", "trainer.log_every=1"],
        *["trainer.validation_prompts=1", "trainer.validation_tokens=4"],
    ]
    command = [*train, "--multirun", "hydra.sweep.dir=sweep", "run.seed=0,1", *settings]

    def losses(seed: int, sweep: str = "sweep") -> list[tuple[int, float]]:
        lines = (here / sweep / f"seed_{seed}" / "metrics.jsonl").read_text().splitlines()
        curve = [json.loads(line) for line in lines]
        return [(line["step"], line["train/loss"]) for line in curve if "train/loss" in line]

    sweep = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    until = time.monotonic() + 600
    while not list(here.glob("sweep/seed_0/checkpoints/step-*")) and time.monotonic() < until:
        time.sleep(0.02)
    sweep.send_signal(signal.SIGTERM)
    error = sweep.communicate(timeout=600)[1]
    assert sweep.returncode == 143, error
    assert [(one["name"], one["result"]) for one in record(here / "sweep")] == [
        ("seed_0", "stopped")
    ]
    assert len(losses(0)) < 20

    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1/2  seed_0  run.seed=0  done after" in again.stdout
    assert (
        "resuming from sweep/seed_0/checkpoints/step-0000"
        in (here / "sweep" / "logs" / "seed_0.log").read_text()
    )
    assert {one["name"]: one["result"] for one in record(here / "sweep")} == {
        "seed_0": "done",
        "seed_1": "done",
    }
    alone = [*train, "run.dir=through/seed_0", "run.seed=0", *settings]
    subprocess.run(alone, capture_output=True, check=True)
    assert losses(0) == losses(0, "through")
    assert [step for step, _ in losses(0)] == list(range(1, 21))
