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

import faulthandler
import gc
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  # of one case


def worker_of_the_package() -> Any:
    """Load the script that drafttrain itself has run by vLLM's interpreter; it imports no other."""
    file = ROOT / "drafttrain" / "target" / "vllm" / "worker.py"
    spec = importlib.util.spec_from_file_location("worker", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WORKER = worker_of_the_package()


def draft_from_candidates() -> None:
    """Let the runner for CPUs draft from a drafter's candidates, which vLLM does on GPUs alone.

    That runner refuses such a drafter, for it would leave the candidates out. Loading, layers in 8
    bits, candidates and their scores are vLLM's own; only the walk over the scores, a Triton kernel
    there, is done here, for one request and greedily.
    """
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.spec_decode.dflash import DFlashProposer

    likeliest = DFlashProposer._greedy_sample

    def draft(proposer: Any, hidden: Any) -> Any:
        model = proposer.model
        if not hasattr(model, "compute_candidates"):
            return likeliest(proposer, hidden)
        candidates, logits = model.compute_candidates(hidden)  # of each place, the likeliest first
        scored = candidates[None], logits[None], hidden[None], proposer.input_ids[:1]
        before, tokens = 0, []
        for scores, ids in zip(model.model.candidate_selector(*scored)[0], candidates, strict=True):
            before = int(scores[before].argmax())
            tokens.append(ids[before])
        return torch.stack(tokens)

    DFlashProposer._greedy_sample = draft
    VllmConfig._is_dflash_candidate_draft = lambda config: False


def run_case(case: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Start one engine, decode every prompt greedily, and shut it down."""
    request = {
        **case,
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 1,
        "tensor_parallel": 1,
        "sampling": {"temperature": 0.0},
        "max_new_tokens": max_tokens,
        "stop_tokens": [],
    }
    llm = WORKER.start_counted(request, 1.0, case["speculative_config"])
    places = range(len(case["prompts"]))
    answers = [WORKER.decode(llm, request, [place], counted=True) for place in places]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return {
        "tokens": [answer["tokens"][0] for answer in answers],
        "counters": [answer["counters"] for answer in answers],
    }


def main(request_path: str, answer_path: str) -> None:
    """Serve every case of the request; a case that fails is answered by its error."""
    request = json.loads(Path(request_path).read_text())
    import vllm

    draft_from_candidates()
    answer: dict[str, Any] = {"vllm": vllm.__version__, "cases": {}}
    for case in request["cases"]:
        start = time.monotonic()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # where a case stands still, in time
        try:
            result = run_case(case, request["max_tokens"])
        except Exception as error:  # a refused drafter is an answer too
            result = {"error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.monotonic() - start, 1)
        faulthandler.cancel_dump_traceback_later()
        answer["cases"][case["name"]] = result
        print(case["name"], result["seconds"], file=sys.stderr, flush=True)
    Path(answer_path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
