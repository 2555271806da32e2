"""The settings of the training loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from drafttrain.runtime import limits
from drafttrain.runtime.settings import AUTO, Limit, Settings

PROMPTS = Limit(
    "be at least 1, or a file of prompts",
    lambda n: n > 0 if type(n) is int else bool(n) and isinstance(n, str),
)
EPOCHS = limits.or_auto("be above 0 and at most 1,000,000", lambda n: 0 < n <= 1e6, int, float)
SIZES = ("max_steps", "tokens_per_step", "lr", "warmup_steps", "validate_every", "save_every")
# The most epochs of `auto`, and the most tokens, unless one epoch has more: 3.2 million of a chat
# model's answers, read once, taught as much as a quarter of them in three (benchmarks/README.md).
MOST_EPOCHS, MOST_READ = 3.0, 2_400_000
# What a search found best for drafters of targets 384 wide: benchmarks/README.md. From there to the
# published sizes of real targets, 65,536 tokens a step for 1.3 billion, leads a power of 0.6.
TOKENS, TOKENS_PER_STEP, GROWTH = 400_000, 512, 0.6
# The target that the drafters' rates were found with, and the most steps that they suit: from there
# the rate falls by the square root, which leads to the 1e-4 that EAGLE-3 of 8B is published with.
WIDTH, STEPS = 384, 400
SMALLEST_STEP, LARGEST_STEP = 256, 65_536
WARM_UP = 0.05  # of the steps


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Settings):
    """How long and how fast to train, and when to log, validate and save.

    The numbers of SIZES are `auto` until `sized` has chosen them.
    """

    section = "trainer"

    name: str
    epochs: Annotated[Any, EPOCHS]
    max_steps: limits.CountOrAuto
    tokens_per_step: limits.CountOrAuto
    lr: Annotated[Any, limits.or_auto("be a number above 0", lambda rate: rate > 0, int, float)]
    schedule: Annotated[str, limits.one_of("cosine", "constant")]
    warmup_steps: Annotated[Any, limits.or_auto("be a whole number", lambda n: n >= 0, int)]
    final_lr_ratio: limits.Fraction
    weight_decay: limits.NonNegativeFloat
    beta1: limits.FractionBelow1
    beta2: limits.FractionBelow1
    ema_decay: limits.FractionBelow1
    max_grad_norm: limits.PositiveFloat
    log_every: limits.PositiveInt
    validate_every: limits.CountOrAuto
    validation_prompts: Annotated[Any, PROMPTS]
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

        epochs = own("epochs", min(MOST_EPOCHS, max(1.0, round(MOST_READ / max(num_tokens, 1), 1))))
        trained = max(1, round(num_tokens * epochs))
        if self.max_steps != AUTO and self.tokens_per_step != AUTO:
            trained = self.max_steps * self.tokens_per_step
        step = TOKENS_PER_STEP * (trained / TOKENS) ** GROWTH
        step = min(max(2 ** round(math.log2(step)), SMALLEST_STEP), LARGEST_STEP)
        step = own("tokens_per_step", step)
        steps = self.max_steps if self.max_steps != AUTO else num_steps(step, epochs)
        rate *= min(1.0, WIDTH / hidden_size) * min(1.0, (STEPS / steps) ** 0.5)
        return replace(
            self,
            epochs=epochs,
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
