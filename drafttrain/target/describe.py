"""A target's specification, from its configuration, and its readout, from its modules."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from drafttrain.core.readout import Readout
from drafttrain.core.types import TargetSpec
from drafttrain.runtime.untrusted_input import shown
from drafttrain.target.pretrained.adapter import check_adapter
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.limits import final_norm_of, limits_of, rope_theta_of
from drafttrain.target.pretrained.models import (
    fingerprint,
    load_generation_config,
    load_model_config,
    load_tokenizer,
)

NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def open_target(config: ModelConfig) -> tuple[Any, Any, TargetSpec]:
    """Return Transformers' configuration of a target, its tokenizer and its specification.

    No weight is read or downloaded, so the fingerprint is still empty: see `with_fingerprint`.
    ValueError for what cannot be a target.
    """
    model_config, tokenizer = load_model_config(config), load_tokenizer(config)
    generation = load_generation_config(config)
    return model_config, tokenizer, describe(config, model_config, generation, tokenizer)


def with_fingerprint(
    spec: TargetSpec, config: ModelConfig, dtype: torch.dtype, device: str
) -> TargetSpec:
    """Return the specification with the fingerprint of the weights, which must be there."""
    return replace(spec, fingerprint=fingerprint(config, dtype, device))


def describe(config: ModelConfig, model_config: Any, generation: Any, tokenizer: Any) -> TargetSpec:
    """Return the TargetSpec of a Transformers configuration.

    `eos_token_ids` joins those of all three sources: in chat models they differ, and each ends an
    answer. ValueError if the model cannot be a target, lacks a size that drafters need, or is not
    the one that model.adapter is for.
    """
    text = model_config.get_text_config(decoder=True)
    limits = limits_of(config, model_config)
    check_adapter(config, model_config)
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = {name: _needed(config, text, name) for name in needed}
    heads = sizes["num_attention_heads"]
    stated = [getattr(text, name, None) for name in NORM_EPS]
    return TargetSpec(
        **sizes,
        name=config.label,
        fingerprint="",  # of the weights: `with_fingerprint`
        architecture=text.model_type,
        num_layers=_needed(config, text, "num_hidden_layers"),
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or sizes["hidden_size"] // heads,
        # OLMo states none: its norms use torch's default. Only drafters use this value.
        rms_norm_eps=next((float(eps) for eps in stated if eps is not None), 1e-5),
        rope_theta=rope_theta_of(text),
        max_positions=limits.positions,
        embedding_scale=limits.embedding_scale,
        limited_by=limits.reason,
        eos_token_ids=_eos(generation, text, tokenizer),
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
        unused_token_id=_unused(sizes["vocab_size"], tokenizer),
    )


def read_out(model: Any) -> Readout:
    """Return the readout of a Transformers causal language model; tied weights share a tensor."""
    text = model.config.get_text_config(decoder=True)
    embedder, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise ValueError(
            f"model.path must hold a target whose head is not quantised, as drafters share it, got "
            f"{shown(type(head).__name__)} in {shown(model.config.name_or_path)}; choose a "
            "checkpoint whose quantisation leaves out lm_head"
        )
    embedding = embedder.weight.detach()
    tied = weight.data_ptr() == embedder.weight.data_ptr()
    scale = getattr(embedder, "embed_scale", None)  # Gemma rounds it to the weights' dtype
    if scale is None:
        scale = getattr(text, "embedding_multiplier", None) or 1.0  # Granite
    elif isinstance(scale, torch.Tensor):
        scale = scale.to(embedding.dtype).item()
    logit_scale = getattr(text, "logit_scale", None) or 1.0  # Cohere
    return Readout(
        embedding,
        embedding if tied else weight.detach(),
        norm=_gain(final_norm_of(model.get_decoder()), embedding),
        head_bias=None if head.bias is None else head.bias.detach(),
        embedding_scale=float(scale),
        logit_scale=logit_scale / (getattr(text, "logits_scaling", None) or 1.0),  # Granite
        soft_cap=getattr(text, "final_logit_softcapping", None),
    )


def _gain(norm: nn.Module, like: torch.Tensor) -> torch.Tensor | None:
    # The norm's gain, however it is stored (Gemma stores it minus 1): an input of alternating
    # signs has mean 0 and root mean square 1, so normalising does not change it.
    signs = torch.ones(like.shape[1], dtype=like.dtype, device=like.device)
    signs[1::2] = -1
    with torch.no_grad():
        gain = norm(signs[None])[0] * signs
    weight = getattr(norm, "weight", None)
    if isinstance(weight, torch.Tensor) and torch.allclose(weight, gain, rtol=1e-2, atol=1e-4):
        return weight.detach()  # to the last bit
    return gain


def _needed(config: ModelConfig, text: Any, name: str) -> int:
    try:
        value = getattr(text, name)
    except AttributeError:  # Transformers raises a kind of it where layers differ, too
        value = None
    if type(value) is not int or value < 1:
        raise ValueError(
            f"model={config.name} ({shown(text.model_type)}) cannot be a target: its configuration"
            f" must state one {name} for all layers, from which drafters take theirs, got"
            f" {shown(value)}; choose another model"
        )
    return value


def _unused(vocab_size: int, tokenizer: Any) -> int | None:
    """Return the last id, if no token has it: many embeddings are padded to a round size."""
    if tokenizer is None:  # a plan reads none
        return None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    return vocab_size - 1 if largest < vocab_size - 1 else None


def _eos(*sources: Any) -> tuple[int, ...]:
    found: list[int] = []
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        values = value if isinstance(value, list | tuple) else [value]
        found += [item for item in values if item is not None and item not in found]
    return tuple(found)
