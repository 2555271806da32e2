"""Any two commands at any two instants on one place: one goes on, the other is told by whom."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from neighbours import KINDS
from paths import PYTHONPATH, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_lose_nothing(kind: str, tmp_path: Path) -> None:
    times = int(os.environ.get("DRAFTTRAIN_KILLS", "0")) or 3
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests/support/neighbours.py")
    done = subprocess.run(
        [sys.executable, script, kind, str(tmp_path / "here"), str(times), "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300 + 120 * times,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    assert seen.get("told", 0) + seen.get("waited", 0) + seen.get("beside", 0) > 0, seen
