"""Attention in which several query heads share keys and values, without a copy of these for each.

With a mask, torch's fused kernels on a GPU take no fewer heads of keys than of queries, and its
other kernel copies them. While decoding there are few queries and many keys: so the query heads of
a group are laid one after another, as if they were queries of one head.
"""

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

FEW = 128  # queries; with more, it is their mask that would be repeated
NAME = "drafttrain_grouped"  # in Transformers' register of attention


def grouped_attention(
    queries: Float[Tensor, "batch head new head_dim"],
    keys: Float[Tensor, "batch kv_head total head_dim"],
    values: Float[Tensor, "batch kv_head total value_dim"],
    mask: Shaped[Tensor, "rows 1 new total"],
    scale: float | None = None,
) -> Float[Tensor, "batch head new value_dim"]:
    """Return attention under a mask that all heads share, boolean or added to the scores."""
    heads, new = queries.shape[1:3]
    group = heads // keys.shape[1]
    mixed = functional.scaled_dot_product_attention(
        queries.reshape(len(queries), -1, group * new, queries.shape[3]),
        keys,
        values,
        attn_mask=mask.repeat(1, 1, group, 1) if new > 1 else mask.expand(-1, -1, group, -1),
        scale=scale,
    )
    return mixed.reshape(len(queries), heads, new, values.shape[3])


def share_heads(model: Any) -> None:
    """Have a decoder of Transformers attend by `grouped_attention` where that saves copies."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        shared = attention_mask is not None and attention_mask.shape[1] == 1 and not dropout
        grouped = query.shape[1] > key.shape[1] and query.shape[2] <= FEW
        if not (shared and grouped) or more.get("position_bias") is not None:
            own = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, **more
            )
            return own[0], None
        assert attention_mask is not None
        mixed = grouped_attention(query, key, value, attention_mask, scaling)
        return mixed.transpose(1, 2).contiguous(), None

    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
