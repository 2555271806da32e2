"""A vLLM engine that gives answers and hidden states, or two engines that decode in turns.

    VLLM_PYTHON -I drafttrain/target/vllm/worker.py REQUEST.json

vLLM's own interpreter runs it, and it imports nothing of drafttrain. Standard output has one JSON
object per line; whatever vLLM prints goes to standard error. If the worker fails, its last line is
{"event": "error", "text": ONE_LINE}.

A request with "captures" starts one engine. Work for it arrives on standard input, one JSON object
per line, and is done concurrently; the end of the input ends the worker:

    {"op": "answer", "name": N, "tokens": [...], "sampling": {temperature, top_k, top_p},
     "seed": N | null, "max_new_tokens": N, "stop_tokens": [...]}
    {"op": "features", "name": N, "documents": [[token ids], ...]}

    {"event": "ready", "version": TEXT}
    {"event": "answer", "name": N, "tokens": [...]}
    {"event": "features", "name": N, "file": safetensors, "firsts": [[token, logprob], ...]}
    {"event": "refused", "name": N, "text": ONE_LINE}

The file holds, per document, "0", "1", ...: hidden states (token, captured layer, hidden), in the
order of request["captures"]; `firsts` is the likeliest next token after each document.

A request with "speculative_config" starts a plain engine and a speculative one, which decode the
same batches of prompts in turns:

    {"event": "vllm", "version": TEXT, "together": whether both engines live at once}
    {"event": "engine", "method": "plain" | "speculative", "seconds": TO_START}
    {"event": "warm", "method": ...}
    {"event": "batch", "method": ..., "batch_size": N, "repeat": N, "prompts": [places],
     "tokens": [[new token ids], ...], "seconds": WALL, "decode_seconds": [after the first token],
     "num_steps": engine steps (speculative only), "counters": {...} (speculative only)}
    {"event": "done"}
"""

import gc
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

CONNECTOR = "HiddenStatesHere"
PLAIN, SPECULATIVE = "plain", "speculative"
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
STEPS = "vllm:iteration_tokens_total"  # a histogram with one observation per engine step
ROOM = 2.5  # two engines live at once if memory holds their weights this many times


def start(request: dict[str, Any], memory: float, **settings: Any) -> Any:
    """Return a new engine. memory: its share of a GPU's memory."""
    from vllm import LLM

    on_cpu = request["device"] == "cpu"
    if not on_cpu:
        settings["gpu_memory_utilization"] = memory
    return LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        generation_config="vllm",  # the model's own would add penalties and a temperature
        enforce_eager=on_cpu,
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=request["max_num_seqs"],
        **settings,
    )


def sampling_of(asked: dict[str, Any], seed: int | None) -> Any:
    """Return vLLM's sampling parameters; `asked["stop_tokens"]` or the limit ends the answer."""
    from vllm import SamplingParams

    stops = asked["stop_tokens"]
    return SamplingParams(
        **asked["sampling"],
        seed=seed,
        max_tokens=asked["max_new_tokens"],
        stop_token_ids=stops,
        ignore_eos=not stops,
        detokenize=False,
    )


# One engine that gives answers and hidden states


class OpenRequests:
    """Requests that are not answered yet; `states` are hidden states by vLLM's request id."""

    def __init__(self, say: Any, folder: Path) -> None:
        self.say, self.folder = say, folder
        self.states: dict[str, Any] = {}
        self.places: dict[str, tuple[str, int, int]] = {}  # operation, name, index of the document
        self.features: dict[int, list[Any]] = {}  # by name: each document's, once it is read
        self.num_requests = 0

    def add(self, llm: Any, asked: dict[str, Any]) -> None:
        """Submit a request to the engine; a prompt that it refuses is reported and dropped."""
        from vllm import SamplingParams

        op, name = asked["op"], asked["name"]
        if op == "features":
            prompts = asked["documents"]
            sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=1, detokenize=False)
        else:
            prompts = [asked["tokens"]]
            sampling = sampling_of(asked, asked["seed"])
        added: list[str] = []
        try:
            for prompt in prompts:
                request_id = str(self.num_requests)
                self.num_requests += 1
                llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
                added.append(request_id)
        except ValueError as error:
            llm.llm_engine.abort_request(added)
            self.say(event="refused", name=name, text=one_line(error))
            return
        self.places |= {request_id: (op, name, place) for place, request_id in enumerate(added)}
        self.features |= {name: [None] * len(prompts)} if op == "features" else {}

    def take(self, output: Any) -> None:
        ended = output.outputs[0]
        tokens = list(ended.token_ids)
        op, name, place = self.places.pop(output.request_id)
        if op == "answer":
            self.say(event="answer", name=name, tokens=tokens)
            return
        first = [tokens[0], ended.logprobs[0][tokens[0]].logprob]
        parts = self.features[name]
        parts[place] = (first, hidden_of(output, self.states))
        if any(part is None for part in parts):
            return
        from safetensors.torch import save_file

        del self.features[name]
        file = self.folder / f"{name}.safetensors"
        save_file({str(place): states for place, (_, states) in enumerate(parts)}, file)
        firsts = [first for first, _ in parts]
        self.say(event="features", name=name, file=str(file), firsts=firsts)


