"""The curves of the training behind a report, as the run's metrics.jsonl records them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.report.results import TrainingCurves, TrainingSeries
from drafttrain.runtime.tracker import ACCEPTANCE_LENGTH, EXPECTED_LENGTH, LOSS, SPEED, TOKENS

TERM = f"{LOSS}_"
# What validation may have measured, in the real loop or teacher-forced.
VALIDATIONS = {
    ACCEPTANCE_LENGTH: "tokens per target pass",
    EXPECTED_LENGTH: "tokens per target pass, expected without decoding",
}
MOST_POINTS = 400  # of a series; a plot is narrower


def training_curves(
    rows: Sequence[Mapping[str, Any]], step: int | None = None
) -> TrainingCurves | None:
    """Return the curves of a run from its rows of metrics; None where it logged no loss.

    step: of the evaluated checkpoint.
    """
    units = {LOSS: "per token of the loss mask", **VALIDATIONS}
    series = [one for one in (_series(rows, name, unit) for name, unit in units.items()) if one]
    if not series or series[0].name != LOSS:
        return None
    terms = sorted({key.removeprefix(TERM) for row in rows for key in row if key.startswith(TERM)})
    statement = (
        f"the loss ({LOSS}) is the weighted sum of its terms ({', '.join(terms)}) {units[LOSS]}"
    )
    return TrainingCurves(series, step, statement, _seconds(rows, step))


def _seconds(rows: Sequence[Mapping[str, Any]], until: int | None) -> float | None:
    """Return the time of the optimizer steps up to one, None where a row lacks its speed."""
    tokens, seconds = 0, 0.0
    for row in rows:
        if not (_is_count(row.get(TOKENS)) and _is_count(row.get("step"))):
            continue
        if until is not None and row["step"] > until:
            break
        speed = row.get(SPEED)
        if not isinstance(speed, int | float) or not 0 < speed < math.inf:
            return None
        seconds += max(row[TOKENS] - tokens, 0) / speed
        tokens = row[TOKENS]
    return seconds or None


def _series(rows: Sequence[Mapping[str, Any]], name: str, unit: str) -> TrainingSeries | None:
    """Return one quantity at each step that logged it, with the tokens trained until then."""
    points: list[tuple[int, int, float]] = []
    tokens = 0
    for row in rows:
        if _is_count(row.get(TOKENS)):
            tokens = row[TOKENS]
        value = row.get(name)
        if isinstance(value, int | float) and math.isfinite(value) and _is_count(row.get("step")):
            points.append((row["step"], tokens, float(value)))
    if not points:
        return None
    every = math.ceil(len(points) / MOST_POINTS)
    kept = points[::every] if (len(points) - 1) % every == 0 else [*points[::every], points[-1]]
    steps, until, values = (list(column) for column in zip(*kept, strict=True))
    return TrainingSeries(name, unit, steps, until, values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= 2**53
