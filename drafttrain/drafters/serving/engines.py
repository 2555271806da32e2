"""Which engine serves which drafter for which target: what was read in them, and what was tried.

Targets are named by Transformers' model_type. An engine that cannot, or that would draft otherwise
than was trained, gets no command but a line that says why.
"""

import json
import shlex

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.layout import Config, ServedLayout

VLLM = "vLLM 0.32.0"
SGLANG = "SGLang 0.5.23"
# Target classes of vLLM that hand over the layers EAGLE-3 reads (SupportsEagle3), its own ones.
VLLM_EAGLE3 = frozenset(
    {"llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "phi3"}
    | {"granite", "granite_swa", "deepseek_v2", "deepseek_v3", "ernie4_5", "minicpm3", "minimax_m2"}
    | {"afmoe", "apertus", "cohere2_moe", "internlm3", "iquestcoder", "laguna", "mimo_v2_flash"}
)
# Those that it runs through Transformers' own code, which hands them over too.
VLLM_TRANSFORMERS = frozenset(
    {"arcee", "cwm", "flex_olmo", "glm", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2"}
    | {"mellum", "olmo", "olmo2", "olmo3", "phi", "seed_oss", "smollm3", "starcoder2"}
)
# Its own classes besides.
VLLM_TARGETS = (
    VLLM_EAGLE3
    | VLLM_TRANSFORMERS
    | {"axk1", "cohere", "cohere2", "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma2"}
    | {"gemma3_text", "glm4", "glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoe_swa"}
    | {"granitemoeshared", "hy_v3", "hyperclovax", "mixtral", "nemotron", "olmoe", "qwen2_moe"}
    | {"stablelm", "vaultgemma"}
)
# Those it runs and that it was seen to get wrong.
VLLM_WRONG = frozenset({"gpt_neox"})  # other text than Transformers', without a drafter too
# Those that have no head of their own to share with EAGLE drafters, which then end with an error.
VLLM_HEADLESS = frozenset({"cohere", "cohere2", "gemma2"})
# Those that turn its rotary embedding, of which it keeps one for equal settings, into their own: a
# drafter's positions would be rotated like theirs, other than it was trained.
VLLM_ROTATES = frozenset({"ernie4_5"})
# Target classes of SGLang that hand over their embedding and head (get_embed_and_head).
SGLANG_EAGLE = frozenset(
    {"apertus", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone4", "exaone_moe", "glm4"}
    | {"glm4_moe", "glm4_moe_lite", "gpt_oss", "hy_v3", "internlm3", "iquestcoder", "laguna"}
    | {"llama", "mellum", "mimo_v2_flash", "minimax_m2", "ministral3", "mistral", "phi3", "qwen2"}
    | {"qwen3", "qwen3_moe"}
)
SGLANG_EAGLE3 = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
SGLANG_EAGLE3_DEFAULT_LAYERS = frozenset({"deepseek_v2", "deepseek_v3", "gpt_oss"})


def cannot_serve(
    layout: ServedLayout, config: Config, own_embedding: bool, spec: TargetSpec
) -> dict[str, str]:
    """Return, by engine, why it cannot serve a drafter with its target; those that can are absent.

    config: the drafter's config.json. own_embedding: whether its file holds an embedding.
    """
    kind = spec.architecture
    if kind in VLLM_WRONG:
        vllm = f"{VLLM} does not compute {kind} targets as Transformers does"
    elif kind not in VLLM_TARGETS:
        vllm = f"{VLLM} has no class of its own for {kind} targets, and none was tried with it"
    else:
        vllm = layout.vllm_refuses(spec)
    if layout.sglang is None:
        sglang = f"{SGLANG} has no {layout.method.capitalize()}"
    else:
        sglang = layout.sglang_refuses(config, own_embedding, spec)
    reasons = {"vLLM": vllm, "SGLang": sglang}
    return {engine: reason for engine, reason in reasons.items() if reason}


def serve_commands(layout: ServedLayout, target: str, model: str, depth: int) -> dict[str, str]:
    """Return the command line of each engine that knows the layout (chains of `depth`)."""
    speculative = {"method": layout.method, "model": model, "num_speculative_tokens": depth}
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    commands = {"vLLM": shlex.join(vllm)}
    if layout.sglang is not None:
        sglang = ["python", "-m", "sglang.launch_server", "--model-path", target]
        sglang += ["--speculative-algorithm", layout.sglang]
        sglang += ["--speculative-draft-model-path", model]
        sglang += ["--speculative-num-steps", str(depth), "--speculative-eagle-topk", "1"]
        sglang += ["--speculative-num-draft-tokens", str(depth + 1)]  # the root is one of them
        commands["SGLang"] = shlex.join(sglang)
    return commands
