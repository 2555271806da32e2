"""The settings of the training loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from drafttrain.runtime import limits
from drafttrain.runtime.settings import AUTO, Limit, Settings

MOST_EPOCHS = 1_000_000
SIZES = ("max_steps", "tokens_per_step", "lr", "warmup_steps", "validate_every", "save_every")
# What a search found best for drafters of targets 384 wide: benchmarks/README.md. From there to the
# published sizes of real targets, 65,536 tokens a step for 1.3 billion, leads a power of 0.6.
TOKENS, TOKENS_PER_STEP, GROWTH = 400_000, 512, 0.6
# The target that the drafters' rates were found with, and the most steps that they suit: from there
# the rate falls by the square root, which leads to the 1e-4 that EAGLE-3 of 8B is published with.
WIDTH, STEPS = 384, 400
SMALLEST_STEP, LARGEST_STEP = 256, 65_536
WARM_UP = 0.05  # of the steps


def _are_epochs(value: float) -> bool:
    return 0 < value <= MOST_EPOCHS


def _is_rate(value: Any) -> bool:
    return value == AUTO or (type(value) in (int, float) and value > 0)


def _is_warm_up(value: object) -> bool:
    return value == AUTO or (type(value) is int and value >= 0)


def _are_prompts(value: object) -> bool:
    return bool(value) if isinstance(value, str) else type(value) is int and value >= 1


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Settings):
    """How long and how fast to train, and when to log, validate and save.

    The numbers of SIZES are `auto` until `sized` has chosen them.
    """

    section = "trainer"

    name: str
    epochs: Annotated[float, Limit(f"be above 0 and at most {MOST_EPOCHS:,}", _are_epochs)]
    max_steps: limits.CountOrAuto
    tokens_per_step: limits.CountOrAuto
    lr: Annotated[Any, Limit(f"be a number above 0, or {AUTO}", _is_rate)]
    schedule: Annotated[str, limits.one_of("cosine", "constant")]
    warmup_steps: Annotated[Any, Limit(f"be a whole number, or {AUTO}", _is_warm_up)]
    final_lr_ratio: limits.Fraction
    weight_decay: limits.NonNegativeFloat
    beta1: limits.FractionBelow1
    beta2: limits.FractionBelow1
    ema_decay: limits.FractionBelow1
    max_grad_norm: limits.PositiveFloat
    log_every: limits.PositiveInt
    validate_every: limits.CountOrAuto
    validation_prompts: Annotated[Any, Limit("be at least 1, or a file of prompts", _are_prompts)]
    validation_tokens: limits.PositiveInt
    save_every: limits.CountOrAuto
    keep_checkpoints: limits.PositiveInt

    @property
    def unsized(self) -> bool:
        """Whether any size is still to be chosen from the data."""
        return any(getattr(self, key) == AUTO for key in SIZES)

    def sized(
        self,
        num_tokens: int,
        num_steps: Callable[[int, float], int],
        hidden_size: int,
        rate: float,
    ) -> "TrainerConfig":
        """Return these settings with a number for every size that is `auto`.

        num_tokens: of the data, which is read `epochs` times. num_steps: returns the steps that
        this takes, from the tokens of a step and the epochs. hidden_size: the target's width, by
        which the rate falls, as for updates of equal effect (Yang et al., 2022, arXiv:2203.03466).
        rate: that of the drafter at the width of the embedded target; narrower ones gained nothing
        from a higher one.
        A size that is given stays, and the others follow it.
        """

        def own(key: str, choice: float) -> Any:
            value = getattr(self, key)
            return choice if value == AUTO else value

        trained = max(1, round(num_tokens * self.epochs))
        if self.max_steps != AUTO and self.tokens_per_step != AUTO:
            trained = self.max_steps * self.tokens_per_step
        step = TOKENS_PER_STEP * (trained / TOKENS) ** GROWTH
        step = min(max(2 ** round(math.log2(step)), SMALLEST_STEP), LARGEST_STEP)
        step = own("tokens_per_step", step)
        steps = self.max_steps if self.max_steps != AUTO else num_steps(step, self.epochs)
        rate *= min(1.0, WIDTH / hidden_size) * min(1.0, (STEPS / steps) ** 0.5)
        return replace(
            self,
            tokens_per_step=step,
            max_steps=steps,
            lr=own("lr", float(f"{rate:.2g}")),
            warmup_steps=own("warmup_steps", round(WARM_UP * steps)),
            validate_every=own("validate_every", math.ceil(steps / 2)),
            save_every=own("save_every", math.ceil(steps / 2)),
        )

    def warm_up_note(self) -> str:
        """Return a line that says so where the run ends before its warm-up does, else nothing."""
        if self.warmup_steps <= self.max_steps:
            return ""
        return (
            f"trainer.warmup_steps={self.warmup_steps:,} are more than trainer.max_steps="
            f"{self.max_steps:,}: the learning rate reaches {self.lr_at(self.max_steps - 1):.2g}, "
            f"not trainer.lr={self.lr:g}; give fewer, or auto"
        )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` finished ones.

        Linear warm-up reaches `lr` with the last of `warmup_steps` updates; then "constant" stays
        there and "cosine" falls to `final_lr_ratio * lr` at `max_steps` (Loshchilov & Hutter 2017).
        The first update's rate is above zero, and the last one's above the final rate.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        final = self.final_lr_ratio
        if step >= self.max_steps:
            return final * self.lr
        progress = (step - self.warmup_steps) / (self.max_steps - self.warmup_steps)
        return self.lr * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
