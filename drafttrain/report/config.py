"""The settings of the verdict."""

from dataclasses import dataclass

from drafttrain.runtime.settings import Settings


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
