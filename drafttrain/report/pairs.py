"""Methods on shared prompts: means over training seeds, and differences paired by prompt."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafttrain.report.metrics import (
    Resampling,
    Statistic,
    Values,
    interval,
    length_statistic,
    of_sides,
    speedup_statistic,
)
from drafttrain.report.results import (
    PLAIN,
    Adaptation,
    AdaptationRow,
    BeforeAfter,
    Change,
    Estimate,
    Interval,
    Measurement,
)
from drafttrain.report.totals import Key
from drafttrain.report.wording import bounds, cell, number

BEFORE = "before"  # the method that decodes with the drafter that training started from
ADAPTATION = (
    "A drafter that started from another one (run.init_from), beside that one as it was: the same "
    "prompts, decoded by the same target in the same timing blocks. difference: after minus "
    "before; ci95: bootstrap over prompts, paired, so that a prompt is drawn with both."
)

Columns = dict[str, list[float]]  # by prompt


@dataclass(frozen=True)
class Measured:
    """One drafting method of one report, and the plain loop measured with it."""

    drafted: dict[Key, Measurement]
    plain: dict[Key, Measurement]

    def on(self, keys: Sequence[Key]) -> Columns:
        """Return the columns of these prompts, in their order."""
        mine, theirs = [self.drafted[key] for key in keys], [self.plain[key] for key in keys]
        return {
            "accepted": [float(row.num_accepted_tokens) for row in mine],
            "yielded": [float(row.yielded) for row in mine],
            "drafts": [float(row.num_drafts) for row in mine],
            "drafted": [float(row.num_draft_tokens) for row in mine],
            "passes": [float(row.num_target_passes) for row in mine],
            "draft_seconds": [row.seconds.draft for row in mine],
            "tokens": [float(row.num_output_tokens) for row in mine],
            "seconds": [row.seconds.total for row in mine],
            "plain_passes": [float(row.num_target_passes) for row in theirs],
            "plain_tokens": [float(row.num_output_tokens) for row in theirs],
            "plain_seconds": [row.seconds.total for row in theirs],
        }


def measured_of(rows: Iterable[Measurement]) -> dict[str, Measured]:
    """Return the measurements of a report by drafting method.

    Raises ValueError if a prompt occurs twice, or a method lacks prompts of the plain loop.
    """
    by_method: dict[str, dict[Key, Measurement]] = {PLAIN: {}}
    for row in rows:
        prompts = by_method.setdefault(row.method, {})
        if (row.task, row.prompt_id) in prompts:
            raise ValueError(
                f"prompt {row.prompt_id} of {row.task} is measured twice with {row.method}"
            )
        prompts[row.task, row.prompt_id] = row
    plain = by_method.pop(PLAIN)
    for method, prompts in by_method.items():
        if set(prompts) != set(plain):
            raise ValueError(f"{method} and {PLAIN} have different prompts")
    return {method: Measured(prompts, plain) for method, prompts in by_method.items()}


def by_scope(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """Return the prompts of all tasks, under "all", and of each."""
    tasks: dict[str, list[Key]] = {}
    for key in (every := list(keys)):
        tasks.setdefault(key[0], []).append(key)
    return {"all": every, **tasks}


@dataclass(frozen=True)
class Spread(Estimate):
    """The mean over several runs with its interval over prompts, their range and each run's own."""

    range: Interval | None
    by_run: list[float | None]


