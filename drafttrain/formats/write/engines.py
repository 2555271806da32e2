"""Which engine serves which drafter for which target: what was read in them, and what was tried.

Targets are named by Transformers' model_type. An engine that cannot, or that would draft otherwise
than was trained, gets no command but a line that says why.
"""

from typing import Any

from drafttrain.core.types import TargetSpec

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
SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "draft_model": "STANDALONE"}


def cannot_serve(
    method: str, settings: dict[str, Any], own_embedding: bool, spec: TargetSpec
) -> dict[str, str]:
    """Return, by engine, why it cannot serve a drafter with its target; those that can are absent.

    settings: the drafter's config.json. own_embedding: whether its file holds an embedding.
    """
    reasons = {
        "vLLM": _vllm(method, spec),
        "SGLang": _sglang(method, settings, own_embedding, spec),
    }
    return {engine: reason for engine, reason in reasons.items() if reason}


def _vllm(method: str, spec: TargetSpec) -> str:
    kind = spec.architecture
    if kind in VLLM_WRONG:
        return f"{VLLM} does not compute {kind} targets as Transformers does"
    if kind not in VLLM_TARGETS:
        return f"{VLLM} has no class of its own for {kind} targets, and none was tried with it"
    if method == "eagle" and kind in VLLM_HEADLESS:
        return f"{VLLM} finds no head of {kind} targets to share with EAGLE drafters"
    if method in ("eagle", "eagle3") and kind in VLLM_ROTATES:
        return f"{VLLM} rotates the positions of a drafter as those of its {kind} target"
    if method == "eagle3" and kind not in VLLM_EAGLE3 | VLLM_TRANSFORMERS:
        return f"{VLLM} has no EAGLE-3 for {kind} targets; drafter=eagle is served with them"
    return ""


def _sglang(method: str, settings: dict[str, Any], own_embedding: bool, spec: TargetSpec) -> str:
    kind = spec.architecture
    if method not in SGLANG_ALGORITHMS:
        return f"{SGLANG} has no {method.capitalize()}"
    if method == "draft_model":
        return ""
    wide = bool(settings.get("target_hidden_size"))
    if own_embedding and not wide:
        return (
            f"{SGLANG} overwrites a drafter's own embedding by the target's; train with"
            " drafter.own_embedding=false to serve with it"
        )
    if spec.embedding_scale != 1.0:
        return f"{SGLANG} was not tried with targets that scale embeddings ({kind})"
    if method == "eagle" and kind not in SGLANG_EAGLE:
        return f"{SGLANG} does not hand the embedding of {kind} targets to EAGLE drafters"
    known = SGLANG_EAGLE3
    if "eagle_aux_hidden_state_layer_ids" not in settings:
        known |= SGLANG_EAGLE3_DEFAULT_LAYERS
    if method == "eagle3" and kind not in known:
        return f"{SGLANG} is not known to read these layers of {kind} targets for EAGLE-3"
    return ""
