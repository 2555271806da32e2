"""What a drafter holds in memory beside its target: its own weights, its cache per position."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from transformers import DynamicCache

from drafttrain.drafters.base import Drafter
from drafttrain.report.results import ExtraMemory
from drafttrain.target.model import Target

PROBE = 8  # tokens of a text that is read only to see what the drafter keeps of it


@torch.inference_mode()
def extra_memory(target: Target, drafter: Drafter) -> ExtraMemory:
    """Return the bytes of the drafter's weights, and of its cache per position of one row.

    Weights that it shares with the target are not counted, nor is what it holds only while it
    drafts. The cache is that of a few tokens really read.
    """
    tokens = torch.zeros(1, PROBE + 1, dtype=torch.long, device=target.device)
    cache = target.begin()
    _, features = target.step(cache, tokens[:, :PROBE], drafter.captures)
    state = drafter.begin(target.readout, tokens[:, 0], PROBE + 1)
    drafter.observe(state, tokens[:, 1:], [PROBE], features)
    if drafter.propose(state, 1) is None:
        drafter.expand(state, None)  # some read what they observe only when they are asked
    per_position = sum(bytes_per_position(cache) for cache in caches_of(state))
    return ExtraMemory(weight_bytes(target, drafter), per_position)


def weight_bytes(target: Target, drafter: Drafter) -> int:
    """Return the bytes of parameters and buffers that are the drafter's alone, each once."""
    shared = {tensor.data_ptr() for tensor in target.model.parameters()}
    own = {
        tensor.data_ptr(): tensor.nbytes
        for tensor in (*drafter.parameters(), *drafter.buffers())
        if tensor.data_ptr() not in shared
    }
    return sum(own.values())


def caches_of(state: Any) -> Iterator[DynamicCache]:
    """Yield the caches that a drafter's state holds."""
    if isinstance(state, DynamicCache):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from caches_of(part)
    elif is_dataclass(state):
        for part in fields(state):
            yield from caches_of(getattr(state, part.name))


def bytes_per_position(cache: DynamicCache) -> int:
    """Return the bytes of one position of one row, keys and values of all layers."""
    layers: list[Any] = cache.layers
    return sum(
        tensor.shape[1] * tensor.shape[3] * tensor.element_size()
        for layer in layers
        for tensor in (layer.keys, layer.values)
    )
