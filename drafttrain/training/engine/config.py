"""The sections `deepspeed` (whether it runs the optimizer, and its own keys) and `optimizer`."""

from dataclasses import dataclass
from typing import Any

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Settings, require

DTYPE = "hardware.train_dtype"
SUMMED = "nothing: gradients are summed, never averaged"
# DeepSpeed's keys that follow from our settings: set twice, they could disagree.
DERIVED_KEYS = {
    "train_batch_size": "trainer.tokens_per_step",
    "train_micro_batch_size_per_gpu": "hardware.micro_batch",
    "gradient_accumulation_steps": "trainer.tokens_per_step and hardware.micro_batch",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.lr, trainer.beta1, trainer.beta2 and trainer.weight_decay",
    "scheduler": "trainer.schedule and trainer.warmup_steps",
    **dict.fromkeys(("fp16", "torch_autocast", "amp", "data_types"), DTYPE),
    **dict.fromkeys(("bf16", "bfloat16"), f"{DTYPE} and hardware.weights_dtype"),
    "zero_force_ds_cpu_optimizer": "nothing: the optimizer is torch's AdamW, on the CPU as well",
    "prescale_gradients": SUMMED,
    "gradient_predivide_factor": SUMMED,
    "gradient_allreduce_op": SUMMED,
    **dict.fromkeys(("wandb", "tensorboard", "comet", "csv_monitor"), "tracker"),
}


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Whether DeepSpeed runs the optimizer, and its own keys, except those derived from ours."""

    name: str
    enabled: bool
    config: dict[str, Any]

    def __post_init__(self) -> None:
        for key, ours in DERIVED_KEYS.items():
            given = self.config.get(key)
            why = f"; it follows from this program's own settings: use {ours} instead"
            require(key not in self.config, f"deepspeed.config.{key}", "not be set", given, why)
        keys, need = ", ".join(self.config), "be true when deepspeed.config has keys"
        use = "; use deepspeed=zero1 or empty deepspeed.config"
        require(self.enabled or not self.config, "deepspeed.enabled", need, keys, use)
        place = "deepspeed.config.zero_optimization"
        for key in ("", "offload_optimizer", "offload_param"):
            part = self.zero.get(key) if key else self.config.get("zero_optimization")
            fits = part is None or isinstance(part, dict)
            require(fits, f"{place}.{key}".rstrip("."), "be keys with values", part)
        use = "; use deepspeed=zero2, which shards gradients and optimizer"
        require(self.stage in (0, 1, 2, 3), f"{place}.stage", "be 0, 1, 2 or 3", self.stage, use)
        for key, lowest, use in (
            ("offload_optimizer", 1, "zero2_offload"),
            ("offload_param", 3, "zero3_offload"),
        ):
            device = self._offload(key)
            known, where = device in ("none", "cpu"), f"{place}.{key}.device"
            why = f"; a drafter's state fits the host's memory: use deepspeed={use}"
            require(known, where, "be none or cpu", device, why)
            if device == "cpu" and self.stage < lowest:
                raise ValueError(
                    f"{place}.{key} needs stage {lowest} or above, got {self.stage}; "
                    f"use deepspeed={use}"
                )
        zenflow, use = self.zero.get("zenflow"), "use deepspeed=zero2_offload"
        why = f": it updates weights late, and no checkpoint would be exact; {use}"
        require(zenflow is None, f"{place}.zenflow", "not be set", zenflow, why)

    @property
    def zero(self) -> dict[str, Any]:
        """DeepSpeed's own settings of ZeRO."""
        return self.config.get("zero_optimization") or {}

    def _offload(self, key: str) -> str:
        return str((self.zero.get(key) or {}).get("device") or "none")

    @property
    def stage(self) -> int:
        """ZeRO's stage, which shards over ranks: 1 moments, 2 gradients too, 3 weights too."""
        return self.zero.get("stage", 0)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether moments and masters are in the host's memory, and updated there."""
        return self._offload("offload_optimizer") == "cpu"

    @property
    def offloads_weights(self) -> bool:
        """Whether the shards of the weights are in the host's memory."""
        return self._offload("offload_param") == "cpu"

    def check_low_weights(self) -> None:
        """Raise ValueError if weights cannot be in bfloat16 with masters in float32."""
        if self.enabled and self.stage < 2:
            why = "below ZeRO 2 DeepSpeed shards no masters"
        elif self.stage == 2 and self.offloads_optimizer:
            why = "DeepSpeed would add up gradients in bfloat16 in the host's memory"
        else:
            return
        raise ValueError(
            f"hardware.weights_dtype must be float32 with deepspeed={self.name}, got bfloat16: "
            f"{why}; use deepspeed=zero2, zero3 or zero3_offload"
        )

    def check_compiled(self) -> None:
        """Raise ValueError if compiled layers would not see their weights."""
        need = f"be false with deepspeed={self.name}"
        why = ": ZeRO 3 gathers weights between the parts of a layer; use deepspeed=zero2"
        require(self.stage != 3, "hardware.compile", need, "true", why)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Settings):
    """Which optimizer updates the weights; its learning rate and decay are the trainer's."""

    section = "optimizer"

    name: str
    muon: bool
    momentum: limits.FractionBelow1

    def check(self, deepspeed: DeepSpeedConfig) -> None:
        """Raise ValueError if the engine cannot run this optimizer."""
        if self.muon and deepspeed.enabled:
            raise ValueError(
                f"optimizer must be adamw with deepspeed={deepspeed.name}, got {self.name}: Muon "
                "needs whole matrices, which DeepSpeed cuts; use deepspeed=none or optimizer=adamw"
            )


ADAMW = OptimizerConfig(name="adamw", muon=False, momentum=0.0)