def hidden_of(output: Any, states: dict[str, Any]) -> Any:
    """Return the hidden states of a document, from this process or from the connector's file."""
    # The engine's name of a request begins with ours.
    for name in list(states):
        if name == output.request_id or name.startswith(f"{output.request_id}-"):
            return states.pop(name)
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own

    path = output.kv_transfer_params["hidden_states_path"]
    found = own.load_hidden_states(path)["hidden_states"]
    own.cleanup_hidden_states(path)
    return found


def register_connector(states: dict[str, Any]) -> None:
    """Register a connector that reads hidden states from the cache when a request has ended.

    vLLM's own connector needs CUDA and a file per request; with a single worker the engine runs in
    this process, so its cache can be read directly, on a CPU too.
    """
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own

    cache: list[Any] = []  # the worker's half of the connector leaves it for the scheduler's half

    class Connector(own.ExampleHiddenStatesConnector):
        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            super().register_kv_caches(kv_caches)
            cache[:] = [self._kv_cache]

        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
            asked = self._request_filenames.pop(request.request_id, None)
            if asked is not None:
                size = self._block_size
                slots = torch.tensor(block_ids)[:, None] * size + torch.arange(size)
                count = len(request.prompt_token_ids)
                found = own.extract_from_kv_cache(cache[0], slots.flatten(), count)
                states[request.request_id] = found.cpu().clone(
                    memory_format=torch.contiguous_format
                )
            return False, None

    KVConnectorFactory._registry[CONNECTOR] = lambda: Connector


def extraction(request: dict[str, Any], states: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an engine that gives hidden states; in `states` if possible."""
    alone = request["tensor_parallel"] == 1
    if alone:
        register_connector(states)
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": request["captures"]}
            },
        },
        "kv_transfer_config": {
            "kv_connector": CONNECTOR if alone else "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": request["folder"],
                "use_synchronization_lock": not alone,
            },
        },
        # Hidden states of a cached prefix would be missing.
        "enable_prefix_caching": False,
    }


def serve(request: dict[str, Any], say: Any) -> None:
    import vllm

    work = OpenRequests(say, Path(request["folder"]))
    llm = start(
        request,
        request["memory"],
        tensor_parallel_size=request["tensor_parallel"],
        trust_remote_code=request["trust_remote_code"],
        **(extraction(request, work.states) if request["captures"] else {}),
    )
    say(event="ready", version=vllm.__version__)
    inbox: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            inbox.put(line)
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    engine, more = llm.llm_engine, True
    while more or engine.has_unfinished_requests():
        while more and (not engine.has_unfinished_requests() or not inbox.empty()):
            line = inbox.get()
            more = line is not None
            if line is not None:
                work.add(llm, json.loads(line))
        for output in engine.step() if engine.has_unfinished_requests() else []:
            if output.finished:
                work.take(output)
    engine.engine_core.shutdown()


# Two engines in turns


def read_counters(llm: Any) -> tuple[dict[str, Any], int]:
    """Return vLLM's speculative counters so far, and the number of engine steps."""
    found: dict[str, Any] = {}
    steps = 0
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in COUNTERS:
            found[name] = list(metric.values) if hasattr(metric, "values") else int(metric.value)
        elif metric.name == STEPS:
            steps += int(metric.count)
    return found, steps


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    counted: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, list):
            earlier = before.get(name) or [0] * len(value)
            counted[name] = [int(a) - int(b) for a, b in zip(value, earlier, strict=True)]
        else:
            counted[name] = value - before.get(name, 0)
    return counted


