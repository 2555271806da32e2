"""Decoding steps of Llama's family without what a small model would wait for most.

Of a step of the embedded target Transformers spends half outside the matrix products: masks that
are there already, norms of six operations, keys repeated for every query head. The same modules
are called here with less between them, for the key-value cache that decoding uses and for nothing
else; training, and Transformers' own `generate`, run what they ran before.
"""

import types
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPast

from drafttrain.core.ops.growing import RaggedCache

# Decoders whose layers are: norm, rotary attention, norm, feed-forward; nothing beside.
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
FAMILY = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")


class Turn(NamedTuple):
    """Rotary embeddings of a pass; the first half of the sines has its sign turned."""

    cos: Float[Tensor, "batch 1 new head_dim"]
    sin: Float[Tensor, "batch 1 new head_dim"]


def make_lean(model: Any) -> bool:
    """Make a Transformers model decode leanly where it is of the family; return whether it is.

    Bound to the modules themselves, whose weights are looked up in every step: a copy of the model
    is lean by its own weights, and moved, quantised or widened weights are used as they are.
    """
    decoder = model.get_decoder()
    known = type(decoder).__module__.startswith("transformers.models.")
    if not (known and type(decoder).__name__ in FAMILY):
        return False
    if decoder.config._attn_implementation != "sdpa":
        return False
    decoder.forward = types.MethodType(decode, decoder)
    for layer in decoder.layers:
        layer.forward = types.MethodType(decode_layer, layer)
    return True


def decode(
    decoder: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **others: Any,
) -> Any:
    """Run a decoder as its own `forward` would; with another cache, by that.

    attention_mask: which keys each new token sees, complete, or None for causality alone.
    """
    if not isinstance(past_key_values, RaggedCache) or inputs_embeds is not None or others:
        return type(decoder).forward(
            decoder,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **others,
        )
    hidden = decoder.embed_tokens(input_ids)
    cos, sin = decoder.rotary_emb(hidden, position_ids=position_ids)
    half = sin.shape[-1] // 2
    turn = Turn(cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, None])
    for layer in decoder.layers:
        hidden = layer(hidden, attention_mask, turn, past_key_values)
    return BaseModelOutputWithPast(
        last_hidden_state=decoder.norm(hidden), past_key_values=past_key_values
    )


def decode_layer(layer: Any, hidden_states: Tensor, *inputs: Any, **named: Any) -> Any:
    """Run a decoder layer; called by anything but `decode`, by its own `forward`."""
    if len(inputs) < 2 or not isinstance(inputs[1], Turn):
        return type(layer).forward(layer, hidden_states, *inputs, **named)
    mask, turn, cache = inputs
    attention = layer.self_attn
    values = normed(layer.input_layernorm, hidden_states)
    rows, new, _ = values.shape
    shape = (rows, new, -1, attention.head_dim)
    queries = product(attention.q_proj, values).view(shape)
    keys = product(attention.k_proj, values).view(shape)
    if "q_norm" in attention._modules:  # Qwen3; asked so, because a failing hasattr is slow
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    own = product(attention.v_proj, values).view(shape).transpose(1, 2)
    queries = rotated(queries.transpose(1, 2), turn)
    keys = rotated(keys.transpose(1, 2), turn)
    all_keys, all_values = cache.update(keys, own, attention.layer_idx)
    mixed = functional.scaled_dot_product_attention(
        queries,
        all_keys,
        all_values,
        attn_mask=mask,
        is_causal=mask is None and new > 1,
        scale=attention.scaling,
        enable_gqa=True,
    )
    mixed = mixed.transpose(1, 2).reshape(rows, new, -1)
    hidden = hidden_states + product(attention.o_proj, mixed)
    return hidden + fed_forward(layer.mlp, normed(layer.post_attention_layernorm, hidden))


def product(linear: Any, values: Tensor) -> Tensor:
    """Apply a linear layer: by its weights alone where it is no more than that."""
    if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
        return linear(values)
    weights: Any = linear._parameters  # asked so, because a module's own lookup is slow
    return functional.linear(values, weights["weight"], weights["bias"])


def fed_forward(mlp: Any, values: Tensor) -> Tensor:
    """Apply a gated feed-forward layer."""
    if type(mlp).__name__ not in GATED or mlp._forward_hooks or mlp._forward_pre_hooks:
        return mlp(values)
    gate, up = product(mlp.gate_proj, values), product(mlp.up_proj, values)
    return product(mlp.down_proj, mlp.act_fn(gate) * up)


def normed(norm: Any, values: Tensor) -> Tensor:
    """Apply a root-mean-square norm; in float32 by one operation, else as the module rounds."""
    if values.dtype != torch.float32:
        return norm(values)
    weight = norm.weight
    return functional.rms_norm(values, weight.shape, weight, norm.variance_epsilon)


def rotated(heads: Tensor, turn: Turn) -> Tensor:
    """Apply a rotation to queries or keys: its halves, exchanged, meet the signed sines."""
    return heads * turn.cos + heads.roll(heads.shape[-1] // 2, -1) * turn.sin
