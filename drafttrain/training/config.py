"""How long and how fast to train."""

from dataclasses import dataclass

from drafttrain.training.schedule import SCHEDULES, lr_at


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and how fast to train, and when to look and save."""

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
    max_grad_norm: float
    log_every: int
    validate_every: int
    validation_prompts: int
    validation_tokens: int
    save_every: int
    keep_checkpoints: int

    def __post_init__(self) -> None:
        for key in ("max_steps", "tokens_per_step", "log_every", "validate_every", "save_every"):
            _require(key, getattr(self, key) >= 1, "at least 1", getattr(self, key))
        for key in ("validation_prompts", "validation_tokens", "keep_checkpoints"):
            _require(key, getattr(self, key) >= 1, "at least 1", getattr(self, key))
        for key in ("lr", "max_grad_norm"):
            _require(key, getattr(self, key) > 0, "above 0", getattr(self, key))
        for key in ("warmup_steps", "weight_decay"):
            _require(key, getattr(self, key) >= 0, "at least 0", getattr(self, key))
        for key in ("beta1", "beta2"):
            _require(key, 0 <= getattr(self, key) < 1, "in [0, 1)", getattr(self, key))
        _require("final_lr_ratio", 0 <= self.final_lr_ratio <= 1, "in [0, 1]", self.final_lr_ratio)
        _require(
            "schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}", self.schedule
        )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, from 0."""
        return lr_at(
            step,
            peak=self.lr,
            warmup_steps=self.warmup_steps,
            total_steps=self.max_steps,
            final_ratio=self.final_lr_ratio,
            schedule=self.schedule,
        )


def _require(key: str, holds: bool, what: str, got: object) -> None:
    if not holds:
        raise ValueError(f"trainer.{key} must be {what}, got {got}")
