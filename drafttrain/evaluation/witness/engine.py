"""Run a vLLM worker with a plain and a speculative engine, and return its measurements."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import Counters
from drafttrain.runtime.terminal import progress
from drafttrain.target.vllm.process import Event, Process

PATIENCE_S = 900.0  # without output: an engine loads a large model for minutes in silence
PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass(frozen=True)
class EngineMeasurement:
    """The outputs and times of one engine at one batch size, by prompt.

    seconds: of a batch, divided equally among its prompts, as a median over repeats.
    decode_seconds: the same from a prompt's first new token to its last, meaningful at batch 1.
    """

    tokens: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    decode_seconds: tuple[float, ...]
    num_unstable: int  # prompts whose output differed in a later repeat


@dataclass(frozen=True)
class BatchWitness:
    """Both engines at one batch size; counters are vLLM's own, of one repeat."""

    batch_size: int
    plain: EngineMeasurement
    speculative: EngineMeasurement
    counters: Counters
    by_prompt: tuple[Counters, ...] | None  # at batch 1, where prompts are counted separately
    passes: tuple[int, ...] | None  # at batch 1: engine steps of a prompt after its prefill


@dataclass(frozen=True)
class Witness:
    """The outputs, counters and times of a real vLLM."""

    vllm: str  # its version
    interleaved: bool  # both engines alive at once, batches of prompts in turns
    repeats: int
    batches: tuple[BatchWitness, ...]

    def at(self, batch_size: int) -> BatchWitness | None:
        """Return the measurements at a batch size, if there are any."""
        return next((b for b in self.batches if b.batch_size == batch_size), None)


