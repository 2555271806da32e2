"""Which engine serves which drafter for which target, from the engines' code and from trials.

Targets are named by Transformers' model_type. An engine that cannot serve a drafter, or would draft
differently from training, gets a line that says why, and no command.
"""

import json
import shlex
from pathlib import Path

import torch

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.layout import V1, V2, Config, ServedLayout

VLLM = "vLLM 0.32.0"
SGLANG = "SGLang 0.5.23"
LLAMA_CPP = "llama.cpp 0c1e570"  # that of llama-cpp-python 0.3.36
GREEDY, PROBABILISTIC = "greedy", "probabilistic"  # vLLM's draft_sample_method
# Parts of a drafter's path by which vLLM chooses the method itself, whatever it was given, unless
# that is one of TOLD (SpeculativeConfig.__post_init__ in config/speculative.py).
TELLING = ("eagle-", "eagle3", "dflash", "dspark")
TOLD = frozenset({"eagle", "eagle3", "dflash", "dspark"})
# vLLM's own target classes that expose the layers EAGLE-3 reads (SupportsEagle3).
VLLM_EAGLE3 = frozenset(
    {"llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "phi3"}
    | {"granite", "granite_swa", "deepseek_v2", "deepseek_v3", "ernie4_5", "minicpm3", "minimax_m2"}
    | {"afmoe", "apertus", "cohere2_moe", "internlm3", "iquestcoder", "laguna", "mimo_v2_flash"}
)
# Targets that vLLM runs through Transformers' code, which exposes those layers too.
VLLM_TRANSFORMERS = frozenset(
    {"arcee", "cwm", "flex_olmo", "glm", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2"}
    | {"mellum", "olmo", "olmo2", "olmo3", "phi", "seed_oss", "smollm3", "starcoder2"}
)
# All targets that vLLM was tried with: the above, and its other classes.
VLLM_TARGETS = (
    VLLM_EAGLE3
    | VLLM_TRANSFORMERS
    | {"axk1", "cohere", "cohere2", "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma2"}
    | {"gemma3_text", "glm4", "glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoe_swa"}
    | {"granitemoeshared", "hy_v3", "hyperclovax", "mixtral", "nemotron", "olmoe", "qwen2_moe"}
    | {"stablelm", "vaultgemma"}
)
# Targets that vLLM runs, but with wrong results.
VLLM_WRONG = frozenset({"gpt_neox"})  # its text differs from Transformers', even without a drafter
# Targets without a head of their own to share with EAGLE drafters, which end with an error.
VLLM_HEADLESS = frozenset({"cohere", "cohere2", "gemma2"})
# Targets that modify the rotary embedding, which vLLM shares between equal settings: a drafter's
# positions would be rotated like theirs, not as in training.
VLLM_ROTATES = frozenset({"ernie4_5"})
# Targets whose final hidden states vLLM hands on divided, as its head reads them.
VLLM_DIVIDES = frozenset({"minicpm3"})
# Targets that scale or cap their logits, which vLLM's drafters with the target's head do not.
SCALED = frozenset(
    {"cohere", "cohere2", "cohere2_moe", "gemma2", "granite", "granite_swa", "granitemoe"}
    | {"granitemoe_swa", "granitemoeshared", "hyperclovax", "minicpm3", "vaultgemma"}
)
# SGLang's target classes that expose their embedding and head (get_embed_and_head).
SGLANG_EAGLE = frozenset(
    {"apertus", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone4", "exaone_moe", "glm4"}
    | {"glm4_moe", "glm4_moe_lite", "gpt_oss", "hy_v3", "internlm3", "iquestcoder", "laguna"}
    | {"llama", "mellum", "mimo_v2_flash", "minimax_m2", "ministral3", "mistral", "phi3", "qwen2"}
    | {"qwen3", "qwen3_moe"}
)
SGLANG_EAGLE3 = frozenset(
    {"deepseek_v2", "deepseek_v3", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}
)

# The flag of each engine by which it spreads the target over GPUs; llama.cpp takes all by itself.
SPREADING = {"vLLM": "--tensor-parallel-size", "SGLang": "--tp-size"}

LLAMA_CPP_TARGETS = frozenset({"llama", "qwen3"})  # those that it was tried with
CONVERTER, GGUF = "convert_hf_to_gguf.py", "drafter.gguf"
# The ids that a drafter without its own head proposes, for SGLang's --speculative-token-map; and
# the key of its config.json that says how many they are, which no engine reads.
TOKEN_MAP, DRAFTED_TOKENS = "token_map.pt", "drafted_tokens"
OUT_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # the converter's names


def cannot_serve(
    layout: ServedLayout, config: Config, own_embedding: bool, spec: TargetSpec
) -> dict[str, str]:
    """Return, by engine, why it cannot serve a drafter with its target; others are left out.

    config: the drafter's config.json. own_embedding: whether its file holds an embedding.
    """
    kind = spec.architecture
    if kind in VLLM_WRONG:
        vllm = f"{VLLM} does not compute {kind} targets as Transformers does"
    elif kind not in VLLM_TARGETS:
        vllm = f"{VLLM} was not tried with {kind} targets"
    else:
        vllm = layout.vllm_refuses(spec)
    if layout.sglang is None:
        sglang = f"{SGLANG} has no {layout.title.split(' in ')[0]}"
    else:
        sglang = layout.sglang_refuses(config, own_embedding, spec)
    reasons = {"vLLM": vllm, "SGLang": sglang}
    return {engine: reason for engine, reason in reasons.items() if reason}


def hands_on_divided(spec: TargetSpec) -> str:
    """Return why vLLM serves no drafter of a target's final hidden states; "" if it does."""
    if spec.architecture in VLLM_DIVIDES:
        return f"{VLLM} hands on the final hidden states of {spec.architecture} targets divided"
    return ""


def serve_commands(
    layout: ServedLayout, target: str, model: str, depth: int, draft_sample_method: str = GREEDY
) -> dict[str, str]:
    """Return the command line of each engine that knows the layout (chains of `depth`).

    draft_sample_method: whether vLLM drafts the most likely tokens or samples drafts as it samples
    the target; they are the same at temperature 0.
    """
    speculative = {"method": layout.method, "model": model, "num_speculative_tokens": depth}
    speculative |= {"parallel_drafting": True} if layout.parallel else {}
    if layout.within_target:
        target = str(speculative.pop("model"))
    speculative["draft_sample_method"] = draft_sample_method
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


def llama_cpp_refuses(layout: ServedLayout, config: Config, spec: TargetSpec) -> str:
    """Return why llama.cpp cannot draft with it for its target; "" if it can."""
    if layout.llama_cpp is None:
        title = layout.title.split(" in ")[0].removeprefix("an ")
        return f"the converter of {LLAMA_CPP} takes no {title}"
    if spec.architecture not in LLAMA_CPP_TARGETS:
        return f"{LLAMA_CPP} was not tried with {spec.architecture} targets"
    kind = (config.get("rope_scaling") or {}).get("rope_type")
    # The converter writes llama3's factors for EAGLE-3, and leaves them out for block drafters.
    if kind is not None and (kind, layout.llama_cpp) != ("llama3", "draft-eagle3"):
        return (
            f"{LLAMA_CPP} was not tried with rotary scaling of kind {kind} (drafter.rope_scaling="
            "null in training leaves it out)"
        )
    return layout.llama_cpp_refuses(config, spec)


def convert_command(
    layout: ServedLayout, converter: str, target: str, model: str, dtype: torch.dtype
) -> list[str]:
    """Return the words of the command by which llama.cpp's converter makes `GGUF` of a directory.

    converter: a checkout of llama.cpp. target: a directory, for its tokenizer.
    """
    words = ["python", str(Path(converter) / CONVERTER), model]
    words += [] if layout.whole_model else ["--target-model-dir", target]
    return [*words, "--outtype", OUT_TYPES[dtype], "--outfile", str(Path(model) / GGUF)]


def llama_cpp_command(layout: ServedLayout, model: str, depth: int) -> str:
    """Return the command line of llama.cpp's server (chains of `depth`)."""
    words = ["llama-server", "-m", "TARGET.gguf", "-md", str(Path(model) / GGUF)]
    words += ["--spec-type", str(layout.llama_cpp), "--spec-draft-n-max", str(depth)]
    return shlex.join(words)


def told_by_path(method: str | None, model: str | Path) -> str | None:
    """Return the part of a drafter's path for which vLLM would take it for another kind, if any."""
    if method in TOLD:
        return None
    return next((part for part in TELLING if part in str(model).lower()), None)


def runners_note(layout: ServedLayout) -> str:
    """Return which of vLLM's two model runners serve a layout."""
    if layout.vllm_runners == (V1,):
        return (
            f"{VLLM} serves it with its model runner V1 alone, and chooses that by itself; V2 is "
            "its default on GPUs."
        )
    if layout.vllm_runners == (V2,):
        return f"{VLLM} serves it with its model runner V2 alone, which needs a GPU (Triton)."
    return (
        f"{VLLM} serves it with both of its model runners: V2, the default where Triton works "
        "(GPUs), and V1 (CPUs), with which drafttrain's own tests serve it."
    )
