"""EAGLE-3's decoder layer: for a pair of embedding and state, and for the unroll of training."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.ops.layers import MLP, RMSNorm, Rotation
from drafttrain.drafters.shared.layer import LayerShape


class Eagle3Layer(nn.Module):
    """A decoder layer that attends to [norm(embedding); norm(hidden)]; residual from hidden.

    `norm_before_residual`: from norm(hidden) instead, as speculators trains by default.
    """

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = shape.attention(2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, shape.intermediate_size)

    def inputs(
        self, embedded: Float[Tensor, "batch seq hidden"], hidden: Float[Tensor, "batch seq hidden"]
    ) -> tuple[Float[Tensor, "batch seq twice"], Float[Tensor, "batch seq hidden"]]:
        """Return the input of attention, and the residual stream that its output is added to."""
        normed = self.hidden_norm(hidden)
        inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return inputs, normed if self.norm_before_residual else hidden

    def enter(
        self,
        projected: Float[Tensor, "batch seq heads"],
        weight: Float[Tensor, "heads hidden"],
        hidden: Float[Tensor, "batch seq hidden"],
        turn: Rotation,
    ) -> tuple[Float[Tensor, "batch seq hidden"], Tensor, Tensor, Tensor]:
        """Return the residual stream, queries, keys and values of one depth of the unroll.

        projected, weight: the embeddings' part of the projection (`Attention.joined`), from this
        depth's own tokens on.
        """
        normed = self.hidden_norm(hidden)
        projected = functional.linear(normed, weight) + projected
        queries, keys, values = self.self_attn.by_head(projected, turn)
        return normed if self.norm_before_residual else hidden, queries, keys, values

    def finish(
        self, hidden: Float[Tensor, "batch seq hidden"], mixed: Float[Tensor, "batch seq hidden"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return the residual stream with attention and feed-forward added."""
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
