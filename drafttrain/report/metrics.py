"""Compute the quantities of a report from measurements, and its rows from totals."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafttrain.core.types import Counters
from drafttrain.report.bootstrap import Resampling, Statistic, Values, interval, of_sides
from drafttrain.report.results import (
    NOT_COMPARED,
    PLAIN,
    AcceptanceLength,
    Change,
    Differences,
    Differing,
    Estimate,
    Interval,
    Measurement,
    MemberRow,
    MethodRow,
    Outside,
    OutsideCounts,
    PlainRow,
    PlainSpeed,
    Speeds,
    Speedup,
    Times,
    Untrimmed,
)
from drafttrain.report.totals import Key, PromptTotals

Columns = dict[str, list[float]]  # by prompt


def ratio(numerator: int | float, denominator: int | float) -> float | None:
    """Return the quotient, or None if the denominator is 0."""
    return numerator / denominator if denominator > 0 else None


def length_or_one(yielded: Values, of: Values) -> Values:
    """Return the acceptance length, or 1 where the prompts hold no draft."""
    return np.where(of > 0, yielded / np.where(of > 0, of, 1), 1.0)


def speedup_statistic(
    tokens: Values, seconds: Values, plain_tokens: Values, plain_seconds: Values
) -> Values:
    """Return the speedup over the plain loop."""
    return tokens / seconds / (plain_tokens / plain_seconds)


def drafted_columns(rows: Sequence[Measurement | OutsideCounts]) -> Columns:
    """Return the columns of what was drafted; a pass without a draft yields one token."""
    return {
        "accepted": [float(row.num_accepted_tokens) for row in rows],
        "yielded": [float(row.yielded) for row in rows],
        "drafts": [float(row.num_drafts) for row in rows],
        "drafted": [float(row.num_draft_tokens) for row in rows],
        "passes": [float(row.num_target_passes) for row in rows],
        "by_passes": [float(row.yielded + row.num_target_passes - row.num_drafts) for row in rows],
    }


def columns_of(rows: Sequence[Measurement], plain: Sequence[Measurement] = ()) -> Columns:
    """Return the columns of a method's measurements, and of the plain loop's on these prompts."""
    return drafted_columns(rows) | {
        "draft_seconds": [row.seconds.draft for row in rows],
        "tokens": [float(row.num_output_tokens) for row in rows],
        "seconds": [row.seconds.total for row in rows],
        "plain_passes": [float(row.num_target_passes) for row in plain],
        "plain_tokens": [float(row.num_output_tokens) for row in plain],
        "plain_seconds": [row.seconds.total for row in plain],
        "plain_verify_seconds": [row.seconds.verify for row in plain],
    }


@dataclass(frozen=True)
class Measured:
    """One drafting method of one report, and the plain loop measured with it."""

    drafted: dict[Key, Measurement]
    plain: dict[Key, Measurement]

    def on(self, keys: Sequence[Key]) -> Columns:
        """Return the columns of these prompts, in their order."""
        return columns_of([self.drafted[key] for key in keys], [self.plain[key] for key in keys])


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
    least: float  # that it can be

    def of(self, run: Columns) -> float | None:
        """Return the quantity of one run, None if it cannot be computed."""
        enough: Callable[[Any], bool] = all if self.every_prompt else any
        if not all(enough(value > 0 for value in run[name]) for name in self.positive):
            return None
        return float(self.statistic(*(np.float64(sum(run[name])) for name in self.columns)))

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
        every = (*runs, *others)
        known = [value for run in every if (value := self.of(run)) is not None]
        nothing = not any(value for run in every for name in self.columns for value in run[name])
        if len(known) < len(every) or nothing:
            return NOT_COMPARED
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
        least = self.least if len(sides) == 1 else -np.inf
        return interval(statistic, columns, resampling, least)


ACCEPTANCE_LENGTH = Quantity(
    ("yielded", "drafts"), np.divide, ("drafts",), every_prompt=False, least=1.0
)
# Where the prompts hold no draft (or pass), its length is 1.
PER_DRAFT, PER_PASS = (
    Quantity(columns, length_or_one, (), every_prompt=False, least=1.0)
    for columns in (("yielded", "drafts"), ("by_passes", "passes"))
)
SPEEDUP = Quantity(
    ("tokens", "seconds", "plain_tokens", "plain_seconds"),
    speedup_statistic,
    ("tokens", "seconds", "plain_tokens", "plain_seconds"),
    every_prompt=True,
    least=0.0,
)


def at_pass_time(seconds: float) -> Quantity:
    """Return the speedup beside a target whose every pass takes this long, drafting as measured.

    A pass that checks a draft is taken to last as long as a plain one; the prefill and the loop's
    own time are left out.
    """

    def statistic(plain_passes: Values, passes: Values, draft_seconds: Values) -> Values:
        return plain_passes / (passes + draft_seconds / seconds)

    columns = ("plain_passes", "passes", "draft_seconds")
    # An answer of a single token takes no pass after the prefill.
    return Quantity(columns, statistic, ("plain_passes", "passes"), every_prompt=False, least=0.0)


def mean_ratio(runs: Sequence[Columns], above: str, below: str, scale: float = 1.0) -> float | None:
    """Return the mean over runs of one column's sum over another's, None if one run lacks it."""
    sums = [(sum(run[above]), sum(run[below])) for run in runs]
    if not all(divisor > 0 for _, divisor in sums):
        return None
    return sum(scale * value / divisor for value, divisor in sums) / len(sums)


def acceptance_length(rows: Sequence[Measurement], resampling: Resampling) -> AcceptanceLength:
    """Return micro and macro acceptance length, and the interval of the micro one."""
    micro = ACCEPTANCE_LENGTH.mean([columns_of(rows)], resampling)
    own = [row.yielded / row.num_drafts for row in rows if row.num_drafts]
    return AcceptanceLength(micro.value, statistics.fmean(own) if own else None, micro.ci95)


def speed(rows: Sequence[Measurement]) -> float | None:
    """Return tokens per second: all tokens over all seconds."""
    return ratio(sum(row.num_output_tokens for row in rows), sum(row.seconds.total for row in rows))


def rows_of(prompts: Iterable[PromptTotals]) -> list[Measurement]:
    """Return the measurements of the prompts."""
    return [prompt.row for prompt in prompts]


def speedup(
    prompts: Sequence[PromptTotals], plain: Sequence[PromptTotals], resampling: Resampling
) -> Speedup:
    """Return the speedup over plain decoding: value, interval, and value by block."""
    columns = columns_of(rows_of(prompts), rows_of(plain))
    found = SPEEDUP.mean([columns], resampling)
    if found.value is None:
        return Speedup(None, None, [])

    def in_block(block: int) -> float | None:
        seconds, plain_seconds = (
            sum(prompt.block_seconds[block] for prompt in each) for each in (prompts, plain)
        )
        tokens, plain_tokens = sum(columns["tokens"]), sum(columns["plain_tokens"])
        return ratio(tokens * plain_seconds, seconds * plain_tokens)

    return Speedup(found.value, found.ci95, [in_block(block) for block in plain[0].block_seconds])


def outside_of(rows: Sequence[Measurement]) -> list[OutsideCounts] | None:
    """Return each prompt's counts outside repetition; None if cycles were not recorded."""
    outside = [row.outside_repetition for row in rows if row.outside_repetition is not None]
    return outside if len(outside) == len(rows) else None


