"""How a drafter's layers are called in training: as written, compiled, recomputed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Any]


class LayerCalls:
    """How to call layers while this is `active`, in training; decoding calls them as written.

    recompute: keep no activations; the backward pass computes them again. backend: of
    torch.compile, which compiles each layer once, for all batch shapes; None compiles none.
    """

    def __init__(self, recompute: bool = False, backend: str | None = None) -> None:
        self.recompute, self.backend = recompute, backend
        self.programs: dict[Function, Function] = {}
        if backend:
            # Variants, such as a block per head, or a layer with and without a mask, add up.
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(64, limit)

    def __bool__(self) -> bool:
        return self.recompute or self.backend is not None

    def program(self, function: Function) -> Function:
        """Return the compiled function; the compilation happens at its first call."""
        assert self.backend is not None
        if function not in self.programs:
            self.programs[function] = torch.compile(function, dynamic=True, backend=self.backend)
        return self.programs[function]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Call layers in this way within the block."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


AS_WRITTEN = LayerCalls()
_ACTIVE: ContextVar[LayerCalls] = ContextVar("layer_calls", default=AS_WRITTEN)


def asked() -> LayerCalls:
    """Return how layers are called now."""
    return _ACTIVE.get()


def call_layer(function: Function, *inputs: Any, **more: Any) -> Any:
    """Call a layer, a function of its inputs and weights, as the active `LayerCalls` says."""
    return recomputed(compiled, function, *inputs, **more)


def recomputed(function: Function, *inputs: Any, **more: Any) -> Any:
    """Call a function as `call_layer` does, but not compiled: parts of it may be `compiled`."""
    calls = asked()
    if not (calls.recompute and torch.is_grad_enabled()):
        return function(*inputs, **more)

    def again(*inputs: Any, **more: Any) -> Any:
        with calls.active():  # the backward pass runs outside the block
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
    """Return the dtype of a module's activations: its weights' dtype, or autocast's.

    Inputs are cast to it first: left in float32 under autocast, every norm and every residual sum
    would move twice the bytes.
    """
    device = device_of(module).type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return next(module.parameters()).dtype


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return float32, or the tensor's own dtype if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)
