"""Hydra: Medusa's heads, each of which reads the tokens drafted before it (arXiv:2402.05109)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.ops.layer_calls import call_layer, device_of, dtype_of
from drafttrain.core.ops.layers import LayerShape, RMSNorm, Rotation, attend_cached
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import attention_mask
from drafttrain.core.readout import Readout
from drafttrain.core.transfer import send_numbers
from drafttrain.core.types import Batch, TargetSpec
from drafttrain.drafters.base import rows_at, start_with
from drafttrain.drafters.medusa import ResidualBlocks
from drafttrain.drafters.shared.embedding_scale import EmbeddingScale
from drafttrain.drafters.shared.heads import own_heads
from drafttrain.drafters.shared.layer import CachedState
from drafttrain.drafters.shared.parallel import BlockLayer
from drafttrain.drafters.shared.publications import About, quoted, spec_bench
from drafttrain.drafters.shared.sequential import SequentialConfig, SequentialHeads, SequentialState
from drafttrain.runtime import limits


@dataclass(frozen=True, kw_only=True)
class HydraHeadsConfig(SequentialConfig):
    """Shape and loss of Hydra; prefix_attention: a decoder layer before the heads (Hydra++)."""

    num_heads: limits.PositiveInt
    num_layers: limits.PositiveInt
    prefix_attention: bool
    scale_embeddings: bool

    def build(self, spec: TargetSpec) -> "HydraHeads":
        return HydraHeads(self, spec)


class HydraMLP(nn.Module):
    """R x + SiLU(W x + b) of the state and `num_tokens` embeddings, then residual blocks."""

    def __init__(self, width: int, num_tokens: int, num_layers: int) -> None:
        super().__init__()
        read = width * (1 + num_tokens)
        self.linear, self.residual = nn.Linear(read, width), nn.Linear(read, width)
        self.blocks = ResidualBlocks(width, num_layers - 1, bias=True)
        # At first it hands the state on, as Medusa's blocks do.
        for zero in (self.linear.weight, self.linear.bias, self.residual.weight):
            nn.init.zeros_(zero)
        nn.init.zeros_(self.residual.bias)
        nn.init.eye_(self.residual.weight[:, :width])

    def forward(self, read: Float[Tensor, "*shape read"]) -> Float[Tensor, "*shape hidden"]:
        return self.blocks(self.residual(read) + functional.silu(self.linear(read)))


class PrefixLayer(nn.Module):
    """A decoder layer over the target's final hidden states, and a norm: Hydra++'s heads read it.

    It sees committed positions only: one pass over them in each cycle.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.layer = BlockLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, hidden: Float[Tensor, "batch seq hidden"], turn: Rotation, mask: Tensor | None
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return the states of all positions of texts."""
        queries, keys, values = self.layer.enter(hidden, turn)
        mixed = unrolled_attention(queries, [(keys, values)], mask)
        return self.norm(self.layer.finish(hidden, mixed))

    def cached(
        self, hidden: Tensor, turn: Rotation, cache: RaggedCache, last: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch 1 hidden"]:
        """Return the state of each row's last new position, within a pass of a cache's `run`."""
        queries, keys, values = self.layer.enter(hidden, turn)
        mixed = attend_cached((queries, keys, values), cache, 0)
        return self.norm(rows_at(self.layer.finish(hidden, mixed), last))


@dataclass
class PrefixState(SequentialState, CachedState):
    """The state of heads whose prefix layer has a cache of the committed positions."""


class HydraHeads(SequentialHeads):
    """Head k reads [state of t; embeddings of tokens t + 1 .. t + 1 + k], predicts token t + 2 + k.

    The state is the target's final hidden state, or the prefix layer's output from it. Embeddings
    are the target's. The paper's dropout is left out.
    """

    about = About("A Hydra", "2402.05109")
    published = (
        *quoted(
            "arXiv:2402.05109",
            "static tree",
            {
                "Vicuna 7B (Hydra++)": (2.7, None),
                "Vicuna 13B (Hydra++)": (2.5, None),
                "Vicuna 33B (Hydra++)": (2.53, None),
            },
        ),
        *spec_bench({"Vicuna 13B": (2.2, 3.35), "Vicuna 7B": (2.07, 3.26)}),
    )
    config: HydraHeadsConfig

    def __init__(self, config: HydraHeadsConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, config.num_heads)
        width, heads = spec.hidden_size, range(config.num_heads)
        self.max_depth = config.num_heads
        self.scale = EmbeddingScale(config.scale_embeddings)
        self.mlps = nn.ModuleList(HydraMLP(width, k + 1, config.num_layers) for k in heads)
        self.lm_heads = own_heads(width, spec.vocab_size, config.num_heads)
        self.prefix: PrefixLayer | None = None
        if config.prefix_attention:
            self.shape, self.reach = LayerShape.of(spec), None
            self.prefix = PrefixLayer(self.shape)

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Copy the target's head to every head, as Medusa's begin; choose embeddings' factor."""
        self.scale.prepare(readout)
        for head in self.lm_heads:
            start_with(head, readout.head)

    def start(self, hidden: Tensor) -> Tensor:
        return hidden

    def starts(self, batch: Batch, hidden: Tensor) -> Tensor:
        if self.prefix is None:
            return hidden
        turn = self.shape.rotation(batch.positions[:, :-1], hidden.dtype)
        mask = attention_mask(batch, pairs=True)
        states: Tensor = call_layer(self.prefix, hidden, turn, mask)
        return states

    def newest(self, state: SequentialState, hidden: Tensor, counts: Sequence[int]) -> Tensor:
        if self.prefix is None:
            return super().newest(state, hidden, counts)
        assert isinstance(state, PrefixState)
        prefix, cache, turn = self.prefix, state.cache, state.turn(hidden.shape[1])

        def run(hidden: Tensor, cos: Tensor, sin: Tensor, last: Tensor) -> tuple[Tensor, ...]:
            return (prefix.cached(hidden, Rotation(cos, sin), cache, last),)

        last = send_numbers(counts, hidden.device) - 1
        (found,) = cache.run(run, [hidden, turn.cos, turn.sin, last], list(counts))
        return found

    def follow(self, depth: int, states: Tensor, tokens: Tensor, readout: Readout) -> Tensor:
        embedded = self.scale(readout.embed(tokens).to(states.dtype))
        return torch.cat([states, embedded], dim=-1)

    def leave(self, depth: int, states: Tensor) -> Tensor:
        hidden: Tensor = self.mlps[depth](states)
        return hidden

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> SequentialState:
        if self.prefix is None:
            return super().begin(readout, first_tokens, capacity)
        places = torch.arange(capacity, device=device_of(self))
        table: Any = self.shape.rotation(places, dtype_of(self))
        return PrefixState(readout, RaggedCache(len(first_tokens), self.rooms), table)
