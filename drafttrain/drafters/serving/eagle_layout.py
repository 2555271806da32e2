"""EAGLE-1's files, and the settings in config.json of an EAGLE drafter's one decoder layer.

Missing keys take Transformers' defaults, not the target's values: engines read a drafter's file as
a LlamaConfig, so an absent rope_theta is 10,000 even if the target's is 500,000.
"""

import re
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.engines import (
    SGLANG,
    SGLANG_EAGLE,
    VLLM,
    VLLM_HEADLESS,
    VLLM_ROTATES,
    hands_on_divided,
)
from drafttrain.drafters.serving.layout import (
    DECLARED,
    Config,
    Expected,
    Files,
    Reading,
    ServedLayout,
    Sign,
    Tensors,
    Unfit,
    architectures_of,
    misfits,
    tensor_sign,
)
from drafttrain.drafters.serving.values import MAX_HEADS, MAX_POSITIONS, MAX_WIDTH, Values
from drafttrain.drafters.shared.layer import ROPE_SCALINGS, wrong_scaling
from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, shown

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # their decoder layers compute the same


class OneLayer(ServedLayout):
    """The assumptions of engines about a drafter of one decoder layer, named as Llama's."""

    false_by_default: ClassVar[tuple[str, ...]] = ("bias",)
    settings: ClassVar = {"attention_bias": "attention_bias"}
    eight_bits: ClassVar[re.Pattern[str] | None] = re.compile(
        r"(fc|(midlayer|layers\.\d+)\.(self_attn|mlp)\.\w+_proj)\.weight"
    )

    def required_keys(self, config: Config, spec: TargetSpec) -> Config:
        width = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
        return {
            "model_type": "llama",
            "num_hidden_layers": 1,  # SGLang reads a second EAGLE-3 layer differently from vLLM
            "tie_word_embeddings": False,  # true would draft with the embedding for a head
            "attention_bias": False,
            "bias": False,  # engines apply it to attention too, and find no bias to load
            "mlp_bias": False,
            "hidden_act": "silu",
            "architectures": list(self.architectures),
            "vocab_size": spec.vocab_size,
            width: spec.hidden_size,
        }

    def vllm_refuses(self, spec: TargetSpec) -> str:
        if spec.architecture not in VLLM_ROTATES:
            return ""
        return (
            f"{VLLM} rotates a drafter's positions as it does those of {spec.architecture} targets"
        )

    def sglang_refuses(self, config: Config, own_embedding: bool, spec: TargetSpec) -> str:
        if own_embedding and not config.get("target_hidden_size"):
            return (
                f"{SGLANG} overwrites a drafter's own embedding with the target's; train with"
                " drafter.own_embedding=false to serve with it"
            )
        if spec.embedding_scale != 1.0:
            return (
                f"{SGLANG} was not tried with targets that scale embeddings ({spec.architecture})"
            )
        return ""


class EagleLayout(OneLayer):
    """SafeAILab's layout for EAGLE-1 and for EAGLE-2, which drafts trees with the same weights."""

    kind = family = method = "eagle"
    title = "EAGLE-1 in SafeAILab's layout"
    sglang = "EAGLE"
    # SGLang takes the first name that it knows; vLLM can only wrap the second.
    architectures = ("LlamaForCausalLMEagle", "LlamaForCausalLM")

    def recognises(self, files: Files) -> Sign | None:
        """Return the sign of it: often the tensors, as SafeAILab names it LlamaForCausalLM."""
        architectures = architectures_of(files.config)
        if any("Eagle" in name for name in architectures):
            return Sign(DECLARED, f"architectures={architectures}")
        return tensor_sign(files, "fc.weight")

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        """Return the reading of the files; a bias of fc, which published files have, is applied."""
        raw = Values(files.config)
        settings, window = decoder_layer(raw, files.names, "layers.0.", qwen3_norms=False)
        bias = raw.flag("bias", False)
        vocab = raw.integer("vocab_size", MAX_VOCABULARY)
        hidden = raw.integer("hidden_size", MAX_WIDTH)
        if raw.complaints:
            raise Unfit(raw.complaints)
        settings["fc_bias"] = "fc.bias" in files.names or bias
        settings["own_embedding"] = "embed_tokens.weight" in files.names
        settings["scale_embeddings"] = False  # a factor is in fc.weight
        config = replace(base, **settings)
        declared = replace(spec, vocab_size=vocab, hidden_size=hidden)
        tensors = files.tensors()
        if not config.own_embedding:
            tensors = rescaled(tensors, 1 / spec.embedding_scale)
        complaints = misfits(spec, vocab, hidden)
        return Reading(config, declared, tensors, {}, complaints, longest=window)

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        hidden = config["hidden_size"]
        return {
            "fc.weight": Expected((hidden, 2 * hidden)),
            "fc.bias": Expected((hidden,)),
            **layer_tensors(config, "layers.0", hidden),
            "embed_tokens.weight": Expected((config["vocab_size"], hidden), required=False),
        }

    def misread(
        self, config: Config, tensors: Tensors, spec: TargetSpec, captures: tuple[int, ...]
    ) -> list[str]:
        if bool(tensors["fc.bias"].any()):
            return ["fc.bias must be zero: vLLM drops it, SGLang applies it"]
        return []

    def vllm_refuses(self, spec: TargetSpec) -> str:
        if spec.architecture in VLLM_HEADLESS:
            return (
                f"{VLLM} finds no head of {spec.architecture} targets to share with EAGLE drafters"
            )
        return hands_on_divided(spec) or super().vllm_refuses(spec)

    def sglang_refuses(self, config: Config, own_embedding: bool, spec: TargetSpec) -> str:
        kind = spec.architecture
        if reason := super().sglang_refuses(config, own_embedding, spec):
            return reason
        if kind not in SGLANG_EAGLE:
            return f"{SGLANG} does not hand the embedding of {kind} targets to EAGLE drafters"
        return ""

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        if spec.embedding_scale == 1.0:
            return ()
        return (
            f"The target multiplies embeddings by {spec.embedding_scale:.6g}, which vLLM's drafter"
            " does not: that is in the embedding's half of fc.weight.",
        )


