"""The sampling settings."""

from dataclasses import dataclass

from drafttrain.runtime.settings import require

SMALLEST_TEMPERATURE = 1e-4  # a smaller divisor overflows float32, and distributions become NaN


@dataclass(frozen=True)
class Sampling:
    """How logits become probabilities. temperature 0 is greedy; top_k 0 and top_p 1.0 are off."""

    temperature: float
    top_k: int
    top_p: float

    def __post_init__(self) -> None:
        heat, least = self.temperature, SMALLEST_TEMPERATURE
        require(0 <= heat <= 10, "temperature", "be in [0, 10]", heat)
        exact = heat == 0 or heat >= least
        require(exact, "temperature", f"be 0 (greedy) or at least {least}", heat)
        require(self.top_k >= 0, "top_k", "be at least 0 (0 is off)", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "be in (0, 1]", self.top_p)

    @property
    def greedy(self) -> bool:
        """Whether the distribution is a point mass on the first of the largest logits."""
        return self.temperature == 0


GREEDY = Sampling(0.0, 0, 1.0)
