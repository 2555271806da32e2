"""What a plan counts with."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a plan counts with beside the sections of `train`."""

    dir: str | None
    measured: str | None
    length: int | None
    loss_share: float
    tokens: int | None
    price_per_hour: float | None
    acceptance_rate: float
    acceptance_length: float | None
    depth: int
    batch_sizes: list[int]
    context: int
    serving_gpus: int | None

    def __post_init__(self) -> None:
        for key in ("length", "tokens", "depth", "context", "serving_gpus"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"plan.{key} must be at least 1, got {value}")
        if not 0 < self.loss_share <= 1:
            raise ValueError(f"plan.loss_share must be in (0, 1], got {self.loss_share}")
        if not 0 <= self.acceptance_rate <= 1:
            raise ValueError(f"plan.acceptance_rate must be in [0, 1], got {self.acceptance_rate}")
        longest = self.depth + 1
        if self.acceptance_length is not None and not 1 <= self.acceptance_length <= longest:
            raise ValueError(
                f"plan.acceptance_length must be in [1, {longest}] for plan.depth={self.depth}, "
                f"got {self.acceptance_length}"
            )
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(
                f"plan.batch_sizes must be numbers of at least 1, got {self.batch_sizes}"
            )
        if self.price_per_hour is not None and self.price_per_hour < 0:
            raise ValueError(f"plan.price_per_hour must be at least 0, got {self.price_per_hour}")


@dataclass(frozen=True, kw_only=True)
class AcceleratorConfig:
    """One accelerator: its size, its peaks and its price; null is found on this machine."""

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
    collective_us: float

    def __post_init__(self) -> None:
        for key in ("memory_gib", "bf16_tflops", "fp32_tflops", "bandwidth_gb_s"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"accelerator.{key} must be above 0, or null, got {value}")
        for key in ("efficiency", "serving_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"accelerator.{key} must be in (0, 1], got {getattr(self, key)}")
