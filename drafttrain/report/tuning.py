"""What `tune` found, on the terminal and on disk: predicted beside measured, and the choice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from drafttrain.report.markdown import escaped, table
from drafttrain.report.pages import page
from drafttrain.report.tables import Table
from drafttrain.report.wording import number
from drafttrain.report.write import write_texts

DEFINITIONS = (
    "predicted: acceptance_length * t_plain / (t_draft + t_verify), by the times of this machine, "
    "row by row as rows leave their batch; prefill is left out",
    "measured: speedup of decoding over the plain loop, prefill left out, the loop's own time "
    "counted; the acceptance length behind a prediction is that of the first tokens of the deepest "
    "chains at batch 1",
)


def tune_tables(predictions: Sequence[dict[str, Any]], choice: dict[str, Any]) -> list[Table]:
    """Return predicted beside measured by batch and depth, and the chosen depths by task."""
    everywhere = [p for p in predictions if p["task"] == "all"]
    rows = [
        [
            str(p["batch_size"]),
            str(p["depth"]),
            number(p["acceptance_length"]),
            number(p["predicted"]),
            number(p["measured"]),
            "" if p["error"] is None else f"{100 * p['error']:+.1f} %",
        ]
        for p in everywhere
    ]
    errors = [abs(p["error"]) for p in everywhere if p["error"] is not None]
    notes = list(DEFINITIONS)
    if errors:
        notes.append(
            f"prediction error: {100 * sum(errors) / len(errors):.1f} % on average, "
            f"{100 * max(errors):.1f} % at most, over {len(errors)} points"
        )
    columns = ["batch", "depth", "acceptance length", "predicted", "measured", "error"]
    sizes = list(choice)
    tasks = list(choice[sizes[0]]["tasks"])

    def told(chosen: dict[str, Any]) -> str:
        speedup = f"{number(chosen['speedup'])}x"
        return f"{chosen['depth']} ({speedup})" if chosen["speculate"] else f"none ({speedup})"

    by_task = [[task, *(told(choice[size]["tasks"][task]) for size in sizes)] for task in tasks]
    by_task.append(["all", *(told(choice[size]["all"]) for size in sizes)])
    return [
        Table("Speedup by depth", "In all tasks.", columns, rows, notes),
        Table(
            "Chosen depths",
            "The fastest depth and its speedup; none: do not speculate.",
            ["task", *(f"batch {size}" for size in sizes)],
            by_task,
            [],
        ),
    ]


def headline(choice: dict[str, Any]) -> str:
    """Return what was chosen for all tasks, batch by batch, as sentences."""
    told = []
    for size, chosen in choice.items():
        best = chosen["all"]
        speedup = f"{number(best['speedup'])} times as fast"
        if best["speculate"]:
            told.append(f"Batch {size}: speculate at depth {best['depth']}, {speedup}.")
        else:
            told.append(
                f"Batch {size}: do not speculate; the best depth, {best['depth']}, is {speedup}."
            )
    return " ".join(told)


def rich_table(content: Table) -> RichTable:
    """Return a table for the terminal."""
    shown = RichTable(
        title=Text(content.title),
        caption=Text("\n".join(content.notes)),
        box=SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for place, column in enumerate(content.columns):
        shown.add_column(column, justify="left" if place == 0 else "right")
    for row in content.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def write_tuning(
    folder: Path,
    title: str,
    predictions: Sequence[dict[str, Any]],
    tables: Sequence[Table],
    notes: Sequence[str],
    choice: dict[str, Any],
) -> Path:
    """Write tuned.md and tuned.html into the run's folder; return the page."""
    lines = [f"# {escaped(title)}", "", escaped(headline(choice)), ""]
    for content in tables:
        cells = [[escaped(cell) for cell in row] for row in content.rows]
        lines += [f"## {escaped(content.title)}", "", escaped(content.caption), ""]
        lines += [*table([escaped(column) for column in content.columns], cells), ""]
        lines += [f"- {escaped(note)}" for note in content.notes] + [""]
    lines += [f"- {escaped(note)}" for note in notes]
    page = _page(title, predictions, tables, notes, choice)
    write_texts({"tuned.md": "\n".join(lines) + "\n", "tuned.html": page}, folder)
    return folder / "tuned.html"


def _page(
    title: str,
    predictions: Sequence[dict[str, Any]],
    tables: Sequence[Table],
    notes: Sequence[str],
    choice: dict[str, Any],
) -> str:
    from drafttrain.report.sweep_plots import depth_plot  # matplotlib takes a second

    points = [
        {
            "temperature": 0.0,
            "batch_size": p["batch_size"],
            "depth": p["depth"],
            "summary": {
                "speedup": {"value": p["measured"], "ci95": None},
                "predicted_speedup": p["predicted"],
            },
        }
        for p in predictions
        if p["task"] == "all"
    ]
    plot: Markup | None = depth_plot(points) if len({p["depth"] for p in points}) > 1 else None
    return page(
        "tuned.html.j2",
        title=title,
        tables=tables,
        notes=notes,
        plot=plot,
        headline=headline(choice),
    )
