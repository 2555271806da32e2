"""Functions of fixed shapes, captured once and then launched whole, without Python in between.

A CUDA graph repeats the kernels of a function on the very memory that it was captured with. So what
varies is copied into inputs that are held, and what the function writes to must stay where it is.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

MOST = 256  # functions that are captured; others run as they are
Outputs = tuple[Tensor, ...]
# Captures a function without arguments: gives its outputs, and what computes them anew.
Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], None]]]


@cache
def _pool() -> Any:
    """Return memory that all graphs share: their outputs are copied before the next one runs."""
    return torch.cuda.graph_pool_handle()


def on_cuda(function: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """Capture a function as a CUDA graph; no kernel runs before the graph is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool()):
        outputs = function()
    return outputs, graph.replay


CAPTURES: dict[str, Capture] = {"cuda": on_cuda}  # by type of device


class Graphs:
    """Captured functions by key: what they compute, their shapes, and the memory they write to."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.seen: set[Hashable] = set()
        self.captured: dict[Hashable, tuple[list[Tensor], Outputs, Callable[[], None]]] = {}

    def run(
        self, key: Hashable, function: Callable[..., Outputs], inputs: Sequence[Tensor]
    ) -> Outputs:
        """Return function(*inputs): computed as it is the first time, then by its graph.

        The first time warms up: kernels are chosen, and workspaces made. RuntimeError if the
        function cannot be captured, for example because the host waits in it.
        """
        key = key, *((value.shape, value.dtype) for value in inputs)
        if key not in self.seen:
            if len(self.seen) < MOST:
                self.seen.add(key)
            return function(*inputs)
        if key not in self.captured:
            with torch.inference_mode(False):  # written to in either mode
                held = [torch.empty_like(value) for value in inputs]
            for place, value in zip(held, inputs, strict=True):
                place.copy_(value)
            self.captured[key] = held, *self.capture(lambda: function(*held))
        held, outputs, replay = self.captured[key]
        for place, value in zip(held, inputs, strict=True):
            place.copy_(value)
        replay()
        return tuple(output.clone() for output in outputs)  # the next replay writes over them
