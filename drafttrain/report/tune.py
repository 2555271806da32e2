"""The results of `tune`: predicted and measured speedups, and the chosen depths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafttrain.report.document import Document, notes
from drafttrain.report.phrases import number
from drafttrain.report.plots import sweep_figure
from drafttrain.report.results import Table
from drafttrain.report.tables import Column, table
from drafttrain.report.write import write_pages

DEFINITIONS = (
    "predicted: acceptance_length * t_plain / (t_draft + t_verify), by the times of this machine, "
    "row by row as rows leave their batch; prefill is left out",
    "measured: speedup of decoding over the plain loop, prefill left out, the loop's own time "
    "counted; the acceptance length behind a prediction is that of the first tokens of the deepest "
    "proposals at batch 1, or of an optimal tree what its nodes' ranks were accepted",
)


@dataclass(frozen=True)
class DepthPrediction:
    """A depth at a batch size on one task, or on all: its predicted and measured speedup."""

    task: str
    batch_size: int
    depth: int
    acceptance_length: float
    predicted: float  # speedup of decoding, prefill left out
    measured: float | None
    nodes: str = ""  # of a proposal; by level, where they are the same in every cycle

    @property
    def error(self) -> float | None:
        """The error of the prediction, relative to the measurement."""
        return None if self.measured is None else self.predicted / self.measured - 1


@dataclass(frozen=True)
class ChosenDepth:
    """The fastest depth, as measured or else as predicted, and whether it pays."""

    depth: int
    speedup: float
    speculate: bool
    nodes: str = ""


@dataclass(frozen=True)
class TunedChoice:
    """The fastest depth at one batch size, in all and by task."""

    all: ChosenDepth
    tasks: dict[str, ChosenDepth]


COLUMNS: list[Column[DepthPrediction]] = [
    ("depth", lambda p: str(p.depth)),
    ("nodes", lambda p: p.nodes),
    ("acceptance length", lambda p: number(p.acceptance_length)),
    ("predicted", lambda p: number(p.predicted)),
    ("measured", lambda p: number(p.measured)),
    ("error", lambda p: "" if p.error is None else f"{100 * p.error:+.1f} %"),
]


def tune_tables(
    predictions: Sequence[DepthPrediction], choices: Mapping[str, TunedChoice]
) -> list[Table]:
    """Return tables of the chosen depths by task, and of predicted and measured speedups."""
    everywhere = [p for p in predictions if p.task == "all"]
    errors = [abs(p.error) for p in everywhere if p.error is not None]
    explained = list(DEFINITIONS)
    if errors:
        explained.append(
            f"prediction error: {100 * sum(errors) / len(errors):.1f} % on average, "
            f"{100 * max(errors):.1f} % at most, over {len(errors)} points"
        )

    lines = [(str(p.batch_size), p) for p in everywhere]
    by_name = [{"all": choice.all, **choice.tasks} for choice in choices.values()]
    chosen = [
        [
            task,
            *(f"{c[task].depth if c[task].speculate else 'none'} ({number(c[task].speedup)}x)"
              for c in by_name),
        ]
        for task in by_name[0]
    ]  # fmt: skip
    caption = "The fastest depth and its speedup; none: do not speculate."
    batches = ["task", *(f"batch {size}" for size in choices)]
    return [
        Table("Chosen depths", caption, batches, chosen),
        table("Speedup by depth", "In all tasks.", "batch", COLUMNS, lines, explained),
    ]


def headline(choices: Mapping[str, TunedChoice]) -> str:
    """Return the depths chosen for all tasks, batch by batch, as sentences."""
    sentences = []
    for size, choice in choices.items():
        best = choice.all
        tree = any(level != "1" for level in best.nodes.split("+") if level)
        shape = f" ({best.nodes} nodes)" if tree else ""
        gain = f"{number(best.speedup)} times as fast"
        sentences.append(
            f"Batch {size}: speculate at depth {best.depth}{shape}, {gain}."
            if best.speculate
            else f"Batch {size}: do not speculate; the best depth, {best.depth}{shape}, is {gain}."
        )
    return " ".join(sentences)


def write_tuning(
    folder: Path,
    title: str,
    predictions: Sequence[DepthPrediction],
    choices: Mapping[str, TunedChoice],
    remarks: list[str],
) -> Path:
    """Write tuned.md and tuned.html into the run's folder; return the page."""
    chosen, *rest = tune_tables(predictions, choices)
    document = Document(
        "depths, predicted and measured",
        title,
        [headline(choices)],
        first=[chosen],
        rest=[*rest, notes("Notes", remarks)],
    )
    points = [
        (0.0, p.batch_size, p.depth, p.measured, p.predicted)
        for p in predictions
        if p.task == "all"
    ]
    figures = [sweep_figure(points)] if len({point[1:3] for point in points}) > 1 else []
    return write_pages(folder, "tuned", document, figures)
