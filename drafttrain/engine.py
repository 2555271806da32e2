"""Backward, step and clip behind one face: plain torch, or DeepSpeed's ZeRO; the only door to it.

The caller's losses are sums over positions divided by the positions of the *whole* optimizer step,
on all ranks and in all micro batches. So gradients are added up over both, and nothing is averaged.
"""

import math
import os
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.optim import MOMENTS, load_moments, parameter_groups, save_moments
from drafttrain.ranks import Ranks, join_ranks
from drafttrain.types import Losses

OPTIMIZER_FILE = "optimizer.safetensors"
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


class NonFiniteError(ValueError):
    """A loss or its gradient was inf or nan; the optimizer step was not taken."""


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


def build_engine(
    module: nn.Module,
    deepspeed: DeepSpeedConfig,
    *,
    device: str,
    dtype: torch.dtype,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
) -> "Engine":
    """Move `module` to its device, give every rank rank 0's weights, and build its optimizer.

    Weights and AdamW's moments (Loshchilov & Hutter 2019) are float32; with dtype bfloat16 the
    forward runs under autocast. max_grad_norm: largest global norm of the summed gradient; 0 is
    off. Parameters that do not require a gradient stay as they are.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        got = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"hardware.train_dtype must be float32 or bfloat16, got {got}; "
            "float16 would need its losses scaled: use bfloat16"
        )
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    assert trainable, "the module has nothing to train"
    for name, parameter in trainable.items():
        assert parameter.dtype == torch.float32, f"{name} is trained and must be float32"
    ranks = join_ranks(device, with_group=deepspeed.enabled)
    module.to(ranks.device)
    ranks.broadcast_in_place([p.data for p in module.parameters()] + list(module.buffers()))
    optimizer = torch.optim.AdamW(
        parameter_groups(module, weight_decay), lr=0.0, betas=betas, eps=eps
    )
    autocast = None if dtype == torch.float32 else dtype
    if deepspeed.enabled:
        return DeepSpeedEngine(module, optimizer, ranks, autocast, max_grad_norm, deepspeed.config)
    return PlainEngine(module, optimizer, ranks, autocast, max_grad_norm)


class Engine(ABC):
    """Trains one module; every method that is not a property is called by all ranks together."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.AdamW,
        ranks: Ranks,
        autocast: torch.dtype | None,
        max_grad_norm: float,
    ) -> None:
        self.module = module
        self.ranks = ranks
        self.steps_taken = 0
        self._optimizer = optimizer
        self._forward = _Forward(module, autocast)
        self._max_grad_norm = max_grad_norm
        self._trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._loss = torch.zeros((), device=ranks.device)

    rank = property(lambda self: self.ranks.rank)
    world_size = property(lambda self: self.ranks.world_size)
    is_main = property(lambda self: self.ranks.is_main)
    device = property(lambda self: self.ranks.device)
    precision = property(lambda self: self._forward.precision())  # a context: the forward's

    @abstractmethod
    def losses(self, *inputs: Any) -> Losses:
        """Run the module's forward on one micro batch."""

    def backward(self, loss: Float[Tensor, ""], last: bool) -> None:
        """Add the gradient of `loss`, already divided by the step's global denominator.

        last: whether this is the last micro batch of the step; every rank has equally many.
        """
        self._loss += loss.detach()
        if not loss.requires_grad:  # nothing to learn here, but the other ranks wait for our zeros
            loss = loss + sum(0.0 * p.sum() for p in self._trainable.values())
        # A loss that is not finite makes its gradient so, on every rank: one check finds both.
        self._backward(loss * (1 + 0 * loss.detach()), last)

    def step(self, lr: float) -> float:
        """Clip, update the weights and forget the gradient; return its global norm before clipping.

        Raises NonFiniteError on all ranks if a loss or the norm is not finite: then weights and
        optimizer state are as they were, and the gradient is forgotten.
        """
        norm = self._grad_norm()
        finite = math.isfinite(norm)
        loss = float("nan") if finite else float(self.ranks.sum_over_ranks(self._loss))
        self._loss.zero_()
        if not finite:
            self._forget()
            raise NonFiniteError(
                f"optimizer step {self.steps_taken} must have a finite loss and gradient, got loss "
                f"{loss:g} and gradient norm {norm:g}; the step was not taken and the weights are "
                "as before. Lower trainer.lr or trainer.max_grad_norm, or look at this step's "
                "conversations, then go on from the last checkpoint with run.resume=true"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._update(norm)
        self.steps_taken += 1
        return norm

    def save(self, folder: Path) -> None:
        """Write the optimizer's state to `folder`, the same whatever engine and however many ranks.

        One file, written by rank 0: the moments of each parameter, whole, and the step count.
        """
        moments = {}
        for name, parameter in self._trainable.items():
            for moment in MOMENTS:
                value = self._moment(parameter, moment)
                if self.is_main:  # the others take part in gathering it, and keep nothing
                    moments[f"{moment}.{name}"] = value.detach().cpu()
        if self.is_main:
            save_moments(folder / OPTIMIZER_FILE, self.steps_taken, moments)

    def load(self, folder: Path) -> None:
        """Take the optimizer's state from what `save` wrote, and the weights from the module.

        Call it after the module's weights were loaded. Raises ValueError if the file is of another
        set of parameters.
        """
        shapes = {f"{m}.{name}": p.shape for name, p in self._trainable.items() for m in MOMENTS}
        self.steps_taken, moments = load_moments(folder / OPTIMIZER_FILE, shapes)
        for name, parameter in self._trainable.items():
            for moment in MOMENTS:
                value = moments.pop(f"{moment}.{name}").to(self.device)
                self._set_moment(parameter, moment, value)
        for state in self._optimizer.state.values():
            state["step"].fill_(self.steps_taken)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.ranks.barrier()

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of every rank's `value`."""
        return self.ranks.sum_over_ranks(value)

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._trainable.values() if p.grad is not None]

    def _start_moments(self) -> None:
        # As AdamW's first step would, but at once: they can then be saved and loaded at any time.
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
                }

    @abstractmethod
    def _backward(self, loss: Float[Tensor, ""], last: bool) -> None: ...

    @abstractmethod
    def _update(self, norm: float) -> None: ...

    def _grad_norm(self) -> float:
        return float(nn.utils.get_total_norm(self._grads()))

    def _forget(self) -> None:
        self._optimizer.zero_grad()

    def _moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        return self._optimizer.state[parameter][moment]

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        self._optimizer.state[parameter][moment].copy_(value)


