"""The interface of the engines: backward, step and clip.

Losses are divided by the positions of the *whole* optimizer step, on all ranks and in all micro
batches: gradients are added up over both, and nothing is averaged.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.core.ops.layer_calls import LayerCalls
from drafttrain.core.types import Losses
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.untrusted_input import header_of, shown

OPTIMIZER_FILE = "optimizer.safetensors"
# What an optimizer keeps for each parameter, besides the step.
ADAMW_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
AVERAGE = "average"  # of the parameter's values after each step; kept beside the moments


class NonFiniteError(ValueError):
    """A loss or its gradient was inf or nan; the optimizer step was not taken."""


class Engine(ABC):
    """Trains one module; every method that is not a property is called by all ranks together.

    With an `ema_decay` the result of training, which `weights` and `copy_of_module` return, is an
    exponential moving average of the weights after each step. The first steps weigh more: the
    average after a step that t others came before has the decay min(ema_decay, t / (t + 9)), so
    that it forgets the start.
    """

    def __init__(
        self,
        forward: "Forward",
        optimizer: Any,  # torch's, or what is used as one
        ranks: Ranks,
        max_grad_norm: float,
        low: bool,
        ema_decay: float,
    ) -> None:
        self.module, self.ranks, self.steps_taken = forward.module, ranks, 0
        self.low = low  # whether the module holds its trained weights in bfloat16
        self._forward, self._optimizer, self._max_grad_norm = forward, optimizer, max_grad_norm
        self._ema_decay = ema_decay
        self._trainable = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        kept = self._names_kept()
        self._kept = {name: kept(parameter) for name, parameter in self._trainable.items()}
        # Weights that are not trained have no master: their originals, for checkpoints and copies.
        self._frozen: dict[Tensor, Tensor] = {}
        if low:
            frozen = [p for p in self.module.parameters() if not p.requires_grad]
            self._frozen = {p: p.detach().to("cpu", copy=True) for p in frozen}
        self._loss = torch.zeros((), device=ranks.device)

    rank = property(lambda self: self.ranks.rank)
    world_size = property(lambda self: self.ranks.world_size)
    is_main = property(lambda self: self.ranks.is_main)
    device = property(lambda self: self.ranks.device)
    dtype = property(lambda self: self._forward.autocast or torch.float32)  # of its products
    precision = property(lambda self: self._forward.precision())  # a context: the forward's

    def losses(self, *inputs: Any) -> Losses:
        """Return the losses of the module's forward on one micro batch."""
        return self._forward(*inputs)[1]

    def backward(self, loss: Float[Tensor, ""], last: bool) -> None:
        """Add the gradient of `loss`, already divided by the step's global denominator.

        last: whether this is the last micro batch of the step; every rank has equally many.
        """
        self._loss += loss.detach()
        # A loss that is not finite makes its gradient so too, on every rank: one check is enough.
        self._backward(loss * (1 + 0 * loss.detach()), last)

    def step(self, lr: float) -> float:
        """Clip, update the weights and clear the gradient; return its global norm before clipping.

        Raises NonFiniteError on all ranks if a loss or the norm is not finite: then weights and
        optimizer state are unchanged, and the gradient is cleared.
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
                "conversations, then resume from the last checkpoint with run.resume=true"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._update(norm)
        if self._ema_decay:
            self._take_average()
        self.steps_taken += 1
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Return the module's whole state dict, in float32, as copies on rank 0's CPU.

        The other ranks take part in gathering it, and get an empty one.
        """
        values = self.module.state_dict(keep_vars=True).items()
        wholes = ((name, self._result(value)) for name, value in values)
        return {n: whole.detach().to("cpu", copy=True) for n, whole in wholes if self.is_main}

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Load a state dict of `weights`, given on every rank: masters and averages have it too.

        Raises ValueError naming what is missing, unknown or misshapen; then nothing has changed.
        """
        own = self.module.state_dict(keep_vars=True)
        if wrong := differences(tensors, own):
            raise ValueError(wrong)
        for name, value in own.items():
            self._set_whole(value, tensors[name].to(self.device))
        if self._ema_decay:
            for name, parameter in self._trainable.items():
                self._set_moment(parameter, AVERAGE, tensors[name].to(self.device))

    def whole_module(self) -> nn.Module:
        """Return the module with whole weights on every rank, for reading only, and briefly."""
        return self.module

    @torch.no_grad()
    def copy_of_module(self) -> nn.Module:
        """Return a copy of the module with whole weights: averages, or the masters' values."""
        twin = copy.deepcopy(self.module)
        if self.low or self._ema_decay:
            own = dict(self.module.named_parameters())
            for name, parameter in twin.named_parameters():
                parameter.data = self._result(own[name]).detach().to(self.device, copy=True)
        return twin

    def save(self, folder: Path) -> None:
        """Write the optimizer's state to `folder`, the same for every engine and number of ranks.

        Rank 0 writes one file: the finished steps ("step"), and the whole moments. Where `weights`
        are averages, also the values that training goes on from.
        """
        tensors = {"step": torch.tensor(self.steps_taken)}
        for key, (name, moment) in self._saved().items():
            parameter = self._trainable[name]
            own = moment == AVERAGE
            value = self._whole(parameter) if own else self._moment(parameter, moment)
            if self.is_main:  # the others take part in gathering it, and keep nothing
                tensors[key] = value.detach().cpu().contiguous()
        if self.is_main:
            save_file(tensors, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Load the optimizer's state that `save` wrote; `load_weights` loads the weights.

        Raises ValueError if the file is of another set of parameters.
        """
        path = folder / OPTIMIZER_FILE
        steps = header_of(path).get("step")
        if steps is None or (steps.dtype, steps.shape) != ("I64", []):
            raise ValueError(
                f"{path} must hold the finished steps (step, one integer), and does not"
            )
        moments = load_file(path)
        step = int(moments.pop("step"))
        saved = self._saved()
        expected = {key: self._trainable[name] for key, (name, _) in saved.items()}
        wrong = differences(moments, expected) or (f"step is {step}" if step < 0 else "")
        if wrong:
            raise ValueError(
                f"{path} must hold the optimizer state of this drafter, got another's: {wrong}; "
                "resume with the settings that the run was started with"
            )
        self.steps_taken = step
        for key, (name, moment) in saved.items():
            value = moments.pop(key).to(self.device)
            if moment == AVERAGE:
                with torch.no_grad():
                    self._set_whole(self._trainable[name], value)
            else:
                self._set_moment(self._trainable[name], moment, value)
        for state in self._optimizer.state.values():
            state["step"].fill_(self.steps_taken)

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._trainable.values() if p.grad is not None]

    def _reaching_all(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the loss with a gradient of zero for every trained parameter."""
        return loss + sum(0.0 * p.sum() for p in self._trainable.values())

    def _start_moments(self) -> None:
        # As in the optimizer's first step, but earlier: they can then be saved and loaded at any
        # time.
        kept = self._names_kept()
        for tensor in self._updated():
            zeros = {moment: torch.zeros_like(tensor) for moment in kept(tensor)}
            self._optimizer.state[tensor] = {"step": torch.tensor(0.0), **zeros}
            if self._ema_decay:
                zeros[AVERAGE].copy_(tensor.detach())

    def _names_kept(self) -> Callable[[Tensor], tuple[str, ...]]:
        """Return a function that names what is kept for each of the tensors to update."""
        average = (AVERAGE,) if self._ema_decay else ()
        groups = self._optimizer.param_groups
        muons = {t for group in groups if "momentum" in group for t in group["params"]}
        return lambda tensor: (MUON_MOMENTS if tensor in muons else ADAMW_MOMENTS) + average

    def _saved(self) -> dict[str, tuple[str, str]]:
        """Return parameter and moment by their name in the file of the optimizer's state.

        In place of an average, which `weights` has, the file holds the values themselves.
        """
        return {
            f"{'value' if moment == AVERAGE else moment}.{name}": (name, moment)
            for name in self._trainable
            for moment in self._kept[name]
        }

    @torch.no_grad()
    def _take_average(self) -> None:
        step = self.steps_taken
        decay = min(self._ema_decay, step / (step + 9))
        for tensor in self._updated():
            self._optimizer.state[tensor][AVERAGE].lerp_(tensor, 1 - decay)

    def _updated(self) -> list[Tensor]:
        """Return the tensors that the optimizer updates on this rank."""
        return [tensor for group in self._optimizer.param_groups for tensor in group["params"]]

    def _whole(self, value: Tensor) -> Tensor:
        """Return a value of the state dict, whole and in its trained precision."""
        return self._frozen.get(value, value)

    def _result(self, value: Tensor) -> Tensor:
        """Return the average of a value of the state dict where one is kept, else the value."""
        if self._ema_decay and isinstance(value, nn.Parameter) and value.requires_grad:
            return self._moment(value, AVERAGE)
        return self._whole(value)

    def _set_whole(self, value: Tensor, whole: Tensor) -> None:
        value.data.copy_(whole)
        if value in self._frozen:
            self._frozen[value].copy_(whole)

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


def differences(found: dict[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return which tensors are missing, unknown, or not of the shape expected; "" if none is."""
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in expected]
    for name, own in expected.items():
        if name not in found:
            continue
        other, shape = found[name], getattr(own, "ds_shape", own.shape)  # ZeRO 3: the whole's
        if other.shape != shape or other.is_floating_point() != own.is_floating_point():
            wrong.append(f"{name} is {list(other.shape)} of {other.dtype}, not {list(shape)}")
    first = shown(", ".join(wrong[:3]), 400)
    return f"{first}, ..." if len(wrong) > 3 else first


class Forward(nn.Module):
    """The module under autocast, with its layers called as `calls` says."""

    def __init__(self, module: nn.Module, autocast: torch.dtype | None, calls: LayerCalls) -> None:
        super().__init__()
        self.module = module
        self.autocast, self.calls = autocast, calls

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context that the forward runs in."""
        device = next(self.module.parameters()).device.type
        return torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)

    def forward(self, *inputs: Any) -> tuple[list[Tensor], Losses]:
        """Return the terms' sums, as plain tensors for DeepSpeed's hooks, and the terms."""
        with self.precision(), self.calls.active():
            losses = self.module(*inputs)
        return [term.sum for term in losses.values()], losses
