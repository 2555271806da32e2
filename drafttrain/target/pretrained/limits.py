"""Which models can be targets, and up to which position: exact, capped, or refused by name.

A model is exact if one pass over several tokens computes the same as a pass over each: rejected
drafts must leave no trace in the cache, and what a position contributes must not depend on the
length of the text. `Target.check_readout` then checks the model itself.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, shown
from drafttrain.target.pretrained.config import ModelConfig

# Frequencies that are the same at every length. "dynamic" (NTK) changes them past
# max_position_embeddings alone, which is the limit anyway.
STEADY_ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "proportional")
LENGTH_ROPES = ("longrope",)  # other frequencies past the original length, for all positions
# Kinds of layers whose cache holds keys and values of every position, and what bounds their reach.
REACH = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
# Sparse attention, which selects the positions it reads: only short texts are read in full.
CHOOSY = ("index_topk", "index_topk_blocks")
# The sizes in config.json, and the largest value accepted for each.
SIZES = {
    "vocab_size": MAX_VOCABULARY,
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1 << 10,  # more layers take seconds to build, even without weights
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 32,
}
NORMS = ("norm", "final_layernorm", "final_layer_norm")


@dataclass(frozen=True)
class Limits:
    """How many positions a model can use exactly, and why they are fewer than it was made for."""

    positions: int
    reason: str = ""
    embedding_scale: float = 1.0  # what the model multiplies embeddings by


def limits_of(config: ModelConfig, model_config: Any, role: str = "target") -> Limits:
    """Return up to which position a model is exact in the decode loop.

    Raises ValueError, naming the reason, for a model that is exact at no length or is not built as
    Llama is, and where model.max_positions asks for more positions than there are.
    """
    text = model_config.get_text_config(decoder=True)
    who = f"model={config.name} ({shown(text.model_type)}) cannot be a {role}"
    kinds = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    known = type(model_config) in kinds
    if not known and not config.trust_remote_code:
        raise ValueError(f"{who}: Transformers knows it, but not as a causal language model")
    problem = None
    if known and getattr(kinds[type(model_config)], "_is_stateful", False):
        problem = (
            "it keeps a recurrent state (state-space or linear attention), from which rejected"
            " tokens cannot be removed; choose a model with attention in every layer"
        )
    elif getattr(text, "is_heterogeneous", False):
        problem = (
            "its layers differ in shape, and drafters need one shape for all; choose another model"
        )
    if problem is not None:
        raise ValueError(f"{who}: {problem}")
    limits = exact_positions(text, who)
    if role == "target":
        if not _ropes(text) or getattr(text, "alibi", False):
            raise ValueError(
                f"{who}: it must have rotary positions (rope_theta), and its configuration states"
                " others (learned ones, ALiBi), for which there are no drafters; choose another"
                " model"
            )
        limits = replace(limits, embedding_scale=_embedding_scale(config, model_config, who))
    asked = config.max_positions
    if asked is not None and asked > limits.positions:
        why = limits.reason or f"what model={config.name} was made for"
        raise ValueError(
            f"model.max_positions must be at most {limits.positions} ({why}), got {asked}"
        )
    if asked is not None and asked < limits.positions:
        return replace(limits, positions=asked, reason=f"model.max_positions={asked}")
    return limits


def exact_positions(text: Any, who: str) -> Limits:
    """Return up to which position a decoder of this configuration is exact, however passes are cut.

    Raises ValueError, whose message begins with `who`, if it is exact at no length.
    """
    for problem in _inexact(text):
        raise ValueError(f"{who}: {problem}")
    made_for = text.max_position_embeddings
    bounds = [Limits(made_for)]
    for kind, rope in _ropes(text):
        if kind in LENGTH_ROPES:
            original = rope.get("original_max_position_embeddings") or made_for
            why = f"{kind} rotates all positions differently past {original}, the original length"
            bounds.append(Limits(original, why))
    # Without layer_types, a stated window holds for all layers.
    for kind in sorted(set(getattr(text, "layer_types", None) or REACH)):
        field = REACH[kind]
        window = getattr(text, field, None) if field else None
        if window:  # Qwen2 writes 0 for none
            bounds.append(Limits(window, f"{field}={window}: past it a token reads less than all"))
    return min(bounds, key=lambda bound: bound.positions)  # the first of equals


def _inexact(text: Any) -> Iterator[str]:
    """Yield each reason why a decoder of this configuration is exact at no length."""
    if getattr(text, "max_position_embeddings", None) is None:
        yield (
            "its configuration states no max_position_embeddings, so how long a text may be is"
            " not known; choose another model"
        )
    for kind, _ in _ropes(text):
        if kind not in STEADY_ROPES + LENGTH_ROPES:
            yield (
                f"rope_type {shown(kind)} is not known; known are"
                f" {', '.join((*STEADY_ROPES, *LENGTH_ROPES))}; choose another model"
            )
    unknown = set(getattr(text, "layer_types", None) or ()) - set(REACH)
    if unknown:
        yield (
            f"layers of kind {shown(', '.join(sorted(map(str, unknown))))} keep more than the keys"
            " and values of each position, from which rejected tokens cannot be removed; choose a"
            " model with attention in every layer"
        )
    for field in CHOOSY:
        if getattr(text, field, None) is not None:
            yield (
                f"its attention selects {field}={shown(getattr(text, field))} positions, and it is"
                " not known to select the same ones in passes over one and over several tokens;"
                " choose a model that reads all positions"
            )


def check_sizes(raw: dict[str, Any], origin: str, file: str = "config.json's ") -> None:
    """Raise ValueError if a size in config.json, or of another origin, is impossible."""
    kind = raw.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ValueError(f"{origin}: config.json's model_type must be a text, got {shown(kind)}")
    inner = raw.get("text_config")
    for stated in (raw, inner if isinstance(inner, dict) else {}):
        for key, most in SIZES.items():
            value = stated.get(key)
            if value is not None and not (type(value) is int and 1 <= value <= most):
                limit = f"most {most:,}" if type(value) is int and value > most else "least 1"
                raise ValueError(
                    f"{origin}: {file}{key} must be a whole number of at {limit}, got"
                    f" {shown(value)}"
                )


def final_norm_of(decoder: Any) -> Any:
    """Return the final norm, whose output the head reads; None if none is known."""
    found = (getattr(decoder, name, None) for name in NORMS)
    return next((norm for norm in found if norm is not None), None)


def _ropes(text: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the rope type and parameters: one pair, or one for each kind of layer."""
    stated = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [part for part in stated.values() if isinstance(part, dict)]
    theta = getattr(text, "rope_theta", None)
    return [
        (rope.get("rope_type") or rope.get("type") or "default", {"rope_theta": theta} | rope)
        for rope in nested or [stated]
        if rope or theta
    ]


