"""The settings of the verdict and of `compare`."""

from dataclasses import dataclass
from os.path import realpath
from typing import Annotated

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Limit, Settings

EXAMPLE = ": python -m drafttrain compare 'runs=[outputs/a,outputs/b]'"
SOME_RUN = Limit("name at least one evaluated run", bool, EXAMPLE)
DISTINCT_RUNS = Limit("name each run once", lambda runs: len({*map(realpath, runs)}) == len(runs))


@dataclass(frozen=True)
class VerdictSettings(Settings):
    """The speedup worth having, and what the machine costs per hour (None: not given)."""

    section = "eval"

    marginal_speedup: Annotated[float, limits.between(1, 10)]  # 1: any sure gain is worth having
    price_per_hour: limits.PositiveFloat | None
    currency: str  # a label of the price


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    """Which runs are compared, with which baseline, and where the comparison is written."""

    section = "compare"

    runs: Annotated[list[str], SOME_RUN, DISTINCT_RUNS]
    evaluation: limits.FolderName
    baseline: str | None
    all_pairs: bool
    resamples: Annotated[int, limits.at_least(100)]
    seed: limits.NonNegativeInt
    name: str
    dir: str
