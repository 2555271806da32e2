"""Record the CPU seconds of each test file: `RECORD_DURATIONS=FILE pytest ...` writes them as JSON.

These are CPU seconds of the process and of the children that it waited for, because wall-clock
seconds say little on a busy machine. Fixtures that tests share (session, package and module scope)
are counted apart: otherwise whichever file happens to run first would pay for them. `calibration`
is the time of a fixed computation, by which `scripts/durations.py` compares different machines.
"""

import json
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SHARED_SCOPES = ("session", "package", "module")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def calibrate(repeats: int = 7) -> float:
    """Return the CPU seconds of a fixed mix of Python and torch, the fastest of some repeats."""
    import torch

    matrix = torch.ones(96, 96)
    fastest = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        total = 0
        for number in range(1_000_000):
            total += number % 7
        for _ in range(5_000):
            matrix = (matrix @ matrix).clamp(max=1.0)
        fastest = min(fastest, time.process_time() - start)
    return fastest


class Durations:
    """A pytest plugin that sums CPU seconds by test file and by shared fixture.

    With pytest-xdist the workers measure and their reports carry the seconds to the controller,
    which adds them up and writes the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, float] = defaultdict(float)
        self.fixtures: dict[str, float] = defaultdict(float)
        self.phase_seconds = 0.0  # of the phase (setup, call, teardown) that ran last
        self.phase_fixtures: dict[str, float] = {}  # its part that shared fixtures took

    def _measure(self) -> Generator[None, Any, Any]:
        self.phase_fixtures = {}
        start = cpu_seconds()
        try:
            return (yield)
        finally:
            self.phase_seconds = cpu_seconds() - start - sum(self.phase_fixtures.values())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        return (yield from self._measure())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        return (yield from self._measure())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        return (yield from self._measure())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope not in SHARED_SCOPES:
            return (yield)
        start, nested = cpu_seconds(), sum(self.phase_fixtures.values())
        try:
            return (yield)
        finally:
            inner = sum(self.phase_fixtures.values()) - nested  # fixtures that this one asked for
            name = f"{fixturedef.baseid}::{fixturedef.argname}".removeprefix("::")
            seconds = cpu_seconds() - start - inner
            self.phase_fixtures[name] = self.phase_fixtures.get(name, 0.0) + seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.cpu_seconds, report.fixture_seconds = self.phase_seconds, self.phase_fixtures
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.split("::")[0]] += report.cpu_seconds
        for name, seconds in report.fixture_seconds.items():
            self.fixtures[name] += seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        measured = {
            "calibration": round(calibrate(), 4),
            "files": {name: round(seconds, 2) for name, seconds in sorted(self.files.items())},
            "fixtures": {n: round(seconds, 2) for n, seconds in sorted(self.fixtures.items())},
        }
        self.path.write_text(json.dumps(measured, indent=2) + "\n")
