"""What `make demo` says at its end, and where it opens a browser; `make install` without noise."""

import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.image import imread
from paths import ROOT, load_script
from test_report import many_prompts, read, report_of

from drafttrain.report.pages import write_report


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[str]]:
    """The script, and what a fake browser is asked to open."""
    script = load_script("show_demo")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "DRAFTTRAIN_BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    return script, opened


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("default", "large"):
        write_report(read(report_of(many_prompts(prompts=4))), tmp_path / "evaluations" / name)
    return tmp_path


def test_the_demo_ends_with_the_number_that_matters_beside_the_honest_one(
    run: Path, shown: tuple[ModuleType, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    script, opened = shown
    script.main(run, run / "demo.png")
    text = capsys.readouterr().out
    assert 0 < text.index("simulated") < text.rindex("14M")  # a narrow screen folds the name
    assert text.index("accept") < text.index("speedup")
    assert text.splitlines()[-1] == f"open {run}/evaluations/large/report.html"
    assert opened == []  # a pipe
    assert imread(run / "demo.png").shape[1] == 880
    with pytest.raises(SystemExit, match="must hold evaluations of `make demo`, got none"):
        script.main(run / "evaluations")


@pytest.mark.parametrize(
    ("terminal", "display", "forbidden", "opens"),
    [
        (True, ":0", None, True),
        (True, ":0", "0", False),
        (True, None, None, False),
        (False, ":0", None, False),
    ],
)
def test_the_page_opens_where_there_is_someone_to_look(
    terminal: bool,
    display: str | None,
    forbidden: str | None,
    opens: bool,
    run: Path,
    shown: tuple[ModuleType, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, opened = shown
    monkeypatch.setattr(script.console, "_force_terminal", terminal)
    for name, value in (("DISPLAY", display), ("DRAFTTRAIN_BROWSER", forbidden)):
        if value is not None:
            monkeypatch.setenv(name, value)
    script.main(run)
    page = (run / "evaluations" / "large" / "report.html").resolve().as_uri()
    assert opened == [page] * opens


# Stands for the Python that makes the virtual environment, and for the one inside it.
PIP = """#!/bin/bash
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
*--extra-index-url*) echo "WARNING: Retrying" >&2; echo "ERROR: no such index" >&2; exit 1;;
*"-m pip install"*) echo "$*" >> pip.txt; [ -z "$FAILS" ] || { echo "ERROR: $FAILS" >&2; exit 1; };;
esac
"""


def test_installing_prints_no_noise_but_every_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PIP)
    python.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    make = ["make", "install", f"PYTHON={python}", "TORCH_INDEX_URL=https://nowhere"]
    asked = {"cwd": tmp_path, "capture_output": True, "text": True}

    def made(**variables: str) -> subprocess.CompletedProcess[str]:
        # A make above this one, as in `make test`, would have it name its folder.
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MAKE", "MFLAGS"))
        }
        environ = {**own, **variables}
        return subprocess.run(make, env=environ, check=False, **asked)  # type: ignore[call-overload]

    failed = made(FAILS="no space left")
    assert failed.returncode != 0
    assert "ERROR: no such index" in failed.stderr
    assert "ERROR: no space left" in failed.stderr
    (tmp_path / "pip.txt").unlink()
    done = made()
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["Installing", "Installing"]
    calls = (tmp_path / "pip.txt").read_text().splitlines()
    assert len(calls) == 2
    assert all("-qq --disable-pip-version-check --root-user-action=ignore" in c for c in calls)
