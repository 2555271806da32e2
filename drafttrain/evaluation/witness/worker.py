"""A real vLLM, run by the interpreter of its own environment: a request in, JSON lines out.

    VLLM_PYTHON -I drafttrain/evaluation/witness/worker.py REQUEST.json

It imports nothing of drafttrain (`-I` keeps this folder off its path). A plain engine and a
speculative one decode the same batches of prompts in turns. Standard output has one JSON object a
line, each with an "event"; whatever vLLM prints goes to standard error. Events:

    {"event": "vllm", "version": TEXT, "together": whether both engines live at once}
    {"event": "engine", "method": "plain" | "speculative", "seconds": TO_START}
    {"event": "warm", "method": ...}
    {"event": "batch", "method": ..., "batch_size": N, "repeat": N, "prompts": [places],
     "tokens": [[new token ids], ...], "seconds": WALL, "decode_seconds": [after the first token],
     "num_steps": engine steps (speculative only), "counters": {...} (speculative only)}
    {"event": "error", "text": ONE_LINE}
    {"event": "done"}
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

PLAIN, SPECULATIVE = "plain", "speculative"
SETTINGS = {
    # Without "nobind" the CPU worker pins its threads and 288 tokens take a minute, not a second.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Prompt lookup is compiled by numba, whose second thread makes every later pass of both engines
    # ten times slower.
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
STEPS = "vllm:iteration_tokens_total"  # a histogram with one observation per engine step
ROOM = 2.5  # two engines live at once if memory holds their weights this many times


def read_counters(llm: Any) -> dict[str, Any]:
    """Return vLLM's speculative counters so far; zero where it has not counted yet."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in COUNTERS:
            found[name] = list(metric.values) if hasattr(metric, "values") else int(metric.value)
    return found


def read_steps(llm: Any) -> int:
    """Return how many steps the engine has made so far."""
    return sum(int(metric.count) for metric in llm.get_metrics() if metric.name == STEPS)


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


def start(request: dict[str, Any], method: str, together: bool) -> Any:
    """Start one engine."""
    from vllm import LLM

    speculative = request["speculative_config"] if method == SPECULATIVE else None
    on_cpu = request["device"] == "cpu"
    return LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        generation_config="vllm",  # the model's own would add penalties and a temperature
        enforce_eager=on_cpu,
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=max(request["batch_sizes"]),
        disable_log_stats=False,
        enable_prefix_caching=False,  # the second repeat would find the first one's prefill
        **({} if on_cpu else {"gpu_memory_utilization": 0.42 if together else 0.85}),
        **({"speculative_config": speculative} if speculative else {}),
    )


def sampling_of(request: dict[str, Any], places: list[int]) -> list[Any]:
    """Return the sampling of each prompt; a prompt's seed is its place."""
    from vllm import SamplingParams

    sampling = request["sampling"]
    stops = request["stop_token_ids"]
    return [
        SamplingParams(
            temperature=sampling["temperature"],
            top_k=sampling["top_k"],
            top_p=sampling["top_p"],
            seed=None if sampling["temperature"] == 0 else place,
            max_tokens=request["max_new_tokens"],
            stop_token_ids=stops,
            ignore_eos=not stops,
            detokenize=False,
        )
        for place in places
    ]


def decode(llm: Any, request: dict[str, Any], method: str, places: list[int]) -> dict[str, Any]:
    """Decode the prompts at these places together; return tokens, seconds and counters."""
    prompts = [{"prompt_token_ids": request["prompts"][place]} for place in places]
    sampling = sampling_of(request, places)
    # Metrics are of the process: the engine that was started last owns them.
    counted = method == SPECULATIVE
    before = read_counters(llm) if counted else {}
    steps = read_steps(llm) if counted else 0
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    times = [output.metrics for output in outputs]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "decode_seconds": [time.last_token_ts - time.first_token_ts for time in times],
        "num_steps": read_steps(llm) - steps if counted else None,
        "counters": difference(read_counters(llm), before) if counted else None,
    }


def batches_of(request: dict[str, Any]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (batch size, repeat, places) of everything that both engines decode."""
    places = list(range(len(request["prompts"])))
    for size in request["batch_sizes"]:
        for repeat in range(request["repeats"]):
            for first in range(0, len(places), size):
                yield size, repeat, places[first : first + size]


def fits_twice(request: dict[str, Any]) -> bool:
    """Whether memory holds both engines at once, judged by the size of the weights."""
    import torch

    files = [*Path(request["target"]).glob("*.safetensors"), *Path(request["target"]).glob("*.bin")]
    weights = sum(file.stat().st_size for file in files)
    if request["device"] != "cpu":
        return bool(ROOM * weights < 0.84 * torch.cuda.mem_get_info()[0])
    if request["dtype"] == "float32":
        weights *= 2  # they may lie in half that precision
    cache = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ROOM * weights + 2 * cache < free


def serve(request: dict[str, Any], say: Any) -> None:
    """Decode everything by both engines, in turns where both can live at once."""
    import vllm

    together = fits_twice(request)
    say(event="vllm", version=vllm.__version__, together=together)
    # The speculative engine last: it owns the metrics.
    for methods in [[PLAIN, SPECULATIVE]] if together else [[PLAIN], [SPECULATIVE]]:
        engines = {}
        for method in methods:
            started = time.perf_counter()
            engines[method] = start(request, method, together)
            say(event="engine", method=method, seconds=time.perf_counter() - started)
        for method, llm in engines.items():
            for size in request["batch_sizes"]:
                decode(llm, request, method, list(range(len(request["prompts"])))[:size])
                say(event="warm", method=method)
        gc.collect()
        gc.disable()  # a collection inside a timed batch would be charged to one engine
        for turn, (size, repeat, places) in enumerate(batches_of(request)):
            for method in methods if turn % 2 else methods[::-1]:
                answer = decode(engines[method], request, method, places)
                where = {"batch_size": size, "repeat": repeat, "prompts": places}
                say(event="batch", method=method, **where, **answer)
            gc.collect(0)  # what is new; all that vLLM holds takes a second
        gc.enable()
        for llm in engines.values():
            llm.llm_engine.engine_core.shutdown()
        del engines, llm
        gc.collect()


def main(request_path: str) -> None:
    """Serve the request; an error is said in one line and leaves its traceback in the log."""
    said: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints belongs in the log

    def say(**event: Any) -> None:
        said.write(json.dumps(event) + "\n")
        said.flush()

    request = json.loads(Path(request_path).read_text())
    for key, value in SETTINGS.items():
        os.environ.setdefault(key, value)
    try:
        serve(request, say)
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        say(event="error", text=f"{type(error).__name__}: {text[0]}")
        sys.exit(1)
    say(event="done")


if __name__ == "__main__":
    main(sys.argv[1])
