"""The few layers that drafters are made of, named as Llama checkpoints name them."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.cache import KeyValues


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), computed in float32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, values: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
        """Return values scaled to unit root mean square, times the weight."""
        return functional.rms_norm(
            values, self.weight.shape, self.weight.to(values.dtype), self.eps
        )


class Rotation(NamedTuple):
    """Cosines and sines of rotary embeddings at given positions."""

    cos: Float[Tensor, "*batch seq head_dim"]
    sin: Float[Tensor, "*batch seq head_dim"]


def rotation(
    positions: Int[Tensor, "*batch seq"], head_dim: int, theta: float, dtype: torch.dtype
) -> Rotation:
    """Return the rotation of each position (RoFormer; Llama's half-split layout), in `dtype`."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * theta ** (-half / head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(
    heads: Float[Tensor, "batch head seq head_dim"], turn: Rotation
) -> Float[Tensor, "batch head seq head_dim"]:
    """Apply a rotation to queries or keys."""
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    return heads * turn.cos.unsqueeze(-3) + swapped * turn.sin.unsqueeze(-3)


def document_mask(
    document: Int[Tensor, "batch seq"],
) -> Bool[Tensor, "batch 1 seq seq"] | None:
    """Return which keys each query may see, or None where plain causality already says it.

    Padding stands right of the document, so a causal mask alone keeps it out of a row's only
    document; a row that holds several needs the block-diagonal mask.
    """
    real = document >= 0
    if bool(((document == document[:, :1]) | ~real).all()):
        return None
    same = document[:, None, :, None] == document[:, None, None, :]
    causal = torch.ones(document.shape[1], document.shape[1], device=document.device).tril().bool()
    # A query of padding must see something, or its softmax is NaN: it sees padding.
    return same & causal


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v may read a wider input."""

    def __init__(
        self,
        width: int,
        input_width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,  # of q, k and v
        output_bias: bool = False,
        norm_eps: float | None = None,  # Qwen3 norms each query and key before it turns them
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(input_width, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(input_width, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(input_width, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, width, bias=output_bias)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)

    def project(
        self, values: Float[Tensor, "batch seq input"], turn: Rotation
    ) -> tuple[
        Float[Tensor, "batch head seq head_dim"],
        Float[Tensor, "batch kv_head seq head_dim"],
        Float[Tensor, "batch kv_head seq head_dim"],
    ]:
        """Return rotated queries and keys, and values, by head."""
        batch, seq, _ = values.shape
        split = lambda flat, heads: flat.view(batch, seq, heads, self.head_dim).transpose(1, 2)  # noqa: E731
        queries = split(self.q_proj(values), self.num_heads)
        keys = split(self.k_proj(values), self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return (
            rotate(queries, turn),
            rotate(keys, turn),
            split(self.v_proj(values), self.num_kv_heads),
        )

    def merge(
        self, mixed: Float[Tensor, "batch head seq head_dim"]
    ) -> Float[Tensor, "batch seq width"]:
        """Join the heads and project back to the layer's width."""
        batch, _, seq, _ = mixed.shape
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))

    def forward(
        self,
        values: Float[Tensor, "batch seq input"],
        turn: Rotation,
        mask: Bool[Tensor, "batch 1 seq seq"] | None,
    ) -> Float[Tensor, "batch seq width"]:
        """Attend causally within the sequence, as training does."""
        queries, keys, own = self.project(values, turn)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, own, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.merge(mixed)

    def cached(
        self, values: Float[Tensor, "batch new input"], turn: Rotation, cache: KeyValues
    ) -> Float[Tensor, "batch new width"]:
        """Append to the cache and attend to everything in it, causally."""
        mask, first = cache.visible(values.shape[1]), max(cache.lengths) == 0
        queries, keys, own = self.project(values, turn)
        all_keys, all_values = cache.append(keys, own)
        mixed = functional.scaled_dot_product_attention(
            queries,
            all_keys,
            all_values,
            attn_mask=mask,
            is_causal=mask is None and first and values.shape[1] > 1,
            enable_gqa=True,
        )
        return self.merge(mixed)

    def unrolled(
        self,
        values: Float[Tensor, "batch seq input"],
        turn: Rotation,
        mask: Bool[Tensor, "batch 1 seq seq"] | None,
        past: list[tuple[Tensor, Tensor]],
    ) -> Float[Tensor, "batch seq width"]:
        """Attend as a drafter does at a later depth (EAGLE-3's training-time test).

        `past` holds keys and values of the depths before, this one's are appended. A query at index
        t sees all of depth 0 up to t, and of each later depth only its own index t: the branch that
        it drafted itself. One causal attention and a diagonal per depth.
        """
        queries, keys, own = self.project(values, turn)
        past.append((keys, own))
        if len(past) == 1:
            mixed = functional.scaled_dot_product_attention(
                queries, keys, own, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            return self.merge(mixed)
        group = self.num_heads // self.num_kv_heads
        spread = lambda heads: heads.repeat_interleave(group, dim=1)  # noqa: E731
        queries = queries * self.head_dim**-0.5
        first = queries @ spread(past[0][0]).transpose(-1, -2)
        if mask is None:
            seq = values.shape[1]
            mask = torch.ones(seq, seq, dtype=torch.bool, device=values.device).tril()
        first = first.masked_fill(~mask, -torch.inf)
        diagonals = [(queries * spread(k)).sum(-1, keepdim=True) for k, _ in past[1:]]
        weights = torch.cat([first, *diagonals], dim=-1).float().softmax(-1).to(own.dtype)
        seq = first.shape[-1]
        mixed = weights[..., :seq] @ spread(past[0][1])
        for depth, (_, v) in enumerate(past[1:]):
            mixed = mixed + weights[..., seq + depth, None] * spread(v)
        return self.merge(mixed)


class MLP(nn.Module):
    """Gated feed-forward layer (SwiGLU)."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=False)
        self.up_proj = nn.Linear(width, inner_width, bias=False)
        self.down_proj = nn.Linear(inner_width, width, bias=False)

    def forward(self, values: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
        """Return down(silu(gate) * up)."""
        return self.down_proj(functional.silu(self.gate_proj(values)) * self.up_proj(values))
