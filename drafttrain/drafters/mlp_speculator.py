"""An MLP speculator: heads that are a small recurrent network (arXiv:2404.19124, 2024)."""

import math
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.readout import Readout
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.shared.heads import of_depth, own_heads
from drafttrain.drafters.shared.publications import About
from drafttrain.drafters.shared.sequential import SequentialConfig, SequentialHeads
from drafttrain.runtime import limits

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorConfig(SequentialConfig):
    """Shape and loss of an MLP speculator; inner_size: null takes the target's width."""

    num_heads: limits.PositiveInt
    inner_size: limits.PositiveInt | None
    tied: bool
    scale_input: bool

    def build(self, spec: TargetSpec) -> "MLPSpeculator":
        return MLPSpeculator(self, spec)


class MLPSpeculator(SequentialHeads):
    """state = GELU(LN(proj(state) + w embedding(token))), from the target's hidden state on.

    w lets the first state keep half of the last one's variance, if embeddings have the variance
    1 / width (IBM's fms-extras, from which scale_input and what `tied` shares are taken too; its
    norms rescale without centring, where LN, here torch's own, centres too).
    """

    about = About("An MLP speculator", "2404.19124")
    config: MLPSpeculatorConfig

    def __init__(self, config: MLPSpeculatorConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, config.num_heads)
        self.max_depth = depths = config.num_heads
        inner = config.inner_size or spec.hidden_size
        kept = 0.5 ** (1 / depths)  # of the variance, at each depth
        self.token_weight = math.sqrt((1 - kept) / kept * inner / 2)
        own = 1 if config.tied else depths
        self.embeddings = nn.ModuleList(nn.Embedding(spec.vocab_size, inner) for _ in range(own))
        self.norms = nn.ModuleList(nn.LayerNorm(inner, NORM_EPS) for _ in range(own))
        # The first reads the target's width: it stays its own.
        further = min(1, depths - 1) if config.tied else depths - 1
        widths = [spec.hidden_size, *[inner] * further]
        self.projections = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths)
        self.lm_heads = own_heads(inner, spec.vocab_size, own)
        for matrices in (self.embeddings, self.projections, self.lm_heads):
            for matrix in matrices:
                nn.init.trunc_normal_(matrix.get_parameter("weight"), std=inner**-0.5)

    def start(self, hidden: Tensor) -> Tensor:
        if not self.config.scale_input:
            return hidden
        normed = functional.layer_norm(hidden, hidden.shape[-1:], eps=NORM_EPS)
        return normed.to(hidden.dtype) / math.sqrt(2)

    def follow(
        self, depth: int, states: Tensor, tokens: Int[Tensor, "batch seq"], readout: Readout
    ) -> Tensor:
        projected = of_depth(self.projections, depth)(states)
        embedded = of_depth(self.embeddings, depth)(tokens)
        normed = of_depth(self.norms, depth)(projected + self.token_weight * embedded)
        return functional.gelu(normed.to(projected.dtype))
