"""Compute the rows of a report from totals, and their intervals by bootstrap over prompts."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from drafttrain.core.types import Counters
from drafttrain.report.results import (
    NOT_COMPARED,
    AcceptanceLength,
    Change,
    Differences,
    Differing,
    Interval,
    Measurement,
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
from drafttrain.report.totals import FEWEST_PROMPTS, PromptTotals

CONFIDENCE = 0.95
MOST_DRAWN = 500  # resamples at a time
STEP = 1e-6  # of a column's mean, for slopes

Values = np.ndarray | np.float64  # one value per resample, or the statistic of the data itself
Statistic = Callable[..., Values]  # of the sum of each column
Columns = Sequence[Sequence[float] | np.ndarray]  # values by prompt
Pairs = list[tuple[int, int]]  # by prompt: tokens, and the drafts or passes that yielded them


@dataclass(frozen=True)
class Resampling:
    """How often the bootstrap resamples the prompts, and with which seed."""

    resamples: int
    seed: int


def ratio(numerator: int | float, denominator: int | float) -> float | None:
    """Return the quotient, or None if the denominator is 0."""
    return numerator / denominator if denominator > 0 else None


def interval(statistic: Statistic, columns: Columns, resampling: Resampling) -> Interval | None:
    """Return the 95 % interval of a statistic of whole prompts, or None for too few of them.

    `columns` are values by prompt; prompts are resampled whole, so that columns stay paired. The
    interval is that of the studentized bootstrap (bootstrap-t; Efron and Tibshirani, 1993, 12.5):
    how far resamples are off, each in its own standard errors. With few or skewed prompts it
    covers what percentiles and BCa do not (benchmarks/README.md).
    """
    data = np.asarray(columns, dtype=np.float64)
    num_prompts = data.shape[1]
    if num_prompts < FEWEST_PROMPTS:
        return None
    rng = np.random.default_rng(resampling.seed)
    value, error = _with_error(statistic, data, np.ones((1, num_prompts)))
    off = []
    for start in range(0, resampling.resamples, MOST_DRAWN):
        size = min(MOST_DRAWN, resampling.resamples - start)
        drawn = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=size)
        values, errors = _with_error(statistic, data, drawn.astype(np.float64))
        with np.errstate(invalid="ignore", divide="ignore"):
            off.append((values - value) / errors)
    # Resamples of one prompt alone, or of none that drafted, have no error.
    every = np.concatenate(off)
    every = every[np.isfinite(every)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(every, [tail, 1 - tail]) if every.size else (0.0, 0.0)
    return [float(value[0] - high * error[0]), float(value[0] - low * error[0])]


def _with_error(
    statistic: Statistic, data: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a statistic of each sample and its standard error, by the delta method.

    data: columns x prompts; weights: samples x prompts, how often each prompt is in a sample.
    """
    num_columns, num_prompts = data.shape
    means = (weights @ data.T).T / num_prompts
    steps = STEP * np.maximum(np.abs(means), STEP)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.asarray(statistic(*means))
        slopes = [
            (statistic(*(means + step)) - statistic(*(means - step))) / (2 * step[place])
            for place, step in enumerate(np.eye(num_columns)[:, :, None] * steps)
        ]
        variance = sum(
            slopes[one]
            * slopes[two]
            * ((weights @ (data[one] * data[two])) / num_prompts - means[one] * means[two])
            for one in range(num_columns)
            for two in range(num_columns)
        )
    return value, np.sqrt(np.maximum(variance, 0.0) / (num_prompts - 1))


def of_sides(statistic: Statistic, sides: Sequence[int], width: int) -> Statistic:
    """Return a statistic's mean over the runs of one side, or that minus the other side's mean.

    sides: how many runs each side has; every run has `width` columns, one run after the other.
    """

    def combined(*sums: Values) -> Values:
        values = [statistic(*sums[start : start + width]) for start in range(0, len(sums), width)]
        mean = np.mean(values[: sides[0]], axis=0)
        return mean - np.mean(values[sides[0] :], axis=0) if len(sides) > 1 else mean

    return combined


def length_statistic(yielded: Values, drafts: Values) -> Values:
    """Return tokens per draft: of all that drafts yielded, the acceptance length."""
    return yielded / drafts


def length_or_one(yielded: Values, of: Values) -> Values:
    """Return the acceptance length, or 1 where the prompts hold no draft."""
    return np.where(of > 0, yielded / np.where(of > 0, of, 1), 1.0)


def speedup_statistic(
    tokens: Values, seconds: Values, plain_tokens: Values, plain_seconds: Values
) -> Values:
    """Return the speedup over the plain loop."""
    return tokens / seconds / (plain_tokens / plain_seconds)


def acceptance_length(rows: Sequence[Measurement], resampling: Resampling) -> AcceptanceLength:
    """Return micro and macro acceptance length, and the interval of the micro one."""
    drafted = [(row.yielded, row.num_drafts) for row in rows if row.num_drafts]
    if not drafted:
        return AcceptanceLength(None, None, None)
    yielded, drafts = zip(*drafted, strict=True)
    macro = statistics.fmean(tokens / of for tokens, of in drafted)
    ci95 = interval(length_statistic, [yielded, drafts], resampling)
    return AcceptanceLength(sum(yielded) / sum(drafts), macro, ci95)


def speed(rows: Sequence[Measurement]) -> float | None:
    """Return tokens per second: all tokens over all seconds."""
    return ratio(sum(row.num_output_tokens for row in rows), sum(row.seconds.total for row in rows))


def _tokens_and_seconds(rows: Sequence[Measurement]) -> Columns:
    return [[row.num_output_tokens for row in rows], [row.seconds.total for row in rows]]


