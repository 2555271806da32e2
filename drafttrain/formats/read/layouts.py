"""What config.json and the tensors of EAGLE drafters mean, in this package's settings.

Missing keys take Transformers' defaults, not the target's values: engines read a drafter's file as
a LlamaConfig, so an absent rope_theta is 10,000 even where the target's is 500,000.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.base import DrafterConfig
from drafttrain.drafters.eagle import EagleConfig, rescaled
from drafttrain.drafters.eagle3 import Eagle3Config
from drafttrain.drafters.shared.layer import ROPE_SCALINGS
from drafttrain.formats.read.folder import Folder
from drafttrain.formats.read.values import MAX_HEADS, MAX_POSITIONS, MAX_WIDTH, Values, is_number
from drafttrain.runtime.untrusted_input import shown

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # one layer of theirs computes the same
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Reading:
    """A file in this package's terms. `declared` is the target that the file says it is for."""

    config: DrafterConfig
    declared: TargetSpec
    tensors: dict[str, Tensor]  # by the drafter's own names
    spelled: dict[str, str]  # beginnings of own names -> as the file spells them
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def name_in_file(self, own: str) -> str:
        """Return the name of a tensor as the file spells it."""
        for mine, theirs in self.spelled.items():
            if own.startswith(mine):
                return theirs + own.removeprefix(mine)
        return own


class Unfit(Exception):
    """The file cannot be read as a drafter at all; holds every reason."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__("; ".join(complaints))
        self.complaints = complaints


def read_eagle3(
    folder: Folder, base: Eagle3Config, spec: TargetSpec, layers: list[int] | None
) -> Reading:
    """Read the native layout or, where there is a transformer_layer_config, speculators' format.

    `layers` overrides what the file says about captured layers. Raises Unfit.
    """
    top = Values(folder.config)
    speculators = "speculators_model_type" in top.raw
    raw = top.raw.get("transformer_layer_config") if speculators else top.raw
    nested = Values(top.mapping("eagle_config"), top.complaints)
    if not isinstance(raw, dict) or top.complaints:
        raise Unfit(["config.json's transformer_layer_config and eagle_config must be objects"])
    prefix = "layers.0." if any(n.startswith("layers.0.") for n in folder.names) else "midlayer."
    layer = Values(raw, top.complaints)
    settings = _layer(layer, folder.names, prefix, qwen3_norms=speculators)
    if nested.raw.get("use_aux_hidden_state") is False:
        raise Unfit(["eagle_config.use_aux_hidden_state must be true: EAGLE-3 reads fused layers"])
    vocab, hidden = layer.vocabulary("vocab_size"), layer.integer("hidden_size", MAX_WIDTH)
    read_width = top.integer("target_hidden_size", MAX_WIDTH, hidden)
    draft_vocab = top.vocabulary("draft_vocab_size", vocab, vocab)
    ids, notes = _layer_ids(top.raw, nested.raw, spec, layers)
    # Absent, vLLM takes it for true in speculators' format and for false in the native one.
    before_residual = top.flag("norm_before_residual", speculators)
    before_fc = (nested if "norm_before_fc" in nested.raw else top).flag("norm_before_fc", False)
    fc_norm, norm_output = top.flag("fc_norm", False), top.flag("norm_output", False)
    if top.complaints:
        raise Unfit(top.complaints)
    config = replace(
        base,
        **settings,
        layers=ids,
        hidden_size=hidden,
        own_embedding="embed_tokens.weight" in folder.names or read_width != hidden,
        norm_before_residual=before_residual,
        norm_before_fc=before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )
    if speculators and "norm_before_residual" not in top.raw:
        notes.append(
            "norm_before_residual is absent and taken as true, as vLLM does; speculators itself "
            "takes false: write into config.json what it was trained with"
        )
    tensors = {
        "midlayer." + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
        for name, tensor in folder.tensors().items()
        if not name.startswith("verifier_")  # copies of the target's
    }
    declared = replace(
        spec,
        vocab_size=vocab,
        hidden_size=read_width,
        num_layers=max(spec.num_layers, *ids),
    )
    spelled = {"midlayer.": prefix, "target_ids": "d2t"}
    reading = Reading(config, declared, tensors, spelled, notes=notes)
    reading.complaints = misfits(spec, vocab, read_width)
    reading.complaints += [
        f"layer {layer} is not one of {spec.name}'s 0..{spec.num_layers}"
        for layer in ids
        if not 0 <= layer <= spec.num_layers
    ]
    fused = tensors.get("fc.weight")
    fused_layers, rest = len(ids), 0
    if fused is not None and fused.dim():
        fused_layers, rest = divmod(fused.shape[-1], read_width)
    if fused_layers != len(ids) and not rest:
        reading.complaints.append(
            f"fc.weight fuses {fused_layers} layers, but {len(ids)} are named ({ids}); name "
            "those it was trained on, drafter.layers=[...]"
        )
    _reduced_vocabulary(reading, draft_vocab, vocab)
    return reading


def read_eagle(folder: Folder, base: EagleConfig, spec: TargetSpec) -> Reading:
    """Read SafeAILab's layout of EAGLE-1 (and EAGLE-2, which drafts trees with the same weights).

    A bias of fc, published ones have it, is computed with. Raises Unfit.
    """
    raw = Values(folder.config)
    settings = _layer(raw, folder.names, "layers.0.", qwen3_norms=False)
    bias = raw.flag("bias", False)
    vocab, hidden = raw.vocabulary("vocab_size"), raw.integer("hidden_size", MAX_WIDTH)
    if raw.complaints:
        raise Unfit(raw.complaints)
    config = replace(
        base,
        **settings,
        fc_bias="fc.bias" in folder.names or bias,
        own_embedding="embed_tokens.weight" in folder.names,
    )
    declared = replace(spec, vocab_size=vocab, hidden_size=hidden)
    tensors = folder.tensors()
    if not config.own_embedding:
        tensors = rescaled(tensors, 1 / spec.embedding_scale)
    return Reading(config, declared, tensors, {}, misfits(spec, vocab, hidden))


def misfits(spec: TargetSpec, vocab_size: int, hidden_size: int) -> list[str]:
    """Return in what a drafter's idea of its target differs from the target."""
    complaints = []
    if vocab_size != spec.vocab_size:
        complaints.append(
            f"it is for a vocabulary of {vocab_size:,} tokens, {spec.name} has {spec.vocab_size:,}"
        )
    if hidden_size != spec.hidden_size:
        complaints.append(
            f"it reads hidden states {hidden_size:,} wide, {spec.name}'s are {spec.hidden_size:,}"
        )
    return complaints


