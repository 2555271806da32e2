"""ReDrafter: a recurrent network beside the target's hidden state (arXiv:2403.09919, 2024)."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.readout import Readout
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.medusa import ResidualBlocks
from drafttrain.drafters.shared.embedding_scale import EmbeddingScale
from drafttrain.drafters.shared.heads import own_heads
from drafttrain.drafters.shared.publications import About
from drafttrain.drafters.shared.sequential import SequentialConfig, SequentialHeads
from drafttrain.runtime import limits


@dataclass(frozen=True, kw_only=True)
class ReDrafterConfig(SequentialConfig):
    """Shape and loss of ReDrafter; exit_size: null reads state and hidden state as they are."""

    unroll: limits.PositiveInt
    num_layers: limits.PositiveInt
    exit_size: limits.PositiveInt | None
    scale_embeddings: bool

    def build(self, spec: TargetSpec) -> "ReDrafter":
        return ReDrafter(self, spec)


class ReDrafter(SequentialHeads):
    """s = SiLU(W embedding(token) + U s + b), from s = 0; [f_t; s] through blocks to one head.

    Embeddings are the target's. Every depth has the same weights, so that it may draft deeper than
    it was trained. It drafts under a policy, as all families do, where the paper searches by beam.
    """

    about = About("A ReDrafter", "2403.09919")
    published = ()  # as printed, the largest speedups only
    config: ReDrafterConfig

    def __init__(self, config: ReDrafterConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, config.unroll)
        width = spec.hidden_size
        inner = config.exit_size or 2 * width
        self.scale = EmbeddingScale(config.scale_embeddings)
        self.rnn_w = nn.Linear(width, width, bias=False)
        self.rnn_u = nn.Linear(width, width)
        self.input_proj = None if config.exit_size is None else nn.Linear(2 * width, inner)
        self.blocks = ResidualBlocks(inner, config.num_layers, bias=True)
        self.lm_heads = own_heads(inner, spec.vocab_size, 1)

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Choose embeddings' factor; copy the target's head to the hidden state's columns."""
        self.scale.prepare(readout)
        if self.input_proj is None:
            with torch.no_grad():
                columns = self.lm_heads[0].get_parameter("weight")[:, : self.spec.hidden_size]
                columns.copy_(readout.head)

    def start(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, torch.zeros_like(hidden)], dim=-1)

    def follow(self, depth: int, states: Tensor, tokens: Tensor, readout: Readout) -> Tensor:
        hidden, state = states.chunk(2, dim=-1)
        embedded = self.scale(readout.embed(tokens).to(states.dtype))
        state = functional.silu(self.rnn_w(embedded) + self.rnn_u(state))
        return torch.cat([hidden, state], dim=-1)

    def leave(self, depth: int, states: Tensor) -> Tensor:
        return self.blocks(states if self.input_proj is None else self.input_proj(states))
