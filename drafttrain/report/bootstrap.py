"""The one bootstrap: intervals of statistics of whole prompts, and of their paired differences."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from drafttrain.report.results import Interval
from drafttrain.report.totals import FEWEST_PROMPTS

CONFIDENCE = 0.95
MOST_DRAWN = 500  # resamples at a time
STEP = 1e-6  # of a column's mean, for slopes
ROUNDING = 1e-8  # of the size of what a standard error is of: below it there is none

Values = np.ndarray | np.float64  # one value per resample, or the statistic of the data itself
Statistic = Callable[..., Values]  # of the sum of each column
ByPrompt = Sequence[Sequence[float] | np.ndarray]  # columns of values


@dataclass(frozen=True)
class Resampling:
    """How often the bootstrap resamples the prompts, and with which seed."""

    resamples: int
    seed: int


def interval(
    statistic: Statistic, columns: ByPrompt, resampling: Resampling, least: float = -np.inf
) -> Interval | None:
    """Return the 95 % interval of a statistic of whole prompts, or None for too few of them.

    `columns` are values by prompt; prompts are resampled whole, so that columns stay paired. The
    interval is that of the studentized bootstrap (bootstrap-t; Efron and Tibshirani, 1993, 12.5):
    how far resamples are off, each in its own standard errors. With few or skewed prompts it
    covers what percentiles and BCa do not (benchmarks/README.md). It knows no bounds: with few
    prompts it can reach below `least`, the least that the statistic can be, and is cut off there.
    """
    data = np.asarray(columns, dtype=np.float64)
    num_prompts = data.shape[1]
    if num_prompts < FEWEST_PROMPTS:
        return None
    value, error = _with_error(statistic, data, np.ones((1, num_prompts)))
    off = []
    for drawn in _drawn(resampling, num_prompts):
        values, errors = _with_error(statistic, data, drawn.astype(np.float64))
        with np.errstate(invalid="ignore", divide="ignore"):
            off.append((values - value) / errors)
    # Resamples of one prompt alone, or of none that drafted, have no error.
    every = np.concatenate(off)
    every = every[np.isfinite(every)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(every, [tail, 1 - tail]) if every.size else (0.0, 0.0)
    return [max(least, float(value[0] - high * error[0])), float(value[0] - low * error[0])]


@functools.lru_cache(maxsize=2)  # a report has many statistics of the same prompts
def _drawn(resampling: Resampling, num_prompts: int) -> list[np.ndarray]:
    """Return how often each prompt is in each resample (resamples x prompts), some at a time."""
    rng = np.random.default_rng(resampling.seed)
    shares = np.full(num_prompts, 1 / num_prompts)
    sizes = [
        min(MOST_DRAWN, resampling.resamples - start)
        for start in range(0, resampling.resamples, MOST_DRAWN)
    ]
    smallest = np.min_scalar_type(num_prompts)
    return [rng.multinomial(num_prompts, shares, size=size).astype(smallest) for size in sizes]


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
        slopes = np.stack(
            [
                (statistic(*(means + step)) - statistic(*(means - step))) / (2 * step[place])
                for place, step in enumerate(np.eye(num_columns)[:, :, None] * steps)
            ]
        )
        # What each prompt adds to the statistic, to first order.
        influence = slopes.T @ data - np.sum(slopes * means, axis=0)[:, None]
        variance = np.sum(weights * influence**2, axis=1) / num_prompts
        error = np.sqrt(variance / (num_prompts - 1))
        size = np.sum(np.abs(slopes * means), axis=0)
    return value, np.where(error > ROUNDING * size, error, 0.0)


def of_sides(statistic: Statistic, sides: Sequence[int], width: int) -> Statistic:
    """Return a statistic's mean over the runs of one side, or that minus the other side's mean.

    sides: how many runs each side has; every run has `width` columns, one run after the other.
    """

    def combined(*sums: Values) -> Values:
        values = [statistic(*sums[start : start + width]) for start in range(0, len(sums), width)]
        mean = np.mean(values[: sides[0]], axis=0)
        return mean - np.mean(values[sides[0] :], axis=0) if len(sides) > 1 else mean

    return combined
