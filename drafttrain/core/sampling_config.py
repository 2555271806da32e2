"""How logits become probabilities."""

from dataclasses import dataclass

SMALLEST_TEMPERATURE = 1e-4  # logits divided by less overflow float32, and laws become NaN


@dataclass(frozen=True)
class Sampling:
    """How logits become probabilities. temperature 0 is greedy; top_k 0 and top_p 1.0 are off."""

    temperature: float
    top_k: int
    top_p: float

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature must be in [0, 10], got {self.temperature}")
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, got "
                f"{self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 is off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        """Whether the law is a point mass on the first of the largest logits."""
        return self.temperature == 0


GREEDY = Sampling(0.0, 0, 1.0)
