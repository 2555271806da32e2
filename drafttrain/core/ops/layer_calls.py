"""How a drafter's layers are called in training: as written, compiled, computed again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Any]


class LayerCalls:
    """What training asks of the layers that are called while it is `active`; decoding asks nothing.

    recompute: keep no activations of theirs, the backward pass computes them again. backend: of
    torch.compile, by which each goes once, for any number of rows and lengths; None compiles none.
    """

    def __init__(self, recompute: bool = False, backend: str | None = None) -> None:
        self.recompute, self.backend = recompute, backend
        self.programs: dict[Function, Function] = {}
        if backend:
            # A block per head, a layer with a mask and without: as many variants, and more.
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(64, limit)

    def __bool__(self) -> bool:
        return self.recompute or self.backend is not None

    def program(self, function: Function) -> Function:
        """Return the function, compiled; the work is done when it is first called."""
        assert self.backend is not None
        if function not in self.programs:
            self.programs[function] = torch.compile(function, dynamic=True, backend=self.backend)
        return self.programs[function]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Call layers in this way while this is open."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


AS_WRITTEN = LayerCalls()
_ACTIVE: ContextVar[LayerCalls] = ContextVar("layer_calls", default=AS_WRITTEN)


def asked() -> LayerCalls:
    """Return what is asked of layers now."""
    return _ACTIVE.get()


def call_layer(function: Function, *inputs: Any, **more: Any) -> Any:
    """Call a layer, which is a function of its inputs and of weights, as it is asked for."""
    return recomputed(compiled, function, *inputs, **more)


def recomputed(function: Function, *inputs: Any, **more: Any) -> Any:
    """Call a function as `call_layer` does, but as it is written: parts of it may be `compiled`."""
    calls = asked()
    if not (calls.recompute and torch.is_grad_enabled()):
        return function(*inputs, **more)

    def again(*inputs: Any, **more: Any) -> Any:
        with calls.active():  # the backward pass is outside
            return function(*inputs, **more)

    return checkpoint(again, *inputs, use_reentrant=False, **more)


def compiled(function: Function, *inputs: Any, **more: Any) -> Any:
    """Call a function as `call_layer` does, but keep its activations."""
    calls = asked()
    if calls.backend is not None and torch.is_grad_enabled():
        function = calls.program(function)
    return function(*inputs, **more)


def device_of(module: nn.Module) -> torch.device:
    """Return where a module's weights are."""
    return next(module.parameters()).device


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return what a module's activations are computed in: its weights' dtype, or autocast's.

    Inputs are brought to it at the door: left in float32 under autocast, every norm and every
    residual sum would move twice the bytes.
    """
    device = device_of(module).type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return next(module.parameters()).dtype


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return float32, or what is wider of a tensor's own."""
    return torch.promote_types(tensor.dtype, torch.float32)