def rescaled(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Return the weights with the half of fc that reads embeddings multiplied by `factor`.

    Engines' drafters read the target's embedding table without the factor that the target applies
    (Gemma, Granite), or the drafter's own: served weights have it in fc.weight.
    """
    fused = tensors.get("fc.weight")
    if factor == 1.0 or fused is None or fused.dim() != 2:
        return tensors
    embedding, feature = fused.float().chunk(2, dim=1)
    return tensors | {"fc.weight": torch.cat([embedding * factor, feature], dim=1).to(fused.dtype)}


def layer_tensors(config: Config, prefix: str, input_width: int) -> dict[str, Expected]:
    """Return the tensors of the decoder layer, whose attention reads `input_width` values."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, input_width),
        "self_attn.k_proj": (keys, input_width),
        "self_attn.v_proj": (keys, input_width),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"{prefix}.{name}.weight": Expected(shape) for name, shape in shapes.items()}


def decoder_layer(
    values: Values, names: frozenset[str], prefix: str, qwen3_norms: bool, num_layers: int = 1
) -> tuple[dict[str, Any], int | None]:
    """Return the settings of the decoder layers, and the window that some have (None: none has).

    Unfit names every key that is not supported.
    """
    hidden = values.integer("hidden_size", MAX_WIDTH)
    intermediate = values.integer("intermediate_size", MAX_WIDTH)
    heads = values.integer("num_attention_heads", MAX_HEADS)
    values.integer("vocab_size", MAX_VOCABULARY)
    model_type = values.raw.get("model_type") or "llama"
    if model_type not in MODEL_TYPES:
        values.complaints.append(
            f"config.json's model_type must be one of {', '.join(MODEL_TYPES)}, "
            f"got {shown(model_type)}"
        )
    only = {
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "mlp_bias": False,
        "logit_scale": 1.0,
    }
    for key, wanted in only.items():
        values.exactly(key, wanted)
    window = _window(values, num_layers)
    theta, scaling = _rope(values)
    # qkv_bias is SafeAILab's name for it, in drafters of Qwen2.
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
    return settings, window


def _window(values: Values, num_layers: int) -> int | None:
    """Return how many positions some layer sees at most, None where all see any text whole."""
    kinds, full = values.raw.get("layer_types"), "full_attention"
    sliding = values.flag("use_sliding_window", False)  # without it, `sliding_window` is ignored
    if kinds is not None:
        known = isinstance(kinds, list) and len(kinds) == num_layers
        if not known or any(kind not in (full, "sliding_attention") for kind in kinds):
            values.complaints.append(
                f"config.json's layer_types must be {full} or sliding_attention for each of the "
                f"layers ({num_layers}), got {shown(kinds)}"
            )
            return None
        sliding = sliding or kinds != [full] * num_layers
    return values.integer("sliding_window", MAX_POSITIONS) if sliding else None


def _rope(values: Values) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling of the rotary positions, from Transformers 5's keys, else 4's."""
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
    complaints += [f"config.json's rope_scaling {line}" for line in wrong_scaling(kind, given)]
    return theta, {"rope_type": kind, **given}