def _layer(values: Values, names: frozenset[str], prefix: str, qwen3_norms: bool) -> dict[str, Any]:
    """Return the settings of the decoder layer; Unfit names every key that cannot be followed."""
    hidden = values.integer("hidden_size", MAX_WIDTH)
    intermediate = values.integer("intermediate_size", MAX_WIDTH)
    heads = values.integer("num_attention_heads", MAX_HEADS)
    values.vocabulary("vocab_size")
    model_type = values.raw.get("model_type") or "llama"
    if model_type not in MODEL_TYPES:
        values.complaints.append(
            f"config.json's model_type must be one of {', '.join(MODEL_TYPES)}, "
            f"got {shown(model_type)}"
        )
    values.exactly("num_hidden_layers", 1)
    values.exactly("hidden_act", "silu")
    values.exactly("mlp_bias", False)
    values.exactly("logit_scale", 1.0)
    theta, scaling = _rope(values)
    # SafeAILab's name for it, in drafters of Qwen2.
    bias = values.flag("attention_bias", False) or values.flag("qkv_bias", False)
    norms = f"{prefix}self_attn.q_norm.weight" in names
    settings = {
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": values.integer("num_key_value_heads", MAX_HEADS, heads),
        "head_dim": values.integer("head_dim", MAX_HEADS, max(1, hidden // heads)),
        "rms_norm_eps": values.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": bias,
        "attention_output_bias": bias and f"{prefix}self_attn.o_proj.bias" in names,
        "qk_norm": model_type == "qwen3" and (norms or qwen3_norms),
    }
    if values.complaints:
        raise Unfit(values.complaints)
    return settings


def _rope(values: Values) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling of the rotary positions: Transformers 5's spelling, else 4's."""
    raw, complaints = values.raw, values.complaints
    given = dict(values.mapping("rope_parameters") or values.mapping("rope_scaling"))
    theta = values.number("rope_theta", 10000.0)
    theta = Values(given, complaints).number("rope_theta", theta)
    given.pop("rope_theta", None)
    kinds = given.pop("rope_type", None), given.pop("type", None)
    kind = kinds[0] or kinds[1] or "default"
    share = given.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        complaints.append(f"config.json's partial_rotary_factor must be 1.0, got {shown(share)}")
    if kind == "default":
        return theta, None
    if kind not in ROPE_SCALINGS:
        complaints.append(
            f"config.json's rope_type must be one of default, {', '.join(ROPE_SCALINGS)}, "
            f"got {shown(kind)}"
        )
    if kind != "linear" and raw.get("max_position_embeddings"):
        positions = values.integer("max_position_embeddings", MAX_POSITIONS)
        given.setdefault("original_max_position_embeddings", positions)
    needed = {"linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings")}
    llama3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for key in needed.get(str(kind), llama3 if kind == "llama3" else ()):
        if not is_number(given.get(key)) or given[key] <= 0:
            complaints.append(
                f"config.json's rope_scaling must hold {key} for rope_type {kind}, "
                f"got {shown(repr(given.get(key)))}"
            )
    for key, value in given.items():
        if value is not None and not isinstance(value, bool) and not is_number(value):
            complaints.append(
                f"config.json's rope_scaling must hold numbers, got {shown(key)}={shown(value)}"
            )
    if kind == "llama3" and given.get("low_freq_factor") == given.get("high_freq_factor"):
        complaints.append(
            "config.json's rope_scaling must have high_freq_factor above low_freq_factor"
        )
    return theta, {"rope_type": kind, **given}


def _layer_ids(
    top: dict[str, Any], nested: dict[str, Any], spec: TargetSpec, wanted: list[int] | None
) -> tuple[list[int], list[str]]:
    """Return the captured layers, and a note where engines would disagree about them."""
    usual = [2, spec.num_layers // 2, spec.num_layers - 3]
    sources: list[tuple[str, Any]] = [
        ("drafter.layers", wanted),
        (f"config.json's {LAYER_IDS}", top.get(LAYER_IDS)),
        (f"config.json's eagle_config.{LAYER_IDS}", nested.get(LAYER_IDS)),
        (f"the default for {spec.num_layers} layers (2, L/2, L-3)", usual),
    ]
    where, ids = next(source for source in sources if source[1] is not None)
    if not (isinstance(ids, list) and ids and all(type(layer) is int for layer in ids)):
        raise Unfit([f"{where} must be a list of integers, got {shown(repr(ids))}"])
    if len(ids) > spec.num_layers + 1 or max(map(abs, ids)) > MAX_WIDTH:
        raise Unfit([f"{where} must be layers of {spec.name}'s, got {shown(ids)}"])
    if len(set(ids)) < len(ids):
        raise Unfit(
            [f"{where} repeats a layer, {ids}: name those it was trained on, drafter.layers=[...]"]
        )
    notes = [f"reads layers {sorted(ids)}, by {where}"]
    if "eagle_config" in where:
        shifted = ",".join(str(layer + 1) for layer in sorted(ids))
        notes[0] += (
            ", as vLLM takes it; SGLang adds 1 to each: drafter.layers=["
            f"{shifted}] where that is what it was trained on"
        )
    return sorted(ids), notes


def _reduced_vocabulary(reading: Reading, size: int, vocab_size: int) -> None:
    """Turn d2t, an offset, into the ids that the drafter can say; complain where it cannot be."""
    tensors = reading.tensors
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if size != vocab_size:
            reading.complaints.append(
                f"d2t is missing, which maps its {size:,} tokens to the target's {vocab_size:,}; "
                "engines would draft the first ids"
            )
            tensors["target_ids"] = torch.arange(size)  # so that the head's shape is checked too
        return
    if d2t.shape != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        reading.complaints.append(
            f"d2t must be {size:,} integers (draft_vocab_size), got {list(d2t.shape)} "
            f"of {d2t.dtype}"
        )
        tensors["target_ids"] = torch.arange(size)
        return
    ids = d2t.long() + torch.arange(size)
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not (inside and ascending):
        own = bool((d2t[1:] > d2t[:-1]).all()) and 0 <= int(d2t[0]) and int(d2t[-1]) < vocab_size
        reading.complaints.append(
            f"d2t must be an offset (target id = i + d2t[i]) that gives ascending ids below "
            f"{vocab_size:,}, got {int(ids.min()):,}..{int(ids.max()):,}"
            + ("" if ascending else ", not ascending")
            + ("; it looks like the ids themselves" if own else "")
        )
        ids = torch.arange(size)
    elif t2d is not None:
        marked = t2d.bool().nonzero().squeeze(-1) if t2d.dim() == 1 else ids[:0]
        if len(t2d) != vocab_size or not torch.equal(marked, ids):
            reading.complaints.append("t2d must mark exactly the ids that d2t gives")
    if size != vocab_size:
        tensors["target_ids"] = ids