def rope_theta_of(text: Any) -> float:
    """Return the base of the rotary frequencies; if there are several, that of full attention."""
    stated = getattr(text, "rope_parameters", None) or {}
    full = stated.get("full_attention")
    rope = full if isinstance(full, dict) else _ropes(text)[0][1]
    return float(rope["rope_theta"])


def rope_scaling_of(text: Any) -> dict[str, Any] | None:
    """Return the scaling of the rotary positions, of full attention if there are several."""
    stated = getattr(text, "rope_parameters", None) or {}
    full = stated.get("full_attention")
    kind, rope = _ropes(text)[0]
    if isinstance(full, dict):
        kind, rope = full.get("rope_type") or "default", full
    numbers = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "type")}
    return None if kind == "default" else {"rope_type": kind, **numbers}


def _embedding_scale(config: ModelConfig, model_config: Any, who: str) -> float:
    # Read from a model without weights, whose structure is checked on the way.
    try:
        model = without_weights(model_config, config.trust_remote_code)
    except Exception as error:  # the model's code raises many errors for sizes that do not fit
        raise ValueError(
            f"{who}: no model can be made of its configuration: {shown(error, 400)}; check its"
            " config.json"
        ) from error
    check_structure(model, who)
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", None)  # Gemma
    text = model_config.get_text_config(decoder=True)
    return float(scale or getattr(text, "embedding_multiplier", None) or 1.0)  # Granite


def without_weights(model_config: Any, trust_code: bool) -> Any:
    """Return the model of a configuration, on the meta device, whatever kernels are installed."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config), trust_remote_code=trust_code, attn_implementation="eager"
        )


def check_structure(model: Any, who: str) -> None:
    """Raise ValueError unless a model's decoder is built as Llama's."""
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers") or final_norm_of(decoder) is None:
        raise ValueError(
            f"{who}: it must be a decoder with `layers` and a final `norm`, as Llama is; other"
            " structures are not supported; choose another model"
        )
