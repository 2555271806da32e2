"""A run that is killed again and again, and resumed, ends where one that was left alone ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def lives(task: str, folder: Path, times: int, ranks: int, seed: int, *more: str) -> dict[str, Any]:
    """Disturb a run so many times, in a process of its own; it fails unless all is equal after."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests/lives.py")
    numbers = [str(number) for number in (times, ranks, seed)]
    done = subprocess.run(
        [sys.executable, script, task, str(folder), *numbers, *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    print(task, ranks, *more, seen)
    assert seen["times"] >= times
    return seen


def test_a_run_killed_thrice_goes_on_to_the_bit(tmp_path: Path) -> None:
    lives("kill", tmp_path, 3, 1, 0, "trainer.max_steps=18")


@pytest.mark.slow
@pytest.mark.parametrize("features", ["online", "stored"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_at_twenty_instants_goes_on_to_the_bit(
    ranks: int, features: str, tmp_path: Path
) -> None:
    seen = lives("kill", tmp_path, 20, ranks, ranks, f"features={features}")
    assert "saving" in seen["landed"]
    assert len(seen["landed"]) >= 4  # of six kinds of places; which ones, time decides
    if ranks > 1:
        assert seen["slowest_end_s"] < 20  # a rank that lost another says so and ends


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_killed_goes_on_to_the_bit(stage: int, tmp_path: Path) -> None:
    short = ("trainer.max_steps=12", f"deepspeed=zero{stage}")
    lives("kill", tmp_path, 3, 2, stage, *short)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_asked_to_stop_agree_on_the_step_and_go_on_to_the_bit(
    ranks: int, tmp_path: Path
) -> None:
    seen = lives("stop", tmp_path, 6, ranks, 3 + ranks)
    assert seen["slowest_end_s"] < 20