def _outside(rows: Sequence[Measurement], resampling: Resampling) -> Outside:
    """Return the counters, acceptance length with its interval, and rate outside repetition."""
    found = outside_of(rows)
    if found is None:
        return Outside()
    sums = {name: sum(getattr(one, name) for one in found) for name in vars(found[0])}
    drafts, columns = sums["num_drafts"], drafted_columns(found)
    return Outside(
        **sums,
        acceptance_length=ratio(sum(one.yielded for one in found), drafts),
        ci95=PER_DRAFT.mean([columns], resampling).ci95 if drafts else None,
        acceptance_rate=ratio(sums["num_accepted_tokens"], sums["num_draft_tokens"]),
        share_of_drafts=ratio(drafts, sum(row.num_drafts for row in rows)),
    )


def _differences(
    mine: Sequence[Measurement],
    theirs: Sequence[Measurement] | None,
    quantity: Quantity,
    resampling: Resampling,
) -> Differences:
    """Return tokens per draft (or pass) minus the other's, in all text and outside repetition.

    Not compared: where neither drafted, or one was not recorded.
    """

    def difference(
        one: Sequence[Measurement | OutsideCounts] | None,
        other: Sequence[Measurement | OutsideCounts] | None,
    ) -> Change:
        if one is None or other is None:
            return NOT_COMPARED
        return quantity.difference([drafted_columns(one)], [drafted_columns(other)], resampling)

    there = [None if rows is None else outside_of(rows) for rows in (mine, theirs)]
    return Differences(difference(mine, theirs), difference(*there))


def plain_row(prompts: Sequence[PromptTotals]) -> PlainRow:
    """Return the row of plain decoding: its speed, step time and repetition."""
    rows = rows_of(prompts)
    return PlainRow(
        **_sizes(prompts),
        tokens_per_second=PlainSpeed(speed(rows)),
        time_ms=_times(prompts),
        repetition_rate=_repetition(rows),
    )


