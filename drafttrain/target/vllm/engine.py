"""A client of the vLLM engine: prompts in, answers or hidden states out."""

import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.core.sampling_config import Sampling
from drafttrain.runtime.disk import remove, require_own
from drafttrain.runtime.terminal import working
from drafttrain.target.vllm.config import VllmConfig
from drafttrain.target.vllm.process import Event, Process, find_python

MEMORY_FOLDER = Path("/dev/shm")  # hidden states are passed on here if it has room
MEMORY_ROOM = 2 << 30


@dataclass(frozen=True)
class EngineAnswer:
    """The engine's answer to one prompt, or the reason it refused."""

    name: int
    tokens: tuple[int, ...]  # the stop token included
    refused: str | None


class VllmEngine:
    """A vLLM engine with one model, running until `close`.

    captures: layers whose input it returns (id num_layers: the final norm's input); without any,
    the engine only answers. longest: tokens of a prompt and its answer together. folder: where
    request and log are kept. ValueError, with the line that says why, if it does not start.
    """

    def __init__(
        self,
        target_dir: Path,
        config: VllmConfig,
        *,
        dtype: str,
        device: str,
        longest: int,
        folder: Path,
        captures: Sequence[int] = (),
        trust_remote_code: bool = False,
        asked: str = "regenerate.backend=vllm",
    ) -> None:
        python = find_python(config.python, "vllm.python", asked)
        place = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
        if place is not None and shutil.disk_usage(place).free < MEMORY_ROOM:
            place = None  # the default folder for temporary files
        self.exchange = Path(tempfile.mkdtemp(prefix="drafttrain_", dir=place))
        self.captures = tuple(sorted(set(captures)))
        request = {
            **{key: getattr(config, key) for key in ("max_num_seqs", "tensor_parallel", "memory")},
            "target": str(target_dir),
            "dtype": dtype,
            "device": device,
            "max_model_len": longest + 1,
            "captures": list(self.captures),
            "folder": str(self.exchange),
            "trust_remote_code": trust_remote_code,
        }
        threads = os.environ.get("OMP_NUM_THREADS") or str(torch.get_num_threads())
        environment = {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": str(config.cpu_cache)}
        if config.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = config.devices
        self.process = Process(
            python,
            request,
            folder,
            key="vllm.python",
            patience_s=config.patience,
            environment=environment,
        )
        self.num_asked = 0
        try:
            with working("starting vLLM"):
                self.version = str(self._next("ready")["version"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "VllmEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(
        self,
        name: int,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        seed: int,
        stop_tokens: Collection[int],
    ) -> None:
        """Submit a prompt; its answer comes when it is ready, in any order."""
        self.process.send(
            {
                "op": "answer",
                "name": name,
                "tokens": list(prompt),
                "sampling": vars(sampling),
                "seed": None if sampling.greedy else seed,
                "max_new_tokens": max_new_tokens,
                "stop_tokens": list(stop_tokens),
            }
        )

    def next_answer(self) -> EngineAnswer:
        event = self._next("answer", "refused")
        return EngineAnswer(event["name"], tuple(event.get("tokens", ())), event.get("text"))

    def read(
        self, documents: Sequence[Sequence[int]]
    ) -> tuple[list[Float[Tensor, "_ capture hidden"]], list[tuple[int, float]]]:
        """Return each document's hidden states, and its likeliest next token with the log-prob.

        ValueError if the engine refuses a document, for example because of its length.
        """
        assert self.captures, "an engine that only answers hands over no hidden states"
        self.num_asked += 1
        sent = {"op": "features", "name": self.num_asked}
        self.process.send({**sent, "documents": [list(document) for document in documents]})
        event = self._next("features", "refused")
        if event["event"] == "refused":
            raise ValueError(f"vLLM refuses a document: {event['text']}")
        file = self.exchange / Path(event["file"]).name  # there and nowhere else
        require_own(file)
        tensors = load_file(file)
        file.unlink()
        states = [tensors[str(place)] for place in range(len(documents))]
        return states, [(token, value) for token, value in event["firsts"]]

    def _next(self, *kinds: str) -> Event:
        event = self.process.receive()
        if event is None or event["event"] == "error":
            if event is not None:
                list(self.process.events())  # wait for its end, to have its exit code
            raise self.process.failure([] if event is None else [event])
        assert event["event"] in kinds, f"vLLM's worker said {event['event']}, not {kinds}"
        return event

    def close(self) -> None:
        """End the engine and remove the files that it left in memory."""
        self.process.end()
        with suppress(OSError):
            remove(self.exchange, self.exchange.parent)