@dataclass(frozen=True)
class ServedDrafter:
    """What vLLM serves, and how: directories of the target and drafter (None: without weights).

    method: vLLM's name, None if the directory states it (as in the speculators format). lookup: the
    shortest and the longest suffix of prompt lookup. greedy_drafts: vLLM drafts the most likely
    token, its default; otherwise it samples drafts as it samples the target. parallel: one pass
    drafts all tokens, which vLLM must be told. tensor_parallel: GPUs of each engine.
    """

    target_dir: Path
    serving_dir: Path | None
    method: str | None
    lookup: tuple[int, int] | None
    greedy_drafts: bool
    python: str
    parallel: bool = False
    tensor_parallel: int = 1

    def speculation(self, depth: int) -> dict[str, Any]:
        """Return vLLM's speculative_config."""
        settings: dict[str, Any] = {"num_speculative_tokens": depth}
        if self.method is not None:
            settings["method"] = self.method
        if self.serving_dir is not None:
            settings["model"] = str(self.serving_dir)
        if self.lookup is not None:
            shortest, longest = self.lookup
            settings |= {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
        if not self.greedy_drafts:
            settings["draft_sample_method"] = "probabilistic"
        if self.parallel:
            settings["parallel_drafting"] = True
        return settings


def witness(
    served: ServedDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    sampling: Sampling,
    max_new_tokens: int,
    dtype: str,
    eos_ids: Sequence[int],
    threads: int,
    folder: Path,
    batch_sizes: Sequence[int],
    repeats: int = 1,
    device: str = "cpu",
    max_positions: int | None = None,
    vocab_size: int | None = None,
    patience_s: float = PATIENCE_S,
) -> Witness:
    """Return what vLLM measures on the prompts, plain and with the drafter, at every batch size.

    eos_ids: tokens that end an output (none: only the limit does). Request and log stay in
    `folder`. ValueError, with the line that says why and the log's path, if vLLM fails or prints
    nothing for `patience_s` seconds.
    """
    sizes = list(dict.fromkeys(min(size, len(prompts)) for size in batch_sizes))
    needed = max(len(prompt) for prompt in prompts) + max_new_tokens + depth + 1
    request = {
        "target": str(served.target_dir),
        "dtype": dtype,
        "device": device,
        "tensor_parallel": served.tensor_parallel,
        "max_model_len": min(needed, max_positions or needed),
        "max_num_seqs": max(sizes),
        "speculative_config": served.speculation(depth),
        "sampling": vars(sampling),
        "max_new_tokens": max_new_tokens,
        "stop_tokens": list(eos_ids),
        "prompts": [list(prompt) for prompt in prompts],
        "batch_sizes": sizes,
        "repeats": repeats,
    }
    num_chunks = sum(-(-len(prompts) // size) for size in sizes)
    events: list[Event] = []
    with (
        progress("vLLM", 2 * (1 + len(sizes) + repeats * num_chunks)) as tick,
        Process(
            served.python,
            request,
            folder,
            key="eval.vllm_python",
            patience_s=patience_s,
            environment={"OMP_NUM_THREADS": str(threads)},
        ) as worker,
    ):
        for event in worker.events():
            events.append(event)
            if event["event"] in ("engine", "warm", "batch"):
                tick(1, _note(event))
    if not events or events[-1]["event"] != "done":
        raise worker.failure(events)
    answers = [answer for event in events for answer in event.get("tokens", ())]
    largest = max((token for answer in answers for token in answer), default=0)
    if vocab_size is not None and largest >= vocab_size:
        told = f"vLLM must answer with tokens of {served.target_dir}, which has {vocab_size:,}, got"
        raise ValueError(f"{told} token {largest:,}; use another version of it")
    first = next(event for event in events if event["event"] == "vllm")
    return Witness(
        vllm=first["version"],
        interleaved=first["together"],
        repeats=repeats,
        batches=tuple(_batch(events, size, len(prompts), depth) for size in sizes),
    )


def _note(event: Event) -> str:
    size = f", batch {event['batch_size']}" if event["event"] == "batch" else ""
    return f"{event['method']} {event['event'] if not size else 'engine'}{size}"


def _batch(events: Sequence[Event], size: int, num_prompts: int, depth: int) -> BatchWitness:
    here = [e for e in events if e["event"] == "batch" and e["batch_size"] == size]
    drafted = [e for e in here if e["method"] == SPECULATIVE and e["repeat"] == 0]
    counted = [_counters(event["counters"], depth) for event in drafted]
    alone = size == 1
    return BatchWitness(
        batch_size=size,
        plain=_measured([e for e in here if e["method"] == PLAIN], num_prompts),
        speculative=_measured([e for e in here if e["method"] == SPECULATIVE], num_prompts),
        counters=sum(counted, Counters()),
        by_prompt=tuple(counted) if alone else None,
        passes=tuple(event["num_steps"] - 1 for event in drafted) if alone else None,
    )


def _measured(events: Sequence[Event], num_prompts: int) -> EngineMeasurement:
    tokens: list[list[tuple[int, ...]]] = [[] for _ in range(num_prompts)]
    seconds: list[list[float]] = [[] for _ in range(num_prompts)]
    decode: list[list[float]] = [[] for _ in range(num_prompts)]
    for event in events:
        for row, place in enumerate(event["prompts"]):
            tokens[place].append(tuple(event["tokens"][row]))
            seconds[place].append(event["seconds"] / len(event["prompts"]))
            decode[place].append(event["decode_seconds"][row])
    return EngineMeasurement(
        tokens=tuple(each[0] for each in tokens),
        seconds=tuple(map(statistics.median, seconds)),
        decode_seconds=tuple(map(statistics.median, decode)),
        num_unstable=sum(len(set(each)) > 1 for each in tokens),
    )


def _counters(counted: Mapping[str, Any], depth: int) -> Counters:
    per_position = list(counted.get("num_accepted_tokens_per_pos", []))
    return Counters(
        num_drafts=counted.get("num_drafts", 0),
        num_draft_tokens=counted.get("num_draft_tokens", 0),
        num_accepted_tokens=counted.get("num_accepted_tokens", 0),
        num_accepted_tokens_per_position=per_position + [0] * (depth - len(per_position)),
    )
