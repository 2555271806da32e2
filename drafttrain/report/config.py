"""The settings of the verdict and of `compare`."""

from dataclasses import dataclass
from pathlib import Path

from drafttrain.runtime.settings import Settings
from drafttrain.runtime.untrusted_input import folder_name


@dataclass(frozen=True)
class VerdictSettings(Settings):
    """The speedup worth having, and what the machine costs per hour (None: not given)."""

    section = "eval"

    marginal_speedup: float
    price_per_hour: float | None
    currency: str  # a label of the price

    def __post_init__(self) -> None:
        speedup, price = self.marginal_speedup, self.price_per_hour
        need = "be in [1, 10] (1: any sure gain is worth having)"
        self.require("marginal_speedup", 1 <= speedup <= 10, need)
        priced = price is None or 0 < price < float("inf")
        self.require("price_per_hour", priced, "be above 0, or null to leave money out")
        named = bool(self.currency.strip())
        self.require("currency", named, "name what eval.price_per_hour is in")


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    """Which runs are compared, with which baseline, and where the comparison is written."""

    section = "compare"

    runs: list[str]
    evaluation: str
    baseline: str | None
    all_pairs: bool
    resamples: int
    seed: int
    name: str
    dir: str

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(
                "runs must name at least one evaluated run, got none: "
                "python -m drafttrain compare 'runs=[outputs/a,outputs/b]'"
            )
        places = [Path(run).resolve() for run in self.runs]
        twice = [
            run for run, place in zip(self.runs, places, strict=True) if places.count(place) > 1
        ]
        if twice:
            raise ValueError(f"runs must name each run once, got {' and '.join(twice[:2])}")
        folder_name(self.evaluation, "compare.evaluation")
        self.require("resamples", self.resamples >= 100, "be at least 100")
        self.require("seed", self.seed >= 0, "be at least 0")
