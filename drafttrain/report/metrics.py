"""Compute the rows of a report from totals, and their intervals by bootstrap over prompts."""

import statistics
import warnings
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

Values = np.ndarray | np.float64  # one value per resample, or the statistic of the data itself
Statistic = Callable[..., Values]  # of columns by prompt, and `axis`
Columns = Sequence[Sequence[float] | np.ndarray]
Pairs = list[tuple[int, int]]  # by prompt: accepted tokens, and their drafts or passes


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

    `columns` are values by prompt; prompts are resampled whole, so that columns stay paired, with
    bias correction and acceleration (BCa; Efron 1987). The statistic takes the columns and `axis`.
    """
    if len(columns[0]) < FEWEST_PROMPTS:
        return None
    # Importing takes a second, which commands that only lay out tables (plan, --help) avoid.
    from scipy.stats import DegenerateDataWarning, bootstrap

    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    with warnings.catch_warnings():
        # All prompts alike: no acceleration can be estimated, and the interval is one point.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        warnings.filterwarnings("ignore", "invalid value|divide by zero", RuntimeWarning)
        result = bootstrap(
            arrays,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=resampling.resamples,
            batch=max(1, 100_000 // len(arrays[0])),
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(resampling.seed),
        )
    bounds = result.confidence_interval.low, result.confidence_interval.high
    if not np.isfinite(bounds).all():
        tail = (1 - CONFIDENCE) / 2
        drawn = result.bootstrap_distribution
        # Prompts drawn without a single draft have no acceptance length.
        bounds = np.quantile(drawn[np.isfinite(drawn)], [tail, 1 - tail])
    return [float(bound) for bound in bounds]


def of_sides(statistic: Statistic, sides: Sequence[int], width: int) -> Statistic:
    """Return a statistic's mean over the runs of one side, or that minus the other side's mean.

    sides: how many runs each side has; every run has `width` columns, one run after the other.
    """

    def combined(*columns: np.ndarray, axis: int) -> Values:
        starts = range(0, len(columns), width)
        values = [statistic(*columns[start : start + width], axis=axis) for start in starts]
        mean = np.mean(values[: sides[0]], axis=0)
        return mean - np.mean(values[sides[0] :], axis=0) if len(sides) > 1 else mean

    return combined


def length(accepted: int, drafts: int) -> float | None:
    """Return the acceptance length, or None if there was no draft."""
    return 1 + accepted / drafts if drafts else None


def length_statistic(accepted: np.ndarray, drafts: np.ndarray, axis: int) -> Values:
    """Return the acceptance length of resampled prompts, all their drafts taken together."""
    return 1 + accepted.sum(axis) / drafts.sum(axis)


def length_or_one(accepted: np.ndarray, of: np.ndarray, axis: int) -> Values:
    """Return the acceptance length, or 1 where the prompts hold no draft."""
    return 1 + accepted.sum(axis) / np.maximum(of.sum(axis), 1)


def speedup_statistic(
    tokens: np.ndarray,
    seconds: np.ndarray,
    plain_tokens: np.ndarray,
    plain_seconds: np.ndarray,
    axis: int,
) -> Values:
    """Return the speedup over the plain loop, for resampled prompts."""
    plain = plain_tokens.sum(axis) / plain_seconds.sum(axis)
    return tokens.sum(axis) / seconds.sum(axis) / plain


def acceptance_length(rows: Sequence[Measurement], resampling: Resampling) -> AcceptanceLength:
    """Return micro and macro acceptance length, and the interval of the micro one."""
    drafted = [(row.num_accepted_tokens, row.num_drafts) for row in rows if row.num_drafts]
    if not drafted:
        return AcceptanceLength(None, None, None)
    accepted, drafts = zip(*drafted, strict=True)
    macro = statistics.fmean(1 + a / d for a, d in drafted)
    ci95 = interval(length_statistic, [accepted, drafts], resampling)
    return AcceptanceLength(length(sum(accepted), sum(drafts)), macro, ci95)


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
        return Speedup(None, None, [], 0)
    columns = [*_tokens_and_seconds(mine), *_tokens_and_seconds(theirs)]

    def in_block(prompts: Sequence[PromptTotals], block: int) -> float:
        timed = [prompt for prompt in prompts if block in prompt.block_seconds]
        tokens = sum(prompt.row.num_output_tokens for prompt in timed)
        return ratio(tokens, sum(prompt.block_seconds[block] for prompt in timed)) or 0.0

    blocks = sorted({block for prompt in plain for block in prompt.block_seconds})
    return Speedup(
        fast / slow,
        interval(speedup_statistic, columns, resampling),
        [ratio(in_block(prompts, block), in_block(plain, block)) for block in blocks],
        sum(one.disturbed or two.disturbed for one, two in zip(mine, theirs, strict=True)),
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
    """Return 1 + accepted / drafts (or passes) minus the other method's, paired by prompt.

    A method that made no draft has length 1. None where neither did, or one was not recorded.
    """
    if mine is None or theirs is None:
        return NOT_COMPARED
    drafted = [(*one, *two) for one, two in zip(mine, theirs, strict=True) if one[1] or two[1]]
    if not drafted:
        return NOT_COMPARED
    columns = [np.array(column, dtype=np.float64) for column in zip(*drafted, strict=True)]
    statistic = of_sides(length_or_one, [1, 1], width=2)
    value = float(statistic(*columns, axis=-1))
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
    accepted, drafts = sums["num_accepted_tokens"], sums["num_drafts"]
    some = [(one.num_accepted_tokens, one.num_drafts) for one in found if one.num_drafts]
    columns = list(zip(*some, strict=True))
    return Outside(
        **sums,
        acceptance_length=length(accepted, drafts),
        ci95=interval(length_or_one, columns, resampling) if some else None,
        acceptance_rate=ratio(accepted, sums["num_draft_tokens"]),
        share_of_drafts=ratio(drafts, sum(row.num_drafts for row in rows)),
    )


def _differences(
    mine: Sequence[Measurement],
    theirs: Sequence[Measurement] | None,
    per: str,
    resampling: Resampling,
) -> Differences:
    """Return 1 + accepted / `per` minus the other method's, in all text and outside repetition."""
    if theirs is None:
        return Differences(NOT_COMPARED, NOT_COMPARED)

    def difference(
        mine: Sequence[Measurement | OutsideCounts] | None,
        theirs: Sequence[Measurement | OutsideCounts] | None,
    ) -> Change:
        one, two = (
            None if rows is None else [(row.num_accepted_tokens, getattr(row, per)) for row in rows]
            for rows in (mine, theirs)
        )
        return length_difference(one, two, resampling)

    return Differences(difference(mine, theirs), difference(outside_of(mine), outside_of(theirs)))


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
        acceptance_length_difference_to_ngram=_differences(rows, lookup, "num_drafts", resampling),
        tokens_per_pass_difference_to_ngram=_differences(
            rows, lookup, "num_target_passes", resampling
        ),
        outputs_differing=Differing(sum(a != b for a, b in outputs), len(outputs)),
        untrimmed=Untrimmed(
            **vars(untrimmed),
            acceptance_length=length(untrimmed.num_accepted_tokens, untrimmed.num_drafts),
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
    accepted = sum(row.num_accepted_tokens for row in rows)
    # 1 + accepted / passes is the acceptance length if every pass had a draft, as it should.
    return (1 + accepted / sum(row.num_target_passes for row in rows)) * step / (draft + verify)