def start_counted(
    request: dict[str, Any], memory: float, speculative: dict[str, Any] | None
) -> Any:
    """Return a new engine with readable counters, plain if `speculative` is None."""
    return start(
        request,
        memory,
        tensor_parallel_size=request["tensor_parallel"],
        disable_log_stats=False,
        enable_prefix_caching=False,  # the second repeat would find the first one's prefill
        speculative_config=speculative,
    )


def decode(llm: Any, request: dict[str, Any], places: list[int], counted: bool) -> dict[str, Any]:
    """Decode the prompts at these places together; return tokens, seconds and counters.

    A prompt's seed is its place. counted: read the counters; metrics are per process, and belong
    to the engine that was started last.
    """
    prompts = [{"prompt_token_ids": request["prompts"][place]} for place in places]
    greedy = request["sampling"]["temperature"] == 0
    sampling = [sampling_of(request, None if greedy else place) for place in places]
    before, steps = read_counters(llm) if counted else ({}, 0)
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    after, steps_after = read_counters(llm) if counted else ({}, 0)
    times = [output.metrics for output in outputs]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "decode_seconds": [time.last_token_ts - time.first_token_ts for time in times],
        "num_steps": steps_after - steps if counted else None,
        "counters": difference(after, before) if counted else None,
    }


def batches_of(request: dict[str, Any]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (batch size, repeat, places) of each batch that both engines decode."""
    places = list(range(len(request["prompts"])))
    for size in request["batch_sizes"]:
        for repeat in range(request["repeats"]):
            for first in range(0, len(places), size):
                yield size, repeat, places[first : first + size]


def fits_twice(request: dict[str, Any]) -> bool:
    """Return whether memory holds both engines at once, judged by the size of the weights."""
    import psutil  # vLLM depends on it
    import torch

    files = [*Path(request["target"]).glob("*.safetensors"), *Path(request["target"]).glob("*.bin")]
    weights = sum(file.stat().st_size for file in files) / request["tensor_parallel"]
    if request["device"] != "cpu":
        return bool(ROOM * weights < 0.84 * torch.cuda.mem_get_info()[0])
    if request["dtype"] == "float32":
        weights *= 2  # the file may hold them in half that precision
    cache = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30
    # Reclaimable memory counts as available: the file cache fills memory in the end.
    return bool(ROOM * weights + 2 * cache < psutil.virtual_memory().available)


def free_share(request: dict[str, Any]) -> float:
    """Return the share of a GPU that is free: the process that asks holds a target of its own."""
    import torch

    if request["device"] == "cpu":
        return 1.0
    free, total = torch.cuda.mem_get_info()
    return float(free / total)


def compare(request: dict[str, Any], say: Any) -> None:
    """Decode everything with both engines, in turns if both fit at once."""
    import vllm

    together = fits_twice(request)
    memory = (0.42 if together else 0.85) * free_share(request)
    say(event="vllm", version=vllm.__version__, together=together)
    # The speculative engine last: it owns the metrics.
    for methods in [[PLAIN, SPECULATIVE]] if together else [[PLAIN], [SPECULATIVE]]:
        engines = {}
        for method in methods:
            started = time.perf_counter()
            speculative = request["speculative_config"] if method == SPECULATIVE else None
            engines[method] = start_counted(request, memory, speculative)
            say(event="engine", method=method, seconds=time.perf_counter() - started)
        for method, llm in engines.items():
            for size in request["batch_sizes"]:
                decode(llm, request, list(range(len(request["prompts"])))[:size], counted=False)
                say(event="warm", method=method)
        gc.collect()
        gc.disable()  # a collection inside a timed batch would be charged to one engine
        for turn, (size, repeat, places) in enumerate(batches_of(request)):
            for method in methods if turn % 2 else methods[::-1]:
                answer = decode(engines[method], request, places, method == SPECULATIVE)
                where = {"batch_size": size, "repeat": repeat, "prompts": places}
                say(event="batch", method=method, **where, **answer)
            gc.collect(0)  # new objects only; a full collection takes a second
        gc.enable()
        for llm in engines.values():
            llm.llm_engine.engine_core.shutdown()
        del engines, llm
        gc.collect()
    say(event="done")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def main(request_path: str) -> None:
    """Serve the request; an error is printed in one line, and its traceback goes to the log."""
    output: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints belongs in the log

    def say(**event: Any) -> None:
        output.write(json.dumps(event) + "\n")
        output.flush()

    request = json.loads(Path(request_path).read_text())
    try:
        (compare if "speculative_config" in request else serve)(request, say)
    except Exception as error:
        traceback.print_exc()
        say(event="error", text=f"{type(error).__name__}: {one_line(error)}")
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
