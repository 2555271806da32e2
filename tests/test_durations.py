"""The record of test times: what is measured, and what counts as slower."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, load_script

script = load_script("durations")
RECORD = {
    "limit": 100.0,
    "calibration": 1.0,
    "files": {"tests/test_a.py": 50.0, "tests/test_b.py": 10.0},
    "fixtures": {"target": 4.0},
}


def measured(a: float, b: float, calibration: float = 1.0, new: float = 0.0) -> dict[str, object]:
    files = {"tests/test_a.py": a, "tests/test_b.py": b, "tests/test_new.py": new}
    return {"calibration": calibration, "files": files, "fixtures": {"target": 4.0}}


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (measured(59.0, 10.0), []),  # 9 s more, but only 18 %
        (measured(50.0, 14.9), []),  # half as long again, but only 4.9 s
        (measured(61.0, 10.0), ["tests/test_a.py"]),
        (measured(50.0, 15.1), ["tests/test_b.py"]),
        (measured(50.0, 10.0, new=5.1), ["tests/test_new.py"]),
        (measured(118.0, 20.0, calibration=2.0), []),  # a machine of half the speed
        (measured(40.0, 10.0, calibration=0.5), ["tests/test_a.py", "tests/test_b.py"]),
    ],
)
def test_a_file_is_slower_by_twenty_percent_and_five_seconds(
    now: dict[str, object], named: list[str]
) -> None:
    assert sorted(script.slower(now, RECORD)) == named


def test_a_file_that_this_machine_slows_down_is_compared_with_itself() -> None:
    """An earlier commit took 1.5 times its own record here: so may this one, and not more."""
    earlier = {"limit": 100.0, "calibration": 1.0, "files": {"tests/test_a.py": 20.0}}
    machine = script.excess(measured(30.0, 10.0), earlier)
    assert machine == {"tests/test_a.py": 1.5}
    assert script.slower(measured(74.0, 10.0), RECORD, machine) == {}
    assert list(script.slower(measured(74.0, 16.0), RECORD, machine)) == ["tests/test_b.py"]
    assert list(script.slower(measured(91.0, 10.0), RECORD, machine)) == ["tests/test_a.py"]
    assert script.excess(measured(15.0, 10.0), earlier) == {"tests/test_a.py": 1.0}


def test_the_total_has_a_limit() -> None:
    long = measured(55.0, 12.0, new=4.9) | {"fixtures": {"target": 30.0}}
    (line,) = script.check(long, RECORD, whole=True)
    assert line == "all tests: 102 CPU seconds, the limit is 100"
    assert script.check(long, RECORD, whole=False) == []


def test_a_run_of_pytest_records_files_and_shared_fixtures_apart(tmp_path: Path) -> None:
    """The plugin in a suite of its own, whose session fixtures take most of the time."""
    (tmp_path / "conftest.py").write_text(
        "import sys, time, pytest, pathlib\n"
        f"sys.path.insert(0, {str(ROOT / 'tests' / 'support')!r})\n"
        "from record_durations import Durations\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(Durations(pathlib.Path('out.json')))\n"
        "def burn(seconds):\n"
        "    end = time.process_time() + seconds\n"
        "    while time.process_time() < end: pass\n"
        "@pytest.fixture(scope='session')\n"
        "def inner(): burn(0.2)\n"
        "@pytest.fixture(scope='session')\n"
        "def outer(inner): burn(0.1)\n"
        "@pytest.fixture\n"
        "def alone(): burn(0.1)\n"
    )
    (tmp_path / "test_one.py").write_text("def test_it(outer, alone): pass\n")
    (tmp_path / "test_two.py").write_text("def test_it(outer): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["calibration"] > 0
    assert 0.1 <= found["files"]["test_one.py"] < 0.15
    assert found["files"]["test_two.py"] < 0.05
    assert 0.2 <= found["fixtures"]["inner"] < 0.25
    assert 0.1 <= found["fixtures"]["outer"] < 0.15
