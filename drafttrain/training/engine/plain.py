"""The engine that runs plain torch."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.training.engine.engine import MUON_MOMENTS, Engine
from drafttrain.training.engine.optimizer import balanced, newton_schulz_flops


class PlainEngine(Engine):
    """Plain torch; several ranks add up their gradients once per step, by all-reduce.

    Muon's Newton-Schulz steps would take the same time on every rank: each rank takes them for its
    share of the matrices, and sends the updated weights to the others.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._masters = self._lower() if self.low else {}
        self._start_moments()
        groups = [group for group in self._optimizer.param_groups if "momentum" in group]
        matrices: list[Tensor] = [matrix for group in groups for matrix in group["params"]]
        flops = [newton_schulz_flops(*matrix.shape) for matrix in matrices]
        self._rank_of = dict(zip(matrices, balanced(flops, self.world_size), strict=True))

    def _lower(self) -> dict[Tensor, nn.Parameter]:
        """Round the module's weights; return masters by parameter, which the optimizer updates.

        A gradient in bfloat16 exists until it has been added to its master's, in float32.
        """
        masters: dict[Tensor, nn.Parameter] = {}
        for parameter in self._trainable.values():
            master = masters[parameter] = nn.Parameter(parameter.detach().clone())
            parameter.data = parameter.data.to(torch.bfloat16)

            def add(low: Tensor, master: nn.Parameter = master) -> None:
                assert low.grad is not None
                grad = low.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                low.grad = None

            parameter.register_post_accumulate_grad_hook(add)
        for frozen in self._frozen:
            frozen.data = frozen.data.to(torch.bfloat16)
        for group in self._optimizer.param_groups:
            group["params"] = [masters[parameter] for parameter in group["params"]]
        return masters

    def _backward(self, loss: Float[Tensor, ""], last: bool) -> None:
        if loss.requires_grad:
            loss.backward()
        if not last:
            return
        for tensor in self._updated():
            if tensor.grad is None:  # unused here, but perhaps used on another rank
                tensor.grad = torch.zeros_like(tensor)
        self.ranks.sum_in_place(self._grads())

    def _grads(self) -> list[Tensor]:
        # In the module's order, so that the norm's sum always has the same order.
        updated = [self._masters.get(p, p) for p in self._trainable.values()]
        return [p.grad for p in updated if p.grad is not None]

    def _update(self, norm: float) -> None:
        if self._max_grad_norm > 0:
            total = torch.full((), norm, device=self.device)  # the host waits for no copy of it
            nn.utils.clip_grads_with_norm_(self._updated(), self._max_grad_norm, total)
        for matrix, rank in self._rank_of.items():
            if rank != self.rank:
                matrix.grad = None  # so that the optimizer leaves it out
        self._optimizer.step()
        for source in range(self.world_size):
            updated = [matrix.data for matrix, rank in self._rank_of.items() if rank == source]
            self.ranks.broadcast_in_place(updated, source)
        self._forget()
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.data)

    def _whole(self, value: Tensor) -> Tensor:
        return self._masters[value] if value in self._masters else super()._whole(value)

    def _set_whole(self, value: Tensor, whole: Tensor) -> None:
        super()._set_whole(value, whole)
        if value in self._masters:
            self._masters[value].data.copy_(whole)

    def _moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        tensor = self._masters.get(parameter, parameter)
        found = super()._moment(tensor, moment)
        if moment in MUON_MOMENTS:  # only the rank that updates the matrix has kept it up to date
            self.ranks.broadcast_in_place([found], self._rank_of[tensor])
        return found

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        super()._set_moment(self._masters.get(parameter, parameter), moment, value)
