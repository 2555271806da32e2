"""A run that is killed again and again, and resumed, ends where one that was left alone ends.

DRAFTTRAIN_KILLS=20 kills every kind of run at twenty instants; by default some are killed less
often (with DeepSpeed once), since each life takes seconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import PYTHONPATH, ROOT

KILLS = int(os.environ.get("DRAFTTRAIN_KILLS", "0"))  # at least so many in every test
LOW = ("hardware.train_dtype=bfloat16", "hardware.weights_dtype=bfloat16")
# Else DeepSpeed keeps parameters as small as these whole.
PARTED = "+deepspeed.config.zero_optimization.stage3_param_persistence_threshold=0"


def lives(
    task: str, folder: Path, times: int, ranks: int, seed: int, *kinds: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Disturb runs of these overrides so many times; it fails unless all is equal after."""
    times = max(times, KILLS)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests/support/lives.py")
    call = [sys.executable, script, task, str(folder), str(times), str(ranks), str(seed)]
    call += [text for kind in kinds for text in ("--", *kind)][1:]
    done = subprocess.run(
        call,
        env=environment,
        capture_output=True,
        text=True,
        timeout=(300 + 60 * times) * len(kinds),
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["times"] >= times for each in seen] == [True] * len(kinds)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_at_twenty_instants_goes_on_to_the_bit(ranks: int, tmp_path: Path) -> None:
    (seen,) = lives("kill", tmp_path, 20, ranks, ranks, ("features=online",))
    assert "saving" in seen["landed"]
    assert len(seen["landed"]) >= 3  # of six kinds of places; which ones, time decides
    if ranks > 1:
        assert seen["slowest_end_s"] < 20  # a rank that lost another says so and ends


@pytest.mark.slow  # CI runs this one with every change, the longer ones in rotation
def test_a_run_killed_three_times_goes_on_to_the_bit(tmp_path: Path) -> None:
    lives("kill", tmp_path, 3, 2, 2, ())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_with_stored_features_it_goes_on_to_the_bit(ranks: int, tmp_path: Path) -> None:
    lives("kill", tmp_path, 6, ranks, ranks, ("features=stored",))


@pytest.mark.slow
def test_every_engine_killed_on_two_ranks_goes_on_to_the_bit(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    short = "trainer.max_steps=12" if KILLS < 20 else "trainer.max_steps=40"
    pieces = (f"model.path={tiny_target_dir}", "hardware.target_placement=zero3")
    kinds: list[tuple[str, ...]] = [
        ("deepspeed=zero1",),
        ("deepspeed=zero2", *LOW),
        ("deepspeed=zero2_offload",),
        ("deepspeed=zero3", PARTED, *pieces),
        ("deepspeed=zero3_offload", PARTED, *LOW),
        LOW,
    ]
    lives("kill", tmp_path, 1, 2, 1, *((short, *kind) for kind in kinds))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_asked_to_stop_agree_on_the_step_and_go_on_to_the_bit(
    ranks: int, tmp_path: Path
) -> None:
    (seen,) = lives("stop", tmp_path, 6, ranks, 3 + ranks, ())
    assert seen["slowest_end_s"] < 20
