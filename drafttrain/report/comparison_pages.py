"""The pages of a comparison, on disk and on the terminal."""

from pathlib import Path

import numpy as np

from drafttrain.core.types import brief
from drafttrain.report.comparison import ComparedMethod, ComparedRun, Comparison
from drafttrain.report.document import Document, Listing, flagged, notes
from drafttrain.report.metrics import Spread
from drafttrain.report.phrases import NOTHING, cell, count, flat, number, size, speed
from drafttrain.report.results import Cell, Table
from drafttrain.report.tables import Column, table
from drafttrain.report.write import as_data, write_pages

FILES = ("compare.json", "compare.md", "compare.html")
QUANTITIES = ("acceptance_length", "speedup")


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write compare.json, compare.md and compare.html; each appears whole or not at all."""
    from drafttrain.report.plots import comparison_figures  # matplotlib takes a second

    document, figures = comparison_document(comparison), comparison_figures(comparison)
    write_pages(folder, "compare", document, figures, comparison)


def pictures(comparison: Comparison) -> dict[str, np.ndarray]:
    """Return the figures of a comparison by title, as bytes, "height width 3"."""
    from drafttrain.report.plots import comparison_figures

    return {figure.title: figure.pixels() for figure in comparison_figures(comparison)}


def comparison_document(comparison: Comparison) -> Document:
    """Return the pages of a comparison as a document."""
    versus = list(comparison.versus.values())
    others = [pair.statement for pair in comparison.differences if pair not in versus]
    methods = [(row.method, row) for row in comparison.rows]
    return Document(
        "drafters compared",
        f"{comparison.name}: drafters of {comparison.target}",
        [pair.statement for pair in versus],
        conditions_line(comparison),
        first=[
            *flagged(comparison.flags),
            _numbers_table(comparison),
            table("Methods, on all prompts", "", "method", METHODS, methods),
            *_slower_targets_table(comparison),
            *_positions_table(comparison),
        ],
        rest=[
            notes("Other differences", others),
            _runs_table(comparison),
            Listing("Definitions", list(comparison.definitions.items())),
            *(
                Listing(
                    f"Provenance of {run.name}",
                    [*flat(as_data(run.timing), "timing."), *flat(run.provenance)],
                )
                for run in comparison.runs
            ),
            Listing("Provenance of this page", flat(comparison.provenance)),
        ],
    )


def conditions_line(comparison: Comparison) -> str:
    """Return a line with the conditions under which all runs were evaluated."""
    told, prompts = comparison.conditions, comparison.prompts
    sampling = ", ".join(
        f"{key.removeprefix('eval.').replace('_', ' ')} {value}"
        for key, value in told.items()
        if key not in ("target fingerprint", "eval.prompts")
    )
    return (
        f"{prompts.statement}, in {len(prompts.tasks)} tasks of {told['eval.prompts']}; "
        f"{sampling}; target fingerprint {brief(str(told['target fingerprint']))}"
    )


def _difference(comparison: Comparison, row: ComparedMethod, task: str, quantity: str) -> Cell:
    pair = comparison.versus.get(row.method)
    if pair is None:
        return "baseline"
    difference: Cell = getattr(pair.by_name[task], quantity)
    return difference


def comparison_summary(comparison: Comparison) -> Table:
    """Return the terminal's table: two lines per method, its numbers and its differences."""
    notes = [pair.statement for pair in comparison.differences]
    checked: dict[str, list[str]] = {}
    for row in comparison.rows:
        checked.setdefault(row.lossless.statement, []).append(row.method)
    notes += [f"{', '.join(methods)}: {text}." for text, methods in checked.items()]
    notes += [f"Flag: {flag.row}: {flag.text}." for flag in comparison.flags]
    notes += [f"{conditions_line(comparison)}.", "Intervals: 95 %, paired by prompt."]
    notes.append("Size: the drafter's parameters.")

    def both(row: ComparedMethod, quantity: str) -> str:
        difference = _difference(comparison, row, "all", quantity)
        return f"{cell(getattr(row.summary, quantity))}\n{cell(difference)}"

    columns: list[Column[ComparedMethod]] = [
        ("accept. length, 95 %\ndifference", lambda row: both(row, "acceptance_length")),
        ("speedup, 95 %\ndifference", lambda row: both(row, "speedup")),
        ("draft\nms", lambda row: number(row.summary.draft_ms)),
        ("size", lambda row: size(row.drafter_parameters)),
        ("lossless", lambda row: "yes" if row.lossless.lossless else "NO"),
    ]
    lines = []
    for row in comparison.rows:
        seeds = len(row.seeds)
        training = f"{seeds} seeds" if seeds > 1 else "single run" if seeds else "reference"
        lines.append((f"{row.method}\n{training}", row))
    title = f"{comparison.target}: differences to {comparison.baseline}"
    return table(title, "", "method\ntraining", columns, lines, notes)