class PlainEngine(Engine):
    """Plain torch; several ranks add up their gradients once per step, by all-reduce."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._start_moments()

    def losses(self, *inputs: Any) -> Losses:
        """Run the module's forward on one micro batch."""
        return self._forward(*inputs)[1]

    def _backward(self, loss: Float[Tensor, ""], last: bool) -> None:
        loss.backward()
        if not last:
            return
        for parameter in self._trainable.values():
            if parameter.grad is None:  # unused here, perhaps used by another rank
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.sum_in_place(self._grads())

    def _update(self, norm: float) -> None:
        if self._max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(
                self._trainable.values(), self._max_grad_norm, torch.tensor(norm)
            )
        self._optimizer.step()
        self._forget()


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
        deepspeed = _import_deepspeed(ranks)
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


class _Forward(nn.Module):
    """The module under autocast; hands the loss tensors out in the open, where DeepSpeed looks."""

    def __init__(self, module: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.autocast = autocast

    def precision(self) -> AbstractContextManager[Any]:
        device = next(self.module.parameters()).device.type
        return torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)

    def forward(self, *inputs: Any) -> tuple[list[Tensor], Losses]:
        with self.precision():
            losses = self.module(*inputs)
        return [term.sum for term in losses.values()], losses


def _import_deepspeed(ranks: Ranks) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # asked for even of a single process
    with warnings.catch_warnings(action="ignore"):
        import deepspeed

    if ranks.device.type == "cpu":
        # It would compile a faster all-reduce for CPUs, which needs a C++ compiler and a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
