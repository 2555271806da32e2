"""The settings of the training loop."""

import math
from dataclasses import dataclass

from drafttrain.runtime.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Settings):
    """How long and how fast to train, and when to log, validate and save."""

    section = "trainer"

    name: str
    max_steps: int
    tokens_per_step: int
    lr: float
    schedule: str
    warmup_steps: int
    final_lr_ratio: float
    weight_decay: float
    beta1: float
    beta2: float
    ema_decay: float
    max_grad_norm: float
    log_every: int
    validate_every: int
    validation_prompts: int
    validation_tokens: int
    save_every: int
    keep_checkpoints: int

    def __post_init__(self) -> None:
        at_least_1 = (
            *("max_steps", "tokens_per_step", "log_every", "validate_every", "save_every"),
            *("validation_prompts", "validation_tokens", "keep_checkpoints"),
        )
        for key in at_least_1:
            self.require(key, getattr(self, key) >= 1, "be at least 1")
        for key in ("lr", "max_grad_norm"):
            self.require(key, getattr(self, key) > 0, "be above 0")
        for key in ("warmup_steps", "weight_decay"):
            self.require(key, getattr(self, key) >= 0, "be at least 0")
        for key in ("beta1", "beta2", "ema_decay"):
            self.require(key, 0 <= getattr(self, key) < 1, "be in [0, 1)")
        self.require("final_lr_ratio", 0 <= self.final_lr_ratio <= 1, "be in [0, 1]")
        known = ("cosine", "constant")
        self.require("schedule", self.schedule in known, f"be one of {', '.join(known)}")

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
