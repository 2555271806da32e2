"""Backward, step and clip behind one face, and plain torch behind it.

The caller's losses are sums over positions divided by the positions of the *whole* optimizer step,
on all ranks and in all micro batches. So gradients are added up over both, and nothing is averaged.
"""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.engine.config import DeepSpeedConfig
from drafttrain.optim import MOMENTS, load_moments, parameter_groups, save_moments
from drafttrain.ranks import Ranks, join_ranks
from drafttrain.types import Losses

OPTIMIZER_FILE = "optimizer.safetensors"


class NonFiniteError(ValueError):
    """A loss or its gradient was inf or nan; the optimizer step was not taken."""


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
        from drafttrain.engine.deepspeed import DeepSpeedEngine

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
