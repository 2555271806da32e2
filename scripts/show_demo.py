"""Show what `make demo` measured, open its report, and draw its picture if a file is named.

usage: show_demo.py RUN_DIR [PICTURE.png]

A browser opens if the output is a terminal and there is a display; DRAFTTRAIN_BROWSER=0 forbids it.
"""

import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path

from matplotlib.image import imsave

from drafttrain.report.card import read_run
from drafttrain.report.phrases import number
from drafttrain.report.plots import report_figures
from drafttrain.report.results import Report, Table
from drafttrain.report.tables import rich_table
from drafttrain.runtime.terminal import console

# By the name of the evaluation; the one that matters comes first.
TARGETS = {"large": "simulated 200M target", "default": "14M target"}
COLUMNS = (
    *("target", "drafter", "acceptance length, 95 %", "acceptance rate", "speedup, 95 %"),
    "greedy equal",
)


def main(run: Path, picture: Path | None = None) -> None:
    """Print the table and the page to open; ValueError for a report that cannot be read."""
    _, found = read_run(run)
    reports = {name: found[name] for name in TARGETS if name in found}
    if not reports:
        raise SystemExit(f"{run} must hold evaluations of `make demo`, got none: run make demo")
    console.print(rich_table(table(reports)))
    if picture is not None:
        draw(list(reports.values())[-1], picture)
    page = run / "evaluations" / next(iter(reports)) / "report.html"
    console.print(f"open {page}")
    if console.is_terminal and has_display() and os.environ.get("DRAFTTRAIN_BROWSER") != "0":
        webbrowser.open(page.resolve().as_uri())


def table(reports: Mapping[str, Report]) -> Table:
    """Return a row for each target and drafting method."""
    rows = []
    for name, report in reports.items():
        for method, found in report.drafting.items():
            row, check = found.summary, report.lossless
            checked = check.greedy_total and method == report.drafter
            same = f"{check.greedy_identical}/{check.greedy_total}" if checked else ""
            length, rate = row.acceptance_length.estimate, number(row.acceptance_rate)
            rows.append((TARGETS[name], method, length, rate, row.speedup.estimate, same))
    return Table("", "", COLUMNS, rows, [])


def draw(report: Report, file: Path) -> None:
    """Write what was accepted as a picture: unlike a time, it is the same on every machine."""
    found = {figure.title: figure for figure in report_figures(report)}
    imsave(file, found["Acceptance by position"].pixels())


def has_display() -> bool:
    """Whether a browser would have a place to show a page."""
    return sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
