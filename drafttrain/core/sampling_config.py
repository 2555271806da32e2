"""The sampling settings."""

from dataclasses import dataclass
from typing import Annotated

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Limit, Settings

SMALLEST_TEMPERATURE = 1e-4  # a smaller divisor overflows float32, and distributions become NaN
TEMPERATURE = f"be 0 (greedy) or in [{SMALLEST_TEMPERATURE}, 10]"
Temperature = Annotated[
    float, Limit(TEMPERATURE, lambda value: value == 0 or SMALLEST_TEMPERATURE <= value <= 10)
]


@dataclass(frozen=True)
class Sampling(Settings):
    """How logits become probabilities. temperature 0 is greedy; top_k 0 and top_p 1.0 are off."""

    section = "sampling"

    temperature: Temperature
    top_k: limits.NonNegativeInt
    top_p: limits.PositiveFraction

    @property
    def greedy(self) -> bool:
        """Whether the distribution is a point mass on the first of the largest logits."""
        return self.temperature == 0


GREEDY = Sampling(0.0, 0, 1.0)
