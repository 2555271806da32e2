"""A vLLM engine that answers and hands over hidden states, run by its own interpreter.

    VLLM_PYTHON -I drafttrain/target/vllm/worker.py REQUEST.json

It imports nothing of drafttrain (`-I` keeps this folder off its path). Work arrives on standard
input, one JSON object a line, and runs side by side; the end of the input ends the worker:

    {"op": "answer", "name": N, "tokens": [...], "sampling": {temperature, top_k, top_p},
     "seed": N | null, "max_new_tokens": N, "stop_tokens": [...]}
    {"op": "features", "name": N, "documents": [[token ids], ...]}

Standard output has one JSON object a line; whatever vLLM prints goes to standard error:

    {"event": "ready", "version": TEXT, "seconds": TO_START}
    {"event": "answer", "name": N, "tokens": [...], "finished": whether it ended by itself}
    {"event": "features", "name": N, "file": safetensors, "firsts": [[token, logprob], ...]}
    {"event": "refused", "name": N, "text": ONE_LINE}
    {"event": "error", "text": ONE_LINE}

The file holds, per document, "0", "1", ...: hidden states (token, captured layer, hidden), in the
order of request["captures"]: id i is the input of layer i, id num_layers the input of the final
norm. `firsts` is the likeliest next token after each document, with its log-probability, by which
the reader checks the head it has read from the disk.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

CONNECTOR = "HiddenStatesHere"
ENDED = {"stop", "eos"}


class Work:
    """What was asked and is not yet answered; `states` are hidden states by vLLM's request id."""

    def __init__(self, say: Any, folder: Path) -> None:
        self.say, self.folder = say, folder
        self.states: dict[str, Any] = {}
        self.answers: dict[str, int] = {}
        self.documents: dict[str, tuple[int, int]] = {}  # of which features, at which place
        self.features: dict[int, list[Any]] = {}
        self.num_requests = 0

    def add(self, llm: Any, asked: dict[str, Any]) -> None:
        """Give the engine what was asked; a prompt that it refuses is said and forgotten."""
        features = asked["op"] == "features"
        prompts = asked["documents"] if features else [asked["tokens"]]
        added: list[str] = []
        try:
            for prompt in prompts:
                request_id = str(self.num_requests)
                self.num_requests += 1
                llm.llm_engine.add_request(
                    request_id, {"prompt_token_ids": prompt}, sampling_of(asked)
                )
                added.append(request_id)
        except ValueError as error:
            llm.llm_engine.abort_request(added)
            self.say(event="refused", name=asked["name"], text=one_line(error))
            return
        for place, request_id in enumerate(added):
            if features:
                self.documents[request_id] = (asked["name"], place)
            else:
                self.answers[request_id] = asked["name"]
        if features:
            self.features[asked["name"]] = [None] * len(prompts)

    def take(self, output: Any) -> None:
        """Say what has become of a request that has ended."""
        ended = output.outputs[0]
        tokens = list(ended.token_ids)
        name = self.answers.pop(output.request_id, None)
        if name is not None:
            finished = ended.finish_reason in ENDED
            self.say(event="answer", name=name, tokens=tokens, finished=finished)
            return
        name, place = self.documents.pop(output.request_id)
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


def sampling_of(asked: dict[str, Any]) -> Any:
    """Return vLLM's sampling of a request."""
    from vllm import SamplingParams

    if asked["op"] == "features":
        return SamplingParams(temperature=0, max_tokens=1, logprobs=1, detokenize=False)
    stops = asked["stop_tokens"]
    return SamplingParams(
        **asked["sampling"],
        seed=asked["seed"],
        max_tokens=asked["max_new_tokens"],
        stop_token_ids=stops,
        ignore_eos=not stops,
        detokenize=False,
    )


def hidden_of(output: Any, states: dict[str, Any]) -> Any:
    """Return the hidden states of a document, from this process or from the connector's file."""
    # What the engine calls a request begins with what we called it.
    for name in list(states):
        if name == output.request_id or name.startswith(f"{output.request_id}-"):
            return states.pop(name)
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own

    path = output.kv_transfer_params["hidden_states_path"]
    found = own.load_hidden_states(path)["hidden_states"]
    own.cleanup_hidden_states(path)
    return found


def register_connector(states: dict[str, Any]) -> None:
    """Make known a connector that reads hidden states where they lie, when a request has ended.

    vLLM's own one needs CUDA and goes through a file per request; with a single worker the engine
    lives in this process, and its cache can be read here, on a CPU too.
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


def start(request: dict[str, Any], states: dict[str, Any]) -> Any:
    """Start the engine."""
    from vllm import LLM

    on_cpu = request["device"] == "cpu"
    settings: dict[str, Any] = {}
    if request["captures"]:
        alone = request["tensor_parallel"] == 1
        if alone:
            register_connector(states)
        settings = {
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
            # Hidden states of a prefix that was found in the cache would be missing.
            "enable_prefix_caching": False,
        }
    if not on_cpu:
        settings["gpu_memory_utilization"] = request["memory"]
    return LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        generation_config="vllm",  # the model's own would add penalties and a temperature
        enforce_eager=on_cpu,
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=request["max_num_seqs"],
        tensor_parallel_size=request["tensor_parallel"],
        trust_remote_code=request["trust_remote_code"],
        **settings,
    )


def serve(request: dict[str, Any], say: Any) -> None:
    """Do what arrives until the input ends."""
    import vllm

    began = time.perf_counter()
    work = Work(say, Path(request["folder"]))
    llm = start(request, work.states)
    say(event="ready", version=vllm.__version__, seconds=time.perf_counter() - began)
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
            if line is None:
                more = False
            else:
                work.add(llm, json.loads(line))
        for output in engine.step() if engine.has_unfinished_requests() else []:
            if output.finished:
                work.take(output)
    engine.engine_core.shutdown()


def one_line(error: Exception) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split())[:500]


def main(request_path: str) -> None:
    """Serve the request; an error is said in one line and leaves its traceback in the log."""
    said: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints belongs in the log

    def say(**event: Any) -> None:
        said.write(json.dumps(event) + "\n")
        said.flush()

    try:
        serve(json.loads(Path(request_path).read_text()), say)
    except Exception as error:
        traceback.print_exc()
        say(event="error", text=f"{type(error).__name__}: {one_line(error)}")
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
