"""Small random models of many architectures: whatever their configurations tell apart."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from builders import model_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from drafttrain.target.describe import describe
from drafttrain.target.model import Target
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.models import attention_of

VOCAB, POSITIONS = 97, 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,  # wide enough that the greedy choice is never a tie
    "bos_token_id": 1,
    "eos_token_id": 5,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {  # multi-head latent attention
    **EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": None,
}
SLIDING = ["sliding_attention", "full_attention"]
MIXED = {"sliding_window": POSITIONS, "layer_types": SLIDING}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Rotary positions as Transformers 5 spells them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **more}}


def old_rope(kind: str, **more: Any) -> dict[str, Any]:
    """The same as checkpoints from before spell it."""
    return {"rope_theta": 100.0, "rope_scaling": {"type": kind, **more}}


PAIRS = 4  # of a head: one factor each
YARN = {"factor": 2.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0] * PAIRS, "long_factor": [4.0] * PAIRS}

MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3}

# What is exact up to POSITIONS: name -> Transformers' model_type, what its configuration has.
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama of 1 layer": ("llama", {"num_hidden_layers": 1}),
    "llama of 4 layers": ("llama", {"num_hidden_layers": 4}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "rope linear": ("llama", rope("linear", factor=2.0)),
    "rope dynamic": ("llama", rope("dynamic", factor=2.0)),
    "rope yarn": ("llama", rope("yarn", **YARN)),
    "rope llama3": ("llama", rope("llama3", **LLAMA3)),
    "rope proportional": ("llama", rope("proportional", partial_rotary_factor=0.5)),
    "old rope linear": ("llama", old_rope("linear", factor=2.0)),
    "old rope dynamic": ("llama", old_rope("dynamic", factor=2.0)),
    "old rope yarn": ("llama", old_rope("yarn", **YARN)),
    "old rope llama3": ("llama", old_rope("llama3", **LLAMA3)),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**MIXED, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**MIXED, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", MIXED),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {**MIXED, "logit_scale": 0.25}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.5,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "glm4": ("glm4", {}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2_moe": ("qwen2_moe", EXPERTS),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "gpt_oss": ("gpt_oss", {**EXPERTS, **MIXED}),  # attention sinks
    "phi": ("phi", {"partial_rotary_factor": 0.5}),  # a bias in the head
    "gpt_neox": ("gpt_neox", {}),
    "starcoder2": ("starcoder2", {}),
    "nemotron": ("nemotron", {}),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4": ("exaone4", MIXED),
    "seed_oss": ("seed_oss", {}),
}
# The same of what few people have; tested with the slow ones.
RARE: dict[str, tuple[str, dict[str, Any]]] = {
    "doge": ("doge", {"keep_window_size": 15}),  # chooses what it reads, alike in any passes
    "afmoe": ("afmoe", {**EXPERTS, **MIXED}),
    **{
        kind: (kind, {})
        for kind in (
            *("apertus", "arcee", "bitnet", "diffllama", "glm", "helium", "internlm3"),
            *("hunyuan_v1_dense", "hyperclovax", "iquestcoder", "jais2", "ministral3", "persimmon"),
        )
    },
    **{kind: (kind, MIXED) for kind in ("cwm", "ministral", "vaultgemma", "granite_swa")},
    **{
        kind: (kind, EXPERTS)
        for kind in (
            *("dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared"),
            *("hunyuan_v1_moe", "jetmoe", "minimax_m2", "olmoe", "phimoe"),
        )
    },
    **{kind: (kind, LATENT) for kind in ("deepseek_v2", "minicpm3", "youtu")},
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | {"head_dim": 8}),
}
# Exact up to a position: name -> model_type, configuration, the position, what the reason names.
CAPPED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "longrope": (
        "llama",
        rope("longrope", original_max_position_embeddings=14, **LONG),
        14,
        "longrope",
    ),
    "longrope of phi3": (
        "phi3",
        {"original_max_position_embeddings": 14, **rope("longrope", **LONG)},
        14,
        "longrope",
    ),
    "old longrope": (
        "phi3",
        {"original_max_position_embeddings": 14, **old_rope("longrope", **LONG)},
        14,
        "longrope",
    ),
    "longrope of phimoe": (
        "phimoe",
        {
            **EXPERTS,
            **rope("longrope", original_max_position_embeddings=14, **MSCALES, **LONG),
        },
        14,
        "longrope",
    ),
    "a window in all layers": ("mistral", {"sliding_window": 15}, 15, "sliding_window=15"),
    "a window in some layers": ("gemma2", {**MIXED, "sliding_window": 15}, 15, "sliding_window=15"),
    "two ropes and a window": (
        "gemma3_text",
        {**MIXED, "sliding_window": 15, "query_pre_attn_scalar": 8},
        15,
        "sliding_window=15",
    ),
    "sinks and a window": (
        "gpt_oss",
        {**EXPERTS, **MIXED, "sliding_window": 15},
        15,
        "sliding_window=15",
    ),
    "a window of qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 15, "max_window_layers": 1},
        15,
        "sliding_window=15",
    ),
}


def build(
    kind: str, changes: dict[str, Any], config: ModelConfig | None = None, seed: int = 0
) -> Target:
    """Return a random target, tried as every target is when it is loaded."""
    settings = settings_of(kind, changes)
    config = config or model_config_of()
    spec = dataclasses.replace(describe(config, settings, None, None), fingerprint="random")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            settings, attn_implementation=attention_of(settings)
        )
        for weight in model.parameters():
            if weight.dim() == 1:  # norms and biases start at one or zero, and would hide a mistake
                torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.1)
    target = Target(model, None, spec)
    target.check_readout()
    return target


def settings_of(kind: str, changes: dict[str, Any]) -> PreTrainedConfig:
    """Return Transformers' configuration of such a target.

    Of what all share it has the keys that its own kind has: vLLM reads some of the others.
    """
    has, shared = CONFIG_MAPPING[kind](), {**SHAPE, **EXPERTS}
    asked = SHAPE | changes
    own = [key for key in asked if key not in shared or hasattr(has, key)]
    return CONFIG_MAPPING[kind](**{key: asked[key] for key in own})


def model_config_of(**changes: Any) -> ModelConfig:
    """The section `model` of such a target."""
    return dataclasses.replace(model_config(Path("/unused")), **changes)
