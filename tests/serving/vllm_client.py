"""A real vLLM, run by the interpreter of its own environment: json in, json out.

    VLLM_PYTHON tests/serving/vllm_client.py REQUEST.json ANSWER.json

Of drafttrain it loads the worker script alone, which imports nothing of it. The request is

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
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from paths import ROOT


def worker_of_the_package() -> Any:
    """Load the script that drafttrain itself has run by vLLM's interpreter; it imports no other."""
    file = ROOT / "drafttrain" / "witness" / "worker.py"
    spec = importlib.util.spec_from_file_location("worker", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WORKER = worker_of_the_package()


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
    before = WORKER.read_counters(llm)
    for prompt in case["prompts"]:
        outputs = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        tokens.append(list(outputs[0].outputs[0].token_ids))
        after = WORKER.read_counters(llm)
        counters.append(WORKER.difference(after, before))
        before = after
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return {"tokens": tokens, "counters": counters}


def main(request_path: str, answer_path: str) -> None:
    """Serve every case of the request; a case that fails is answered by its error."""
    os.environ.update(WORKER.SETTINGS)
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
