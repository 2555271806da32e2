"""The section `deepspeed`: whether DeepSpeed carries the optimizer, and its own keys."""

from dataclasses import dataclass
from typing import Any

# DeepSpeed's keys that follow from settings of ours: set twice, they could disagree.
DERIVED_KEYS = {
    "train_batch_size": "trainer.tokens_per_step",
    "train_micro_batch_size_per_gpu": "hardware.micro_batch",
    "gradient_accumulation_steps": "trainer.tokens_per_step and hardware.micro_batch",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.lr, trainer.beta1, trainer.beta2 and trainer.weight_decay",
    "scheduler": "trainer.schedule and trainer.warmup_steps",
    "fp16": "hardware.train_dtype",
    "bf16": "hardware.train_dtype",
    "bfloat16": "hardware.train_dtype",
    "torch_autocast": "hardware.train_dtype",
    "amp": "hardware.train_dtype",
    "data_types": "hardware.train_dtype",
    "prescale_gradients": "nothing: gradients are summed, never averaged",
    "gradient_predivide_factor": "nothing: gradients are summed, never averaged",
    "gradient_allreduce_op": "nothing: gradients are summed, never averaged",
    "wandb": "tracker",
    "tensorboard": "tracker",
    "comet": "tracker",
    "csv_monitor": "tracker",
}


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Whether DeepSpeed carries the optimizer, and its own keys, less those derived from ours."""

    name: str
    enabled: bool
    config: dict[str, Any]

    def __post_init__(self) -> None:
        for key, ours in DERIVED_KEYS.items():
            if key in self.config:
                raise ValueError(
                    f"deepspeed.config.{key} must not be set, got {self.config[key]}; "
                    f"it follows from this program's own settings: use {ours} instead"
                )
        zero = self.config.get("zero_optimization", {})
        if zero.get("stage", 0) not in (0, 1, 2):
            raise ValueError(
                "deepspeed.config.zero_optimization.stage must be 0, 1 or 2, got "
                f"{zero['stage']}; use deepspeed=zero2, which shards gradients and optimizer"
            )
        for key in ("offload_optimizer", "offload_param", "zenflow"):
            if zero.get(key) is not None:
                raise ValueError(
                    f"deepspeed.config.zero_optimization.{key} must not be set, got {zero[key]}; "
                    "a drafter's optimizer stays on the GPU: use deepspeed=zero2 on more ranks"
                )
        if self.config and not self.enabled:
            raise ValueError(
                f"deepspeed.enabled must be true when deepspeed.config has keys, got "
                f"{', '.join(self.config)}; use deepspeed=zero1 or empty deepspeed.config"
            )
