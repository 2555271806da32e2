"""The engines that run DeepSpeed's ZeRO."""

import copy
import math
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.core.types import Losses
from drafttrain.runtime.deepspeed import import_deepspeed, quiet
from drafttrain.training.engine.config import DeepSpeedConfig
from drafttrain.training.engine.engine import Engine, Forward


class DeepSpeedEngine(Engine):
    """DeepSpeed with torch's AdamW, whole on every rank (ZeRO 0); subclasses shard.

    DeepSpeed runs in float32, with our autocast inside the forward: its own would reduce gradients
    in bfloat16. It averages over ranks, so losses are multiplied by the number of ranks.
    """

    def __init__(self, forward: Forward, *arguments: Any, config: DeepSpeedConfig) -> None:
        super().__init__(forward, *arguments)
        self._offloads = config.offloads_optimizer
        ours: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            # Steps have varying numbers of micro batches: `last` marks the boundary.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._max_grad_norm,
            "zero_force_ds_cpu_optimizer": False,
        }
        usual: dict[str, Any] = {}
        if config.stage == 3:
            # It would replace torch's linear everywhere, in the target too, and round differently.
            zero = {"memory_efficient_linear": False, **config.config["zero_optimization"]}
            ours["zero_optimization"] = zero
        exact: list[tuple[nn.Parameter, Tensor]] = []
        if self.low:
            ours["bf16"] = {"enabled": True, "check_grad_overflow": True}
            ours["data_types"] = {"grad_accum_dtype": "fp32"}
            # Sums over ranks are in float32, unless the user wants half the traffic.
            usual["communication_data_type"] = "fp32"
            exact = [(p, p.detach().clone()) for p in self._trainable.values()]
        self._library = import_deepspeed(self.ranks)
        with warnings.catch_warnings(action="ignore"):
            self._deepspeed, self._zero, _, _ = self._library.initialize(
                model=forward,
                optimizer=self._optimizer,
                config={**usual, **config.config, **ours},
                dist_init_required=False,
            )
        self._start_moments()
        for parameter, value in exact:  # DeepSpeed made its masters from rounded weights
            self._set_master(parameter, value)
        if config.stage in (1, 2):
            # Link each parameter to its shard of the moments. DeepSpeed would do it within the
            # first step, after the first parameter group only.
            self._zero._lazy_init_hp_params_optimizer_state()

    @quiet()
    def losses(self, *inputs: Any) -> Losses:
        return self._deepspeed(*inputs)[1]

    @quiet()
    def _backward(self, loss: Float[Tensor, ""], last: bool) -> None:
        if not loss.requires_grad:  # nothing to train here, but the other ranks wait for our zeros
            loss = self._reaching_all(loss)
        self._deepspeed.set_gradient_accumulation_boundary(last)
        self._deepspeed.backward(loss * self.world_size, scale_wrt_gas=False)

    def _update(self, norm: float) -> None:
        with quiet():
            self._deepspeed.step()
        assert self._deepspeed.was_step_applied(), f"DeepSpeed refused a step of norm {norm}"

    @quiet()
    def _forget(self) -> None:
        self._deepspeed.zero_grad()

    @quiet()
    def _set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        self._library.utils.safe_set_full_fp32_param(parameter, value)


class ZeroEngine(DeepSpeedEngine):
    """ZeRO 1 shards the optimizer's state, 2 gradients too; either may be in the host's memory."""

    @quiet()
    def _backward(self, loss: Float[Tensor, ""], last: bool) -> None:
        # In host memory DeepSpeed would step with stale gradients of parameters that the last micro
        # batch does not reach.
        super()._backward(self._reaching_all(loss) if self._offloads else loss, last)

    @quiet()
    def _grad_norm(self) -> float:
        norm = float(self._zero.scaled_global_norm())
        return norm if norm >= 0 else math.nan  # DeepSpeed's sign for a norm that is not finite

    @quiet()
    def _forget(self) -> None:
        self._deepspeed.step()  # it finds the same norm, takes no step and clears its buffers
        assert not self._deepspeed.was_step_applied(), "DeepSpeed took a step of no finite norm"
        super()._forget()

    @quiet()
    def _moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        return self._library.utils.safe_get_full_optimizer_state(parameter, moment)

    @quiet()
    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        self._library.utils.safe_set_full_optimizer_state(parameter, value, moment)

    @quiet()
    def _whole(self, value: Tensor) -> Tensor:
        if not (self.low and value.requires_grad):
            return super()._whole(value)
        return self._library.utils.safe_get_full_fp32_param(value)

    @quiet()
    def _set_whole(self, value: Tensor, whole: Tensor) -> None:
        super()._set_whole(value, whole)
        if isinstance(value, nn.Parameter) and value.requires_grad:
            self._set_master(value, whole)


