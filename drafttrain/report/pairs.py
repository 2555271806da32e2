"""Runs on the prompts they share: estimates over training seeds, and differences paired by prompt.

Every statistic and every interval is that of `report.statistics`, of several runs at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafttrain.report.statistics import (
    PLAIN,
    Key,
    Resampling,
    Values,
    interval,
    length_statistic,
    speedup_statistic,
)


@dataclass(frozen=True)
class PromptCounts:
    """What one method counted and timed on one prompt, its turns taken together; in seconds."""

    accepted: float
    drafts: float
    drafted: float
    passes: float
    tokens: float
    seconds: float
    draft_seconds: float


Counts = Mapping[Key, PromptCounts]


@dataclass(frozen=True)
class Measured:
    """One drafting method of one report, and the plain loop beside which it was measured."""

    drafted: Counts
    plain: Counts

    def on(self, keys: Sequence[Key]) -> "Columns":
        """Return the columns of these prompts, in their order."""
        mine, theirs = [self.drafted[key] for key in keys], [self.plain[key] for key in keys]
        columns = {name: [getattr(row, name) for row in mine] for name in _NAMES}
        for name in ("tokens", "seconds"):
            columns[f"plain_{name}"] = [getattr(row, name) for row in theirs]
        return columns


Columns = dict[str, list[float]]
_NAMES = tuple(PromptCounts.__dataclass_fields__)


@dataclass(frozen=True)
class Quantity:
    """Something measured that has an interval: the columns it is computed from, and how."""

    columns: tuple[str, ...]
    statistic: Callable[..., Values]
    positive: tuple[str, ...]  # columns that must be positive: in all, or on every prompt
    every_prompt: bool

    def defined(self, run: Columns) -> bool:
        """Whether the quantity can be computed from these prompts."""
        enough: Callable[[Any], bool] = all if self.every_prompt else any
        return all(enough(value > 0 for value in run[name]) for name in self.positive)

    def of(self, run: Columns) -> float | None:
        """Return the quantity of one run, None where there is nothing to compute it from."""
        if not self.defined(run):
            return None
        return float(self.statistic(*map(np.asarray, self._columns(run)), axis=-1))

    def _columns(self, run: Columns) -> list[list[float]]:
        return [run[name] for name in self.columns]

    def mean(self, runs: Sequence[Columns], resampling: Resampling) -> dict[str, Any]:
        """Return the mean over runs, its interval over prompts, the range and each run's own."""
        values = [self.of(run) for run in runs]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return {"value": None, "ci95": None, "range": None, "by_run": values}
        return {
            "value": sum(known) / len(known),
            "ci95": self._interval([runs], resampling),
            "range": [min(known), max(known)],
            "by_run": values,
        }

    def difference(
        self, runs: Sequence[Columns], others: Sequence[Columns], resampling: Resampling
    ) -> dict[str, Any]:
        """Return the mean over `runs` minus the mean over `others`, paired by prompt."""
        if not all(self.defined(run) for run in (*runs, *others)):
            return {"value": None, "ci95": None}
        means = [sum(self.of(run) or 0.0 for run in side) / len(side) for side in (runs, others)]
        ci95 = self._interval([runs, others], resampling)
        return {"value": means[0] - means[1], "ci95": ci95}

    def _interval(
        self, sides: Sequence[Sequence[Columns]], resampling: Resampling
    ) -> list[float] | None:
        """Return the interval of the first side's mean, minus the second's if there is one."""
        width = len(self.columns)
        counts = [len(side) for side in sides]

        def statistic(*columns: np.ndarray, axis: int) -> Values:
            values = [
                self.statistic(*columns[start : start + width], axis=axis)
                for start in range(0, len(columns), width)
            ]
            mean = np.mean(values[: counts[0]], axis=0)
            return mean - np.mean(values[counts[0] :], axis=0) if len(counts) > 1 else mean

        columns = [column for side in sides for run in side for column in self._columns(run)]
        if not self.every_prompt:
            # A prompt on which nobody drafted says nothing, as in the report of one run.
            said = [any(row) for row in zip(*columns, strict=True)]
            columns = [
                [value for value, keep in zip(column, said, strict=True) if keep]
                for column in columns
            ]
        return interval(statistic, columns, resampling)


QUANTITIES = {
    "acceptance_length": Quantity(
        ("accepted", "drafts"), length_statistic, ("drafts",), every_prompt=False
    ),
    "speedup": Quantity(
        ("tokens", "seconds", "plain_tokens", "plain_seconds"),
        speedup_statistic,
        ("tokens", "seconds", "plain_tokens", "plain_seconds"),
        every_prompt=True,
    ),
}


def mean_ratio(runs: Sequence[Columns], above: str, below: str, scale: float = 1.0) -> float | None:
    """Return the mean over runs of one column's sum over another's, None where one has none."""
    sums = [(sum(run[above]), sum(run[below])) for run in runs]
    if not all(divisor > 0 for _, divisor in sums):
        return None
    return sum(scale * value / divisor for value, divisor in sums) / len(sums)


def measured_of(report: Mapping[str, Any]) -> dict[str, Measured]:
    """Return the measurements of a report by drafting method.

    Raises KeyError, TypeError or ValueError where the report does not hold what it should.
    """
    by_method: dict[str, dict[Key, PromptCounts]] = {}
    for row in report["measurements"]:
        counts = PromptCounts(
            accepted=float(row["num_accepted_tokens"]),
            drafts=float(row["num_drafts"]),
            drafted=float(row["num_draft_tokens"]),
            passes=float(row["num_target_passes"]),
            tokens=float(row["num_output_tokens"]),
            seconds=float(row["seconds"]["total"]),
            draft_seconds=float(row["seconds"]["draft"]),
        )
        prompts = by_method.setdefault(row["method"], {})
        key = (row["task"], row["prompt_id"])
        if key in prompts:
            raise ValueError(f"prompt {key[1]} of {key[0]} is there twice by {row['method']}")
        prompts[key] = counts
    plain = by_method.pop(PLAIN)
    for method, prompts in by_method.items():
        if set(prompts) != set(plain):
            raise ValueError(f"{method} and {PLAIN} have different prompts")
    return {method: Measured(prompts, plain) for method, prompts in by_method.items()}