def method_row(
    prompts: Sequence[PromptTotals],
    plain: Sequence[PromptTotals],
    depth: int,
    resampling: Resampling,
    ngram: Sequence[PromptTotals] | None,
) -> MethodRow:
    """Return every number of a drafting method, relative to plain decoding of the same prompts.

    ngram: prompt lookup on the same prompts; None if it is the method itself, or not measured.
    Rates per position have `depth` entries. Numbers that cannot be computed are None.
    """
    rows, lookup = rows_of(prompts), None if ngram is None else rows_of(ngram)
    none = Counters(num_accepted_tokens_per_position=[0] * depth)
    counters = sum((prompt.trimmed for prompt in prompts), none)
    untrimmed = sum((prompt.untrimmed for prompt in prompts), none)
    per_position = counters.num_accepted_tokens_per_position
    reached = [counters.num_drafts, *per_position]  # how many drafts got to each position
    outputs = [
        (mine, theirs)
        for prompt, other in zip(prompts, plain, strict=True)
        for mine, theirs in zip(prompt.outputs, other.outputs, strict=True)
    ]
    times = _times(prompts)
    needed = _break_even(times, _times(plain).verify)
    return MethodRow(
        **_sizes(prompts),
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        num_cut_drafts=counters.num_cut_drafts,
        acceptance_length=acceptance_length(rows, resampling),
        acceptance_rate=ratio(counters.num_accepted_tokens, counters.num_draft_tokens),
        acceptance_per_position=[ratio(count, counters.num_drafts) for count in per_position],
        conditional_acceptance=list(map(ratio, per_position, reached)),
        tokens_per_second=Speeds(speed(rows_of(plain)), speed(rows)),
        speedup=speedup(prompts, plain, resampling),
        predicted_speedup=_predicted(rows, needed),
        time_ms=times,
        repetition_rate=_repetition(rows),
        outside_repetition=_outside(rows, resampling),
        acceptance_length_difference_to_ngram=_differences(rows, lookup, PER_DRAFT, resampling),
        tokens_per_pass_difference_to_ngram=_differences(rows, lookup, PER_PASS, resampling),
        outputs_differing=Differing(sum(a != b for a, b in outputs), len(outputs)),
        untrimmed=Untrimmed(
            **untrimmed.of_vllm,
            mean_acceptance_length=untrimmed.acceptance_length,  # none of them is cut
        ),
        break_even_length=needed,
        by_member=_by_member(prompts),
    )


def _by_member(prompts: Sequence[PromptTotals]) -> dict[str, MemberRow]:
    """Return what each member of an ensemble drafted."""
    parts: dict[str, Counters] = {}
    for name, part in (each for p in prompts for turn in p.by_member for each in turn.items()):
        parts[name] = parts.get(name, Counters()) + part
    return {
        name: MemberRow(
            part.num_drafts,
            part.num_draft_tokens,
            part.num_accepted_tokens,
            ratio(part.num_accepted_tokens, part.num_draft_tokens),
        )
        for name, part in sorted(parts.items())
    }


def _sizes(prompts: Sequence[PromptTotals]) -> dict[str, int]:
    return {
        "num_prompts": len(prompts),
        "num_turns": sum(len(prompt.outputs) for prompt in prompts),
        "num_output_tokens": sum(prompt.row.num_output_tokens for prompt in prompts),
        "num_target_passes": sum(prompt.row.num_target_passes for prompt in prompts),
    }


def _times(prompts: Sequence[PromptTotals]) -> Times:
    sizes = _sizes(prompts)

    def mean_ms(part: str, of: str) -> float | None:
        return ratio(1000 * sum(getattr(p.row.seconds, part) for p in prompts), sizes[of])

    passes = {part: mean_ms(part, "num_target_passes") for part in ("draft", "verify", "other")}
    return Times(**passes, prefill=mean_ms("prefill", "num_turns"))


def _repetition(rows: Sequence[Measurement]) -> float | None:
    repeated = sum(row.num_repeated_tokens for row in rows)
    return ratio(repeated, sum(row.num_output_tokens for row in rows))


def _break_even(times: Times, step: float | None) -> float | None:
    """Return the tokens that a cycle must yield to take no longer than plain steps of `step` ms."""
    if times.draft is None or times.verify is None or not step or times.draft + times.verify <= 0:
        return None
    return (times.draft + times.verify) / step


def _predicted(rows: Sequence[Measurement], needed: float | None) -> float | None:
    columns = drafted_columns(rows)
    tokens, passes = sum(columns["by_passes"]), sum(columns["passes"])
    return None if needed is None else tokens / passes / needed