def _timed(rows: Sequence[Measurement]) -> bool:
    return all(row.num_output_tokens and row.seconds.total > 0 for row in rows)


def rows_of(prompts: Iterable[PromptTotals]) -> list[Measurement]:
    """Return the measurements of the prompts."""
    return [prompt.row for prompt in prompts]


def speedup(
    prompts: Sequence[PromptTotals], plain: Sequence[PromptTotals], resampling: Resampling
) -> Speedup:
    """Return the speedup over plain decoding: value, interval, and value by block."""
    mine, theirs = rows_of(prompts), rows_of(plain)
    fast, slow = speed(mine), speed(theirs)
    if not (fast and slow and _timed(mine) and _timed(theirs)):
        return Speedup(None, None, [])
    columns = [*_tokens_and_seconds(mine), *_tokens_and_seconds(theirs)]
    tokens, plain_tokens = (sum(row.num_output_tokens for row in rows) for rows in (mine, theirs))

    def in_block(block: int) -> float | None:
        seconds, plain_seconds = (
            sum(prompt.block_seconds[block] for prompt in each) for each in (prompts, plain)
        )
        return ratio(tokens * plain_seconds, seconds * plain_tokens)

    return Speedup(
        fast / slow,
        interval(speedup_statistic, columns, resampling),
        [in_block(block) for block in plain[0].block_seconds],
    )


def speedup_difference(
    mine: Sequence[Measurement],
    theirs: Sequence[Measurement],
    plain: Sequence[Measurement],
    resampling: Resampling,
) -> Change:
    """Return speedup minus the other method's speedup, paired by prompt."""
    fast, other, slow = speed(mine), speed(theirs), speed(plain)
    if not (fast and other and slow and all(map(_timed, (mine, theirs, plain)))):
        return NOT_COMPARED
    base = _tokens_and_seconds(plain)
    columns = [*_tokens_and_seconds(mine), *base, *_tokens_and_seconds(theirs), *base]
    statistic = of_sides(speedup_statistic, [1, 1], width=4)
    return Change((fast - other) / slow, interval(statistic, columns, resampling))


def length_difference(mine: Pairs | None, theirs: Pairs | None, resampling: Resampling) -> Change:
    """Return the tokens of a draft (or pass) minus the other method's, paired by prompt.

    A method that made no draft has length 1. None where neither did, or one was not recorded.
    """
    if mine is None or theirs is None:
        return NOT_COMPARED
    drafted = [(*one, *two) for one, two in zip(mine, theirs, strict=True) if one[1] or two[1]]
    if not drafted:
        return NOT_COMPARED
    columns = [np.array(column, dtype=np.float64) for column in zip(*drafted, strict=True)]
    statistic = of_sides(length_or_one, [1, 1], width=2)
    value = float(statistic(*(column.sum() for column in columns)))
    return Change(value, interval(statistic, columns, resampling))


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
    drafts = sums["num_drafts"]
    some = [(one.yielded, one.num_drafts) for one in found if one.num_drafts]
    columns = list(zip(*some, strict=True))
    return Outside(
        **sums,
        acceptance_length=ratio(sum(one.yielded for one in found), drafts),
        ci95=interval(length_or_one, columns, resampling) if some else None,
        acceptance_rate=ratio(sums["num_accepted_tokens"], sums["num_draft_tokens"]),
        share_of_drafts=ratio(drafts, sum(row.num_drafts for row in rows)),
    )


def _differences(
    mine: Sequence[Measurement],
    theirs: Sequence[Measurement] | None,
    pairs: Callable[[Measurement | OutsideCounts], tuple[int, int]],
    resampling: Resampling,
) -> Differences:
    """Return tokens per draft (or pass) minus the other's, in all text and outside repetition."""
    if theirs is None:
        return Differences(NOT_COMPARED, NOT_COMPARED)

    def difference(
        mine: Sequence[Measurement | OutsideCounts] | None,
        theirs: Sequence[Measurement | OutsideCounts] | None,
    ) -> Change:
        one, two = (
            None if rows is None else [pairs(row) for row in rows] for rows in (mine, theirs)
        )
        return length_difference(one, two, resampling)

    return Differences(difference(mine, theirs), difference(outside_of(mine), outside_of(theirs)))


def by_draft(row: Measurement | OutsideCounts) -> tuple[int, int]:
    """Return the tokens that drafts yielded, and the drafts."""
    return row.yielded, row.num_drafts


def by_pass(row: Measurement | OutsideCounts) -> tuple[int, int]:
    """Return the tokens of all passes, each without a draft yielding one, and the passes."""
    return row.yielded + row.num_target_passes - row.num_drafts, row.num_target_passes


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
        predicted_speedup=_predicted(rows, times, _times(plain).verify),
        time_ms=times,
        repetition_rate=_repetition(rows),
        outside_repetition=_outside(rows, resampling),
        acceptance_length_difference_to_ngram=_differences(rows, lookup, by_draft, resampling),
        tokens_per_pass_difference_to_ngram=_differences(rows, lookup, by_pass, resampling),
        outputs_differing=Differing(sum(a != b for a, b in outputs), len(outputs)),
        untrimmed=Untrimmed(
            **untrimmed.of_vllm,
            acceptance_length=untrimmed.acceptance_length,
        ),
    )


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


def _predicted(rows: Sequence[Measurement], times: Times, step: float | None) -> float | None:
    draft, verify = times.draft, times.verify
    if draft is None or verify is None or step is None or draft + verify <= 0:
        return None
    tokens, passes = (sum(column) for column in zip(*map(by_pass, rows), strict=True))
    return tokens / passes * step / (draft + verify)
