"""Functions of fixed shapes, captured once and then launched whole, without Python in between.

A CUDA graph repeats the kernels of a function on the very memory that it was captured with. So what
varies is copied into inputs that are held, and what the function writes to must stay where it is.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

USES = 3  # of a function, after which it is captured: that takes as long as several launches
MOST = 256  # functions that are captured; others run as they are
Outputs = tuple[Tensor, ...]
# Captures a function without arguments: gives its outputs, and what computes them anew.
Capture = Callable[[Callable[[], Outputs], torch.device], tuple[Outputs, Callable[[], None]]]
# Graphs share memory for what they compute in between, and two threads may decode.
_alone = threading.RLock()


@cache
def _shared(device: torch.device) -> tuple[Any, Any]:
    """Return the stream of captures, and a graph that keeps the memory of all graphs in being.

    torch refuses to use a pool again whose last graph is gone.
    """
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.zeros(1, device=device)
    return stream, graph


def _recover(device: torch.device) -> None:
    """Let passes and captures go on after a capture that failed.

    torch (2.11) leaves the allocator recording into the pool, and refuses that pool and every
    random number until another capture has ended.
    """
    _, first = _shared(device)
    if end := getattr(torch._C, "_cuda_endAllocateToPool", None):
        end(device.index or 0, first.pool())
    _shared.cache_clear()
    _shared(device)


def on_cuda(
    function: Callable[[], Outputs], device: torch.device
) -> tuple[Outputs, Callable[[], None]]:
    """Capture a function as a CUDA graph; no kernel runs before the graph is replayed."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.device(device):
            stream, first = _shared(device)
            with torch.cuda.graph(
                graph, pool=first.pool(), stream=stream, capture_error_mode="thread_local"
            ):
                outputs = function()
    except RuntimeError:
        _recover(device)
        raise
    finally:
        torch.cuda.set_stream(before)  # which torch does not where a capture fails
    return outputs, graph.replay


CAPTURES: dict[str, Capture] = {"cuda": on_cuda}  # by type of device


def noting(capture: Capture, note: Callable[[RuntimeError], object]) -> Capture:
    """Return a capture that gives a failure to `note` before it raises it."""

    def noted(
        function: Callable[[], Outputs], device: torch.device
    ) -> tuple[Outputs, Callable[[], None]]:
        try:
            return capture(function, device)
        except RuntimeError as error:
            note(error)
            raise

    return noted


class Graphs:
    """Captured functions by key: what they compute, their shapes, and the memory they write to."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.uses: Counter[Hashable] = Counter()
        # None: it cannot be captured, for example because the host waits in it.
        self.captured: dict[Hashable, tuple[list[Tensor], Outputs, Callable[[], None]] | None] = {}

    def run(
        self, key: Hashable, function: Callable[..., Outputs], inputs: Sequence[Tensor]
    ) -> Outputs:
        """Return function(*inputs): computed as it is the first times, then by its graph.

        The first times warm up: kernels are chosen, and workspaces made.
        """
        key = key, *((value.shape, value.dtype) for value in inputs)
        if key in self.uses or len(self.uses) < MOST:
            self.uses[key] += 1
        with _alone:
            if self.uses[key] > USES and key not in self.captured:
                self.captured[key] = self._captured(function, inputs)
            graph = self.captured.get(key)
            if graph is None:
                return function(*inputs)
            held, outputs, replay = graph
            for place, value in zip(held, inputs, strict=True):
                place.copy_(value)
            replay()
            return tuple(output.clone() for output in outputs)  # the next replay writes over them

    def _captured(
        self, function: Callable[..., Outputs], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], Outputs, Callable[[], None]] | None:
        with torch.inference_mode(False):  # written to in either mode
            held = [torch.empty_like(value) for value in inputs]
        for place, value in zip(held, inputs, strict=True):
            place.copy_(value)
        try:
            return held, *self.capture(lambda: function(*held), inputs[0].device)
        except RuntimeError:
            return None
