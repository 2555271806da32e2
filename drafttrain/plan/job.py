"""The description of a run that its plan is made from."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.plan.accelerator import Accelerator
from drafttrain.plan.shapes import Shape
from drafttrain.plan.trace import DrafterCost, Load
from drafttrain.target.placement import TARGET_SHARE, Placement


@dataclass(frozen=True)
class Job:
    """The description of a run that its plan is made from."""

    target: str
    drafter: str
    shape: Shape
    parts: DrafterCost
    load: Load
    chip: Accelerator
    max_steps: int
    muon: bool  # else AdamW updates every weight
    data_tokens: int | None  # different ones, at most; None: not known without the data
    target_bytes: float
    placement: Placement  # of the target in the training processes, as the run chooses it
    gpus: int  # accelerators over which one process can spread the target
    maps: int  # processes that spread it, each its own copy
    host_room: float  # bytes of the host for layers that fit on no accelerator
    engine_bytes: float  # that vLLM takes of each accelerator, where the target is placed there
    price_per_hour: float
    origin: str  # of the target's weights on the Hub, with what they need; "" where they are here
    checkpoints: int  # on the disk: those that are kept, and the best

    @property
    def trained_tokens(self) -> int:
        """Tokens that training reads, counted anew in every epoch."""
        return self.max_steps * self.load.tokens_per_step

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's features."""
        return feature_bytes(self.parts.captures, self.shape.hidden_size, self.load.width)

    @property
    def spread(self) -> tuple[float, float]:
        """Bytes of a spread target on each accelerator, and on the host (a CPU's: on the disk)."""
        gpus = self.gpus if self.maps == 1 else 1
        each = min(self.target_bytes / gpus, TARGET_SHARE * self.chip.memory)
        return each, (self.target_bytes - gpus * each) * self.maps

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint: weights and the optimizer's state, in float32."""
        parts = self.parts
        moments = 2 * parts.num_trained - (parts.num_muon if self.muon else 0)
        saved = parts.num_parameters + parts.num_kept
        return 4.0 * (saved + moments + parts.num_trained * self.load.averaged)

    @property
    def machine(self) -> str:
        """The name of what has the memory, for messages."""
        return "this machine" if self.chip.is_cpu else f"each {self.chip.name}"


def feature_bytes(captures: Sequence[int], hidden_size: int, dtype_bytes: int) -> int:
    """Return the bytes of one token's features: the captured layers and the final hidden state."""
    return (len(captures) + 1) * hidden_size * dtype_bytes