class Zero3Engine(ZeroEngine):
    """ZeRO 3 shards the weights as well: each layer's are gathered while it computes.

    Gradients are added up in one buffer, which is emptied after each step: DeepSpeed only lets the
    first micro batch overwrite it, and would keep stale gradients that this batch does not reach.
    """

    def __init__(self, forward: Forward, *arguments: Any, **named: Any) -> None:
        # The module without its weights, for copies: it has no hooks of DeepSpeed yet.
        bare = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in forward.module.parameters()
        }
        self._bare = copy.deepcopy(forward.module, dict(bare))
        super().__init__(forward, *arguments, **named)

    def _gathered(
        self, parameters: list[nn.Parameter], writer: int | None = None
    ) -> AbstractContextManager[None]:
        # Within it every rank has whole weights; all ranks take the writer's changes.
        return self._library.zero.GatheredParameters(parameters, modifier_rank=writer)

    def _updated(self) -> list[Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    @quiet()
    def _backward(self, loss: Float[Tensor, ""], last: bool) -> None:
        # Always as if it were the last: gradients in host memory are then complete, too.
        if loss.requires_grad:
            return DeepSpeedEngine._backward(self, loss, True)
        with self._gathered(list(self._trainable.values())):
            return DeepSpeedEngine._backward(self, loss, True)

    @quiet()
    def _grad_norm(self) -> float:
        groups = [float(norm) for norm in self._zero._get_norm_groups()]
        # -1 is DeepSpeed's sign for a norm that is not finite.
        return math.nan if any(norm < 0 for norm in groups) else math.hypot(*groups)

    def _update(self, norm: float) -> None:
        super()._update(norm)
        self._empty_gradients()

    @quiet()
    def _forget(self) -> None:
        super()._forget()
        self._empty_gradients()

    def _empty_gradients(self) -> None:
        self._zero.grad_partitions_flat_buffer.zero_()
        for tensor in self._updated():
            if tensor.grad is not None:  # in host memory
                tensor.grad.zero_()

    @quiet()
    def _whole(self, value: Tensor) -> Tensor:
        if not isinstance(value, nn.Parameter) or value in self._frozen:
            return super()._whole(value)
        if value.requires_grad:
            return self._library.utils.safe_get_full_fp32_param(value)
        with self._gathered([value]):
            return value.detach().clone()

    @quiet()
    def _set_whole(self, value: Tensor, whole: Tensor) -> None:
        if not isinstance(value, nn.Parameter):
            value.copy_(whole)
            return
        with self._gathered([value], writer=0):
            Engine._set_whole(self, value, whole)
        if value.requires_grad:
            self._set_master(value, whole)

    def _shard(self, parameter: Any, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter's values, padded to the length of all parts."""
        size = parameter.partition_numel()
        padded = nn.functional.pad(whole.flatten(), (0, size * self.world_size - whole.numel()))
        return padded.narrow(0, size * self.rank, size)

    # By shards: with whole values DeepSpeed 0.19 fails if the ranks do not divide their number.
    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        self._library.utils.safe_set_local_optimizer_state(
            parameter, self._shard(parameter, value), moment
        )

    def _set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        self._library.utils.safe_set_local_fp32_param(parameter, self._shard(parameter, value))

    def whole_module(self) -> nn.Module:
        """Return a copy: the first layer that runs would shard weights gathered in place again."""
        return self.copy_of_module()

    @torch.no_grad()
    def copy_of_module(self) -> nn.Module:
        """Return a copy of the module with whole weights, on every rank."""
        twin = copy.deepcopy(self._bare)
        for bare, own in zip(list(twin.parameters()), self.module.parameters(), strict=True):
            value = self._result(own).detach().to(self.device, copy=True)
            whole = nn.Parameter(value, requires_grad=bare.requires_grad)
            for module in twin.modules():  # every place that it has: weights may be tied
                places = module._parameters
                places.update({key: whole for key, place in places.items() if place is bare})
        for theirs, buffer in zip(self.module.buffers(), twin.buffers(), strict=True):
            buffer.copy_(theirs)
        return twin
