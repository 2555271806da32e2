"""What a target's configuration and modules say of it: shape, readout, and if it can roll back."""

from typing import Any

import torch
from torch import nn

from drafttrain.pretrained import ModelConfig
from drafttrain.readout import Readout
from drafttrain.types import TargetSpec


def describe(
    config: ModelConfig, model_config: Any, generation: Any, tokenizer: Any, fingerprint: str
) -> TargetSpec:
    """Fill a TargetSpec from Transformers' configuration.

    `eos_token_ids` are those of the generation configuration, the configuration and the tokenizer
    together: for chat models they differ, and each ends an answer.
    """
    text = model_config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    limit = text.max_position_embeddings
    if config.max_positions is not None and config.max_positions > limit:
        raise ValueError(
            f"model.max_positions must be at most {limit}, what model={config.name} was made for,"
            f" got {config.max_positions}"
        )
    return TargetSpec(
        name=config.label,
        fingerprint=fingerprint,
        architecture=text.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=_first(text, "rms_norm_eps", "layer_norm_eps", "norm_eps"),
        rope_theta=_rope_theta(text),
        max_positions=config.max_positions or limit,
        eos_token_ids=_eos(generation, text, tokenizer),
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
    )


def read_out(model: Any) -> Readout:
    """Return the readout of a Transformers causal language model; tied weights share a tensor."""
    text = model.config.get_text_config(decoder=True)
    embedder, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding = embedder.weight.detach()
    tied = head.weight.data_ptr() == embedder.weight.data_ptr()
    scale = getattr(embedder, "embed_scale", None)  # Gemma rounds it to the weights' dtype
    if scale is None:
        scale = getattr(text, "embedding_multiplier", None) or 1.0  # Granite
    elif isinstance(scale, torch.Tensor):
        scale = scale.to(embedding.dtype).item()
    logit_scale = getattr(text, "logit_scale", None) or 1.0  # Cohere
    return Readout(
        embedding,
        embedding if tied else head.weight.detach(),
        norm=_gain(model.get_decoder().norm, embedding),
        head_bias=None if head.bias is None else head.bias.detach(),
        embedding_scale=float(scale),
        logit_scale=logit_scale / (getattr(text, "logits_scaling", None) or 1.0),  # Granite
        soft_cap=getattr(text, "final_logit_softcapping", None),
    )


def gigabytes(size: int) -> str:
    """Return a number of bytes as messages show it."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _gain(norm: nn.Module, like: torch.Tensor) -> torch.Tensor | None:
    # What the norm multiplies by, whatever it stores (Gemma stores it less 1): an input of
    # alternating signs has mean 0 and root mean square 1, so every norm leaves it as it is.
    signs = torch.ones(like.shape[1], dtype=like.dtype, device=like.device)
    signs[1::2] = -1
    with torch.no_grad():
        gain = norm(signs[None])[0] * signs
    weight = getattr(norm, "weight", None)
    if isinstance(weight, torch.Tensor) and torch.allclose(weight, gain, rtol=1e-2, atol=1e-4):
        return weight.detach()  # to the last bit
    return gain


def _first(text: Any, *names: str) -> float:
    for name in names:
        if getattr(text, name, None) is not None:
            return float(getattr(text, name))
    raise ValueError(f"model_type {text.model_type} must state one of {', '.join(names)}")


def _rope_theta(text: Any) -> float:
    rope = getattr(text, "rope_parameters", None) or {}
    # Models with two kinds of attention state it for each.
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        raise ValueError(
            f"model_type {text.model_type} must have rotary positions: its configuration states no"
            " rope_theta, and drafters of other kinds are not supported"
        )
    return float(rope["rope_theta"])


def _eos(*sources: Any) -> tuple[int, ...]:
    found: list[int] = []
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        values = value if isinstance(value, list | tuple) else [value]
        found += [item for item in values if item is not None and item not in found]
    return tuple(found)
