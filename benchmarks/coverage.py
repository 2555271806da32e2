"""How often the reports' 95 % intervals hold the truth, by simulation: few and skewed prompts.

    python benchmarks/coverage.py

Prompts differ in how much a draft gains (exponential; lognormal; a tenth of them far easier than
the others) and in how many drafts they take; the truth is known. BCa, which reports used before,
stands beside.
"""

from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

from drafttrain.report.bootstrap import Resampling, interval

TRIALS, RESAMPLES = 2000, 1000
SIZES = (5, 10, 80)


def _easy_ones(random: np.random.Generator, size: int) -> np.ndarray:
    easy = random.random(size) < 0.1
    return np.where(easy, random.uniform(3, 5, size), random.gamma(2, 0.3, size))


Draw = Callable[[np.random.Generator, int], np.ndarray]
GAINS: dict[str, tuple[Draw, float]] = {  # accepted tokens per draft by prompt, and their mean
    "exponential": (lambda random, size: random.exponential(1.0, size), 1.0),
    "lognormal 0.7": (lambda random, size: random.lognormal(0.0, 0.7, size), np.exp(0.245)),
    "a tenth far easier": (_easy_ones, 0.94),
}


def covered(draw: Draw, truth: float, size: int, bca: bool) -> float:
    """Return how often the interval of `size` prompts holds the true acceptance length."""
    random, hits = np.random.default_rng(0), 0
    for _ in range(TRIALS):
        drafts = np.maximum(1, random.poisson(20, size)).astype(float)
        columns = [drafts * (1 + draw(random, size)), drafts]
        if bca:
            low, high = bootstrap(
                columns,
                lambda tokens, of, axis: tokens.sum(axis) / of.sum(axis),
                paired=True,
                vectorized=True,
                n_resamples=RESAMPLES,
                method="BCa",
                rng=np.random.default_rng(0),
            ).confidence_interval
        else:
            low, high = interval(np.divide, columns, Resampling(RESAMPLES, 0)) or (0, 0)
        hits += low <= 1 + truth <= high
    return hits / TRIALS


def main() -> None:
    """Print the table."""
    table = Table("gain of a draft", "prompts", "bootstrap-t", "BCa")
    for name, (draw, truth) in GAINS.items():
        for size in SIZES:
            told = [f"{100 * covered(draw, truth, size, bca):.1f} %" for bca in (False, True)]
            table.add_row(name, str(size), *told)
    Console().print(table)


if __name__ == "__main__":
    main()
