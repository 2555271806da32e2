"""A real vLLM, run by the interpreter of its own environment: json in, json out.

    VLLM_PYTHON tests/serving/vllm_client.py REQUEST.json ANSWER.json

It imports nothing of drafttrain and drafttrain imports nothing of it. The request is

    {"max_tokens": 64,
     "cases": [{"name": ..., "target": DIR, "prompts": [[token ids], ...], "speculative_config":
                {"method": ..., "model": DIR, "num_speculative_tokens": 3} | null}]}

and the answer, per case, the tokens of each prompt and vLLM's own counters *of that prompt*:

    {"vllm": VERSION,
     "cases": {name: {"tokens": [[...], ...],
                      "counters": [{"num_drafts", "num_draft_tokens", "num_accepted_tokens",
                                    "num_accepted_tokens_per_pos"}, ...]} | {"error": TEXT}}}

Prompts run one at a time, so that each one's counters are the difference of two readings.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = {
    # Without "nobind" the CPU worker pins its threads and 288 tokens take a minute, not a second.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def read_counters(llm: Any) -> dict[str, Any]:
    """Return vLLM's speculative counters so far; zero where it has not counted yet."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in COUNTERS:
            found[name] = list(metric.values) if hasattr(metric, "values") else int(metric.value)
    return found


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return what was counted between two readings."""
    counted: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, list):
            earlier = before.get(name) or [0] * len(value)
            counted[name] = [int(a) - int(b) for a, b in zip(value, earlier, strict=True)]
        else:
            counted[name] = value - before.get(name, 0)
    return counted


def run_case(case: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Start one engine, decode every prompt greedily, and shut it down."""
    from vllm import LLM, SamplingParams

    speculative = case["speculative_config"]
    llm = LLM(
        model=case["target"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=case.get("max_model_len", 512),
        max_num_seqs=1,
        disable_log_stats=False,
        enable_prefix_caching=False,
        **({"speculative_config": speculative} if speculative else {}),
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    tokens, counters = [], []
    before = read_counters(llm)
    for prompt in case["prompts"]:
        outputs = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        tokens.append(list(outputs[0].outputs[0].token_ids))
        after = read_counters(llm)
        counters.append(difference(after, before))
        before = after
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return {"tokens": tokens, "counters": counters}


def main(request_path: str, answer_path: str) -> None:
    """Serve every case of the request; a case that fails is answered by its error."""
    os.environ.update(SETTINGS)
    request = json.loads(Path(request_path).read_text())
    import vllm

    answer: dict[str, Any] = {"vllm": vllm.__version__, "cases": {}}
    for case in request["cases"]:
        start = time.monotonic()
        try:
            result = run_case(case, request["max_tokens"])
        except Exception as error:  # a refused drafter is an answer too
            result = {"error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.monotonic() - start, 1)
        answer["cases"][case["name"]] = result
    Path(answer_path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
