"""The settings of a plan, and of an accelerator."""

from dataclasses import dataclass

from drafttrain.runtime.settings import Settings

PEAKS = ("memory_gib", "bf16_tflops", "fp32_tflops", "bandwidth_gb_s")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """The settings of a plan besides the sections of `train`."""

    section = "plan"

    dir: str | None
    measured: str | None
    length: int | None
    loss_share: float
    tokens: int | None
    host_gib: float | None
    price_per_hour: float | None
    run: str | None
    conditional_acceptance: float
    acceptance_length: float | None
    depth: int
    batch_sizes: list[int]
    context: int
    serving_gpus: int | None

    def __post_init__(self) -> None:
        sizes, accepted, price = self.batch_sizes, self.acceptance_length, self.price_per_hour
        for key in ("length", "tokens", "depth", "context", "serving_gpus"):
            value = getattr(self, key)
            self.require(key, value is None or value >= 1, "be at least 1")
        self.require("loss_share", 0.001 <= self.loss_share <= 1, "be in [0.001, 1]")
        rate = self.conditional_acceptance
        self.require("conditional_acceptance", 0 <= rate <= 1, "be in [0, 1]")
        possible = accepted is None or 1 <= accepted <= self.depth + 1
        longest = f"be in [1, {self.depth + 1}] for plan.depth={self.depth}"
        self.require("acceptance_length", possible, longest)
        positive = bool(sizes) and min(sizes) >= 1
        self.require("batch_sizes", positive, "be numbers of at least 1")
        self.require("host_gib", self.host_gib is None or self.host_gib > 0, "be above 0, or null")
        self.require("price_per_hour", price is None or price >= 0, "be at least 0")


@dataclass(frozen=True, kw_only=True)
class AcceleratorConfig(Settings):
    """One accelerator: its size, its peaks and its price; null is measured on this machine."""

    section = "accelerator"

    name: str
    matches: list[str]
    memory_gib: float | None
    bf16_tflops: float | None
    fp32_tflops: float | None
    bandwidth_gb_s: float | None
    interconnect_gb_s: float
    watts: float
    price_per_hour: float
    efficiency: float
    serving_efficiency: float
    bandwidth_efficiency: float
    overhead_gib: float
    pass_us: float
    launch_us: float
    collective_us: float

    def __post_init__(self) -> None:
        for key in PEAKS:
            value = getattr(self, key)
            positive = self.name == "cpu" if value is None else value > 0
            self.require(key, positive, "be above 0; null, to measure it, is for the cpu alone")
        for key in ("efficiency", "serving_efficiency", "bandwidth_efficiency"):
            self.require(key, 0 < getattr(self, key) <= 1, "be in (0, 1]")
