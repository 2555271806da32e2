"""The memory of a drafter besides its target's: its own weights, and its cache per position."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from transformers import DynamicCache

from drafttrain.drafters.base import Drafter
from drafttrain.report.results import ExtraMemory
from drafttrain.target.model import Target

PROBE = 8  # tokens of a text that is read only to measure the drafter's cache


@torch.inference_mode()
def extra_memory(target: Target, drafter: Drafter) -> ExtraMemory:
    """Return the bytes of the drafter's weights, and of its cache per position of one row.

    Weights that it shares with the target are not counted, nor is memory that it needs only while
    drafting. The cache is measured after reading a few tokens.
    """
    tokens = torch.zeros(1, PROBE + 1, dtype=torch.long, device=target.device)
    cache = target.begin()
    _, features = target.step(cache, tokens[:, :PROBE], drafter.captures)
    state = drafter.begin(target.readout, tokens[:, 0], PROBE + 1)
    drafter.observe(state, tokens[:, 1:], [PROBE], features)
    if drafter.propose(state, 1) is None:
        drafter.expand(state, None)  # some drafters read observed tokens only here
    shared = {tensor.data_ptr() for tensor in target.model.parameters()}
    tensors = {tensor.data_ptr(): tensor for tensor in (*drafter.parameters(), *drafter.buffers())}
    own = sum(tensor.nbytes for place, tensor in tensors.items() if place not in shared)
    return ExtraMemory(own, sum(bytes_per_position(cache) for cache in caches_of(state)))


def caches_of(state: Any) -> Iterator[DynamicCache]:
    """Yield the caches that a drafter's state holds."""
    if isinstance(state, DynamicCache):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from caches_of(part)
    elif is_dataclass(state):
        for field in fields(state):
            yield from caches_of(getattr(state, field.name))


def bytes_per_position(cache: DynamicCache) -> int:
    """Return the bytes of one position of one row, keys and values of all layers."""
    layers: list[Any] = cache.layers
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return sum(each.shape[1] * each.shape[3] * each.element_size() for each in tensors)
