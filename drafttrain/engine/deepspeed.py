"""DeepSpeed's ZeRO behind the same face; the only door to it."""

import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.engine.engine import Engine
from drafttrain.ranks import Ranks
from drafttrain.types import Losses


def import_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed (seconds, the first time), told where these ranks compute."""
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # asked for even of a single process
    with warnings.catch_warnings(action="ignore"):
        import deepspeed

    if ranks.device.type == "cpu":
        # It would compile a faster all-reduce for CPUs, which needs a C++ compiler and a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedEngine(Engine):
    """DeepSpeed with torch's AdamW: ZeRO 0 copies, 1 shards the optimizer, 2 gradients too.

    DeepSpeed runs in float32 and autocast is ours, inside the forward: its own would reduce
    gradients in bfloat16. It averages over ranks, so losses are multiplied by their number.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.AdamW,
        ranks: Ranks,
        autocast: torch.dtype | None,
        max_grad_norm: float,
        config: dict[str, Any],
    ) -> None:
        super().__init__(module, optimizer, ranks, autocast, max_grad_norm)
        ours = {
            "train_micro_batch_size_per_gpu": 1,
            # Steps have varying numbers of micro batches: `last` marks the boundary instead.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_grad_norm,
        }
        deepspeed = import_deepspeed(ranks)
        with warnings.catch_warnings(action="ignore"):
            self._deepspeed, self._zero, _, _ = deepspeed.initialize(
                model=self._forward,
                optimizer=optimizer,
                config={**config, **ours},
                dist_init_required=False,
            )
        self._sharded = self._deepspeed.zero_optimization_stage() > 0
        self._start_moments()
        if self._sharded:
            # Links each parameter to its shard of the moments. DeepSpeed would do it within the
            # first step, after the first parameter group only.
            self._zero._lazy_init_hp_params_optimizer_state()

    def losses(self, *inputs: Any) -> Losses:
        """Run the module's forward on one micro batch."""
        return self._deepspeed(*inputs)[1]

    def _backward(self, loss: Float[Tensor, ""], last: bool) -> None:
        self._deepspeed.set_gradient_accumulation_boundary(last)
        with warnings.catch_warnings(action="ignore"):
            self._deepspeed.backward(loss * self.world_size, scale_wrt_gas=False)

    def _grad_norm(self) -> float:
        if not self._sharded:
            return super()._grad_norm()
        norm = float(self._zero.scaled_global_norm())
        return norm if norm >= 0 else math.nan  # DeepSpeed's mark of a norm that is not finite

    def _update(self, norm: float) -> None:
        with warnings.catch_warnings(action="ignore"):
            self._deepspeed.step()
        assert self._deepspeed.was_step_applied(), f"DeepSpeed refused a step of norm {norm}"

    def _forget(self) -> None:
        if self._sharded:  # its step finds the same norm, takes no step and clears its buffers
            self._deepspeed.step()
            assert not self._deepspeed.was_step_applied(), "DeepSpeed took a step of no finite norm"
        self._deepspeed.zero_grad()

    def _moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        if not self._sharded:
            return super()._moment(parameter, moment)
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, moment)

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        if not self._sharded:
            return super()._set_moment(parameter, moment, value)
        from deepspeed.utils import safe_set_full_optimizer_state

        return safe_set_full_optimizer_state(parameter, value, moment)

    def load(self, folder: Path) -> None:
        """Take optimizer state and weights; ZeRO's shards are copies of the module's weights."""
        super().load(folder)
        if self._sharded:
            self._zero.refresh_fp32_params()