@dataclass(frozen=True)
class Quantity:
    """A measured quantity with an interval: the columns it is computed from, and how."""

    columns: tuple[str, ...]
    statistic: Statistic
    positive: tuple[str, ...]  # columns that must be positive: their sum, or on every prompt
    every_prompt: bool

    def of(self, run: Columns) -> float | None:
        """Return the quantity of one run, None if it cannot be computed."""
        enough: Callable[[Any], bool] = all if self.every_prompt else any
        if not all(enough(value > 0 for value in run[name]) for name in self.positive):
            return None
        return float(self.statistic(*(np.sum(run[name]) for name in self.columns)))

    def mean(self, runs: Sequence[Columns], resampling: Resampling) -> Spread:
        """Return the mean over runs, its interval over prompts, the range and each run's own."""
        values = [self.of(run) for run in runs]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return Spread(None, None, None, values)
        ci95 = self._interval([runs], resampling)
        return Spread(sum(known) / len(known), ci95, [min(known), max(known)], values)

    def difference(
        self, runs: Sequence[Columns], others: Sequence[Columns], resampling: Resampling
    ) -> Change:
        """Return the mean over `runs` minus the mean over `others`, paired by prompt."""
        values = [self.of(run) for run in (*runs, *others)]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return Change(None, None)
        mine, theirs = known[: len(runs)], known[len(runs) :]
        value = sum(mine) / len(mine) - sum(theirs) / len(theirs)
        return Change(value, self._interval([runs, others], resampling))

    def _interval(self, sides: list[Sequence[Columns]], resampling: Resampling) -> Interval | None:
        """Return the interval of the first side's mean, minus the second's if there is one."""
        columns = [run[name] for side in sides for run in side for name in self.columns]
        if not self.every_prompt:
            # A prompt on which no run drafted is left out, as in the report of one run.
            drafted = [row for row in zip(*columns, strict=True) if any(row)]
            columns = [list(column) for column in zip(*drafted, strict=True)]
        statistic = of_sides(self.statistic, [len(side) for side in sides], len(self.columns))
        return interval(statistic, columns, resampling)


ACCEPTANCE_LENGTH = Quantity(
    ("yielded", "drafts"), length_statistic, ("drafts",), every_prompt=False
)
SPEEDUP = Quantity(
    ("tokens", "seconds", "plain_tokens", "plain_seconds"),
    speedup_statistic,
    ("tokens", "seconds", "plain_tokens", "plain_seconds"),
    every_prompt=True,
)


def at_pass_time(seconds: float) -> Quantity:
    """Return the speedup beside a target whose every pass takes this long, drafting as measured.

    A pass that checks a draft is taken to last as long as a plain one; the prefill and the loop's
    own time are left out.
    """

    def statistic(plain_passes: Values, passes: Values, draft_seconds: Values) -> Values:
        return plain_passes / (passes + draft_seconds / seconds)

    columns = ("plain_passes", "passes", "draft_seconds")
    return Quantity(columns, statistic, ("plain_passes", "passes"), every_prompt=True)


def mean_ratio(runs: Sequence[Columns], above: str, below: str, scale: float = 1.0) -> float | None:
    """Return the mean over runs of one column's sum over another's, None if one run lacks it."""
    sums = [(sum(run[above]), sum(run[below])) for run in runs]
    if not all(divisor > 0 for _, divisor in sums):
        return None
    return sum(scale * value / divisor for value, divisor in sums) / len(sums)


def adaptation(
    rows: Iterable[Measurement], drafter: str, resampling: Resampling
) -> Adaptation | None:
    """Return acceptance and speedup before and after adapting, None where not measured."""
    measured = measured_of(rows)
    if BEFORE not in measured:
        return None
    found = {}
    for scope, keys in by_scope(measured[drafter].drafted).items():
        old, new = [measured[BEFORE].on(keys)], [measured[drafter].on(keys)]
        length, speedup = (
            BeforeAfter(
                quantity.mean(old, resampling).estimate,
                quantity.mean(new, resampling).estimate,
                quantity.difference(new, old, resampling),
            )
            for quantity in (ACCEPTANCE_LENGTH, SPEEDUP)
        )
        found[scope] = AdaptationRow(len(keys), length, speedup)
    length = found["all"].acceptance_length
    statement = (
        f"acceptance length {number(length.before.value)} before, {number(length.after.value)} "
        f"after adapting, on {found['all'].num_prompts} prompts"
    )
    answer = length.difference.decides("better", "worse", "not decided")
    told = f": {answer} ({cell(length.difference)}, 95 %)" if answer else f"; {bounds(None)}"
    return Adaptation(found, statement + told, ADAPTATION)
