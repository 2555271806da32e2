"""The settings of the verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VerdictSettings:
    """The speedup worth having, and what the machine costs per hour (None: not given)."""

    marginal_speedup: float
    price_per_hour: float | None
    currency: str  # a label of the price

    def __post_init__(self) -> None:
        if not 1 <= self.marginal_speedup <= 10:
            raise ValueError(
                f"eval.marginal_speedup must be in [1, 10] (1: any sure gain is worth having), got "
                f"{self.marginal_speedup}"
            )
        if self.price_per_hour is not None and not 0 < self.price_per_hour < float("inf"):
            raise ValueError(
                f"eval.price_per_hour must be above 0, or null to leave money out, got "
                f"{self.price_per_hour}"
            )
        if not self.currency.strip():
            raise ValueError("eval.currency must name what eval.price_per_hour is in, got nothing")
