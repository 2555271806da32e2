"""The notebooks: outputs stripped, and each runs whole, in minutes, without a network."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from paths import PYTHONPATH, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CPU_SECONDS = 360  # three minutes of two cores; seconds of a busy machine say nothing


def name_of(path: Path) -> str:
    return path.stem


def test_there_are_four() -> None:
    assert [name_of(path)[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_outputs_are_stripped(path: Path) -> None:
    content = json.loads(path.read_text())
    assert set(content["metadata"]) == {"kernelspec", "language_info"}
    for cell in content["cells"]:
        assert cell["metadata"] == {}, cell["id"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], cell["id"]
            assert cell["execution_count"] is None, cell["id"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_runs_whole(path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [Path(sys.executable).parent / "jupyter", "execute", path],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < CPU_SECONDS