def _numbers_table(comparison: Comparison) -> Table:
    """Return both quantities of every method with their differences, task by task."""
    columns = ["task", "method", "prompts"]
    for name in ("acceptance length", "speedup"):
        columns += [f"{name}, 95 %", "range", f"minus {comparison.baseline}, 95 %"]
    rows: list[list[Cell]] = []
    for task in ("all", *comparison.prompts.tasks):
        for row in comparison.rows:
            numbers = row.by_name[task]
            line: list[Cell] = [task, row.method, count(numbers.num_prompts)]
            for quantity in QUANTITIES:
                measured: Spread = getattr(numbers, quantity)
                several = len(measured.by_run) > 1 and measured.range is not None
                spread = " to ".join(map(number, measured.range or [])) if several else NOTHING
                line += [measured, spread, _difference(comparison, row, task, quantity)]
            rows.append(line)
    caption = (
        "Intervals: 95 %, bootstrap over prompts; differences are paired by prompt. range: over "
        "training seeds, or over the runs beside which a reference was measured."
    )
    return Table("Methods, task by task", caption, columns, rows)


def _slower_targets_table(comparison: Comparison) -> list[Table]:
    """Return the speedups beside slower targets; nothing if no pass was timed."""
    times = [at.pass_ms for at in comparison.rows[0].slower_targets]
    if len(times) == 1:
        return []
    shown = [None if ms is None else f"{ms:,.{0 if ms >= 100 else 1}f} ms" for ms in times]
    columns = ["method", *(each or "free drafting" for each in shown)]
    rows: list[list[Cell]] = [
        [row.method, *(at.speedup.estimate for at in row.slower_targets)] for row in comparison.rows
    ]
    caption = (
        "Speedup if a pass of the target took this long, by the passes counted and the drafter's "
        "time measured here; the first is the pass of this target. A pass that checks a draft is "
        "taken to last as long as a plain one."
    )
    return [Table("At the cost of slower targets", caption, columns, rows)]


def _positions_table(comparison: Comparison) -> list[Table]:
    """Return the acceptance by position of every method and task; nothing if none is known."""
    rows: list[list[Cell]] = [
        [task, row.method, rates]
        for task in ("all", *comparison.prompts.tasks)
        for row in comparison.rows
        if (rates := row.by_name[task].acceptance_per_position)
    ]
    columns = ["task", "method", "acceptance per position"]
    return [Table("Acceptance by position", "Means over runs.", columns, rows)] if rows else []


METHODS: list[Column[ComparedMethod]] = [
    ("drafter", lambda row: row.drafter),
    ("depth", lambda row: ", ".join(map(str, sorted({*row.depths})))),
    ("training", lambda row: row.training),
    ("parameters", lambda row: size(row.drafter_parameters)),
    ("training tokens", lambda row: size(row.training_tokens)),
    ("training minutes", lambda row: number(row.training_seconds and row.training_seconds / 60)),
    ("rate", lambda row: number(row.summary.acceptance_rate)),
    ("draft ms", lambda row: number(row.summary.draft_ms)),
    ("tokens/s plain", lambda row: speed(row.summary.tokens_per_second.autoregressive)),
    ("tokens/s drafted", lambda row: speed(row.summary.tokens_per_second.speculative)),
    ("losslessness", lambda row: row.lossless.statement),
]


def _runs_table(comparison: Comparison) -> Table:
    own = {
        folder: [number(getattr(row.summary, quantity).by_run[place]) for quantity in QUANTITIES]
        for row in comparison.rows
        if not row.reference
        for place, folder in enumerate(row.runs)
    }

    columns: list[Column[ComparedRun]] = [
        ("drafter", lambda run: run.drafter),
        ("depth", lambda run: count(run.depth)),
        ("seed", lambda run: count(run.seed)),
        ("acceptance length", lambda run: own[run.folder][0]),
        ("speedup", lambda run: own[run.folder][1]),
        ("parameters", lambda run: size(run.drafter_parameters)),
        ("training tokens", lambda run: size(run.training_tokens)),
        ("losslessness", lambda run: run.lossless),
    ]
    lines = [(run.folder, run) for run in comparison.runs]
    return table("Runs", "Each run by itself, on the shared prompts.", "run", columns, lines)
