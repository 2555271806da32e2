"""The settings of a plan, and of an accelerator."""

from dataclasses import dataclass
from typing import Annotated

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Settings

PEAKS = ("memory_gib", "bf16_tflops", "fp32_tflops", "bandwidth_gb_s")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """The settings of a plan besides the sections of `train`."""

    section = "plan"

    dir: str | None
    measured: str | None
    length: limits.PositiveInt | None
    loss_share: Annotated[float, limits.between(0.001, 1)]
    tokens: limits.PositiveInt | None
    host_gib: limits.PositiveFloat | None
    price_per_hour: limits.NonNegativeFloat | None
    run: str | None
    conditional_acceptance: limits.Fraction
    acceptance_length: float | None
    depth: limits.PositiveInt
    batch_sizes: Annotated[list[limits.PositiveInt], limits.NOT_EMPTY]
    context: limits.PositiveInt
    serving_gpus: limits.PositiveInt | None

    def __post_init__(self) -> None:
        super().__post_init__()
        accepted = self.acceptance_length
        possible = accepted is None or 1 <= accepted <= self.depth + 1
        longest = f"be in [1, {self.depth + 1}] for plan.depth={self.depth}"
        self.require("acceptance_length", possible, longest)


@dataclass(frozen=True, kw_only=True)
class AcceleratorConfig(Settings):
    """One accelerator: its size, its peaks and its price; null is measured on this machine."""

    section = "accelerator"

    name: str
    matches: list[str]
    memory_gib: limits.PositiveFloat | None
    bf16_tflops: limits.PositiveFloat | None
    fp32_tflops: limits.PositiveFloat | None
    bandwidth_gb_s: limits.PositiveFloat | None
    interconnect_gb_s: float
    watts: float
    price_per_hour: float
    efficiency: limits.PositiveFraction
    serving_efficiency: limits.PositiveFraction
    bandwidth_efficiency: limits.PositiveFraction
    overhead_gib: float
    pass_us: float
    launch_us: float
    collective_us: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in PEAKS:
            measured = self.name == "cpu" or getattr(self, key) is not None
            self.require(key, measured, "be above 0; null, to measure it, is for the cpu alone")
