"""The description of a run that its plan is made from."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from drafttrain.drafters.base import DrafterConfig
from drafttrain.plan.accelerator import Accelerator
from drafttrain.plan.config import PlanSettings
from drafttrain.plan.shapes import Shape, inflated, settings_of, shape_of
from drafttrain.plan.trace import DrafterCost, Load, trace
from drafttrain.runtime.config import HardwareConfig
from drafttrain.target.pretrained.config import ModelConfig


@dataclass(frozen=True)
class Job:
    """The description of a run that its plan is made from."""

    target: str
    drafter: str
    shape: Shape
    parts: DrafterCost
    knobs: tuple[str, ...]  # the drafter's settings
    load: Load
    chip: Accelerator
    max_steps: int
    data_tokens: int | None  # different ones, at most; None: not known without the data
    target_bytes: float
    price_per_hour: float

    @property
    def trained_tokens(self) -> int:
        """Tokens that training reads, counted anew in every epoch."""
        return self.max_steps * self.load.tokens_per_step

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's features."""
        return feature_bytes(self.parts.captures, self.shape.hidden_size, self.load.width)

    @property
    def machine(self) -> str:
        """The name of what has the memory, for messages."""
        return "this machine" if self.chip.is_cpu else f"each {self.chip.name}"


def feature_bytes(captures: Sequence[int], hidden_size: int, dtype_bytes: int) -> int:
    """Return the bytes of one token's features: the captured layers and the final hidden state."""
    return (len(captures) + 1) * hidden_size * dtype_bytes


def describe_job(
    model: ModelConfig,
    drafter: DrafterConfig,
    hardware: HardwareConfig,
    settings: PlanSettings,
    chip: Accelerator,
    *,
    dtype: str,
    ranks: int,
    ranks_here: int,
    max_length: int,
    conversations: int | None,
    max_steps: int,
    tokens_per_step: int,
    averaged: bool,
) -> Job:
    """Count target and drafter. UnknownCostError where the target's architecture is not known.

    ranks_here: the ranks of the run that share a machine, and on a CPU its memory.
    max_length: of the data's conversations, in tokens. conversations: their greatest number, None
    where only reading the data would tell.
    """
    plain = shape_of(model)
    length = settings.length or min(max_length, plain.max_positions)
    shape = inflated(model, plain)
    load = Load(
        # A step with fewer tokens than its micro batches hold has fewer rows in each.
        rows=max(1, min(hardware.micro_batch, -(-tokens_per_step // (length * ranks)))),
        length=length,
        ranks=ranks,
        ranks_here=ranks_here,
        tokens_per_step=tokens_per_step,
        loss_share=settings.loss_share,
        dtype=dtype,
        checkpointing=hardware.gradient_checkpointing,
        low=hardware.weights_dtype == "bfloat16",
        on_cpu=chip.is_cpu,
        averaged=averaged,
    )
    price = chip.price_per_hour if settings.price_per_hour is None else settings.price_per_hour
    return Job(
        target=model.label,
        drafter=drafter.name,
        shape=shape,
        parts=trace(drafter, plain, lambda: settings_of(model), load),
        knobs=tuple(field.name for field in fields(drafter)),
        load=load,
        chip=chip,
        max_steps=max_steps,
        data_tokens=None if conversations is None else conversations * length,
        target_bytes=shape.bytes(load.width, model.quantization),
        price_per_hour=price,
    )
