"""Our loops against Transformers' own, interleaved in one process: benchmarks/decode.py --help.

The same target, prompts, dtype, threads and number of new tokens; greedy; no end of text, because
Transformers suppresses it by a logits processor, which would be a handicap. Before timing it is
asserted that all methods give the same tokens, that `two_model` and assisted generation take the
passes that one draft model's agreement with the text implies, and that prompt lookup proposes the
same wherever the two rules agree.

Differences: prompt lookup takes the first earlier occurrence in Transformers and the latest here;
Transformers drafts for the prompt's own pass, we read the prompt first. So passes may differ, and
time per pass is given next to time.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from drafttrain.config.compose import load_choice
from drafttrain.config.groups import conf_dir
from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Decoded
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.evaluation_prompts import read_prompts
from drafttrain.data.records import Message
from drafttrain.data.suites import BUILTIN_PROMPTS
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.runtime.hardware import TORCH_DTYPES
from drafttrain.runtime.run_folder import provenance
from drafttrain.target.model import Target, load_target

Tokens = tuple[int, ...]
Method = Callable[[Sequence[int]], Tokens]
# ours, theirs, the least speed of ours relative to theirs
PAIRS = [
    ("plain", "generate", 1.0),
    ("ngram", "prompt lookup", 1.3),
    ("two_model", "assisted generation", 1.3),
]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
OUTSIDE = 0.05  # largest share of a step outside the two models


class Setup(NamedTuple):
    """What every method decodes, and how many tokens."""

    target: Target
    prompts: list[list[int]]
    new_tokens: int
    depth: int


def our_decoding(setup: Setup, drafter: Drafter | None) -> Callable[[Sequence[int]], Decoded]:
    """Return our loop, plain or with a drafter."""
    settings: dict[str, Any] = {
        "sampling": GREEDY,
        "max_new_tokens": setup.new_tokens,
        "chance": SeededChance(0),
        "stop_tokens": (),
    }
    if drafter is None:
        return lambda prompt: autoregressive_decode(setup.target, prompt, **settings)
    return lambda prompt: speculative_decode(
        setup.target, drafter, prompt, policy=setup.depth, **settings
    )


def their_decoding(setup: Setup, **how: Any) -> Method:
    """Return Transformers' `generate` on the same model."""
    model, length = setup.target.model, setup.new_tokens

    def decode(prompt: Sequence[int]) -> Tokens:
        tokens = torch.tensor([list(prompt)])
        mask = torch.ones_like(tokens)
        output = model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=length, **how
        )
        return tuple(output[0, len(prompt) :].tolist())

    return decode


def first_layers(target: Target, num_layers: int, folder: Path) -> Any:
    """Write and return a draft model: the target's first layers under its own norm and head."""
    settings = target.model.config.to_dict() | {"num_hidden_layers": num_layers}
    draft = type(target.model)(type(target.model.config)(**settings))
    wanted = draft.state_dict()
    draft.load_state_dict({k: v for k, v in target.model.state_dict().items() if k in wanted})
    draft.to(target.dtype).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return draft.eval()


@contextlib.contextmanager
def counting(module: nn.Module) -> Iterator[list[int]]:
    """Collect the number of tokens of each pass of a module."""
    passes: list[int] = []

    def note(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        passes.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape[1])

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def passes_of(agrees: Sequence[int], first: int) -> int:
    """Return the passes of a decoding that accepts agrees[i] drafted tokens at place i."""
    place = passes = first
    while place < len(agrees):
        place += agrees[place] + 1
        passes += 1
    return passes


def agreement(draft: Any, prompt: Sequence[int], text: Tokens, depth: int) -> list[int]:
    """Return for each place of the text how many tokens drafted there agree with it."""
    with torch.inference_mode():
        logits = draft(torch.tensor([[*prompt, *text]])).logits[0]
    said = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    agree = [a == b for a, b in zip(said, text, strict=True)]
    runs = []
    for place in range(len(text)):
        ahead = agree[place : place + depth]
        runs.append(ahead.index(False) if False in ahead else len(ahead))
    return runs


def check_lookups(setup: Setup, drafter: Any, prompt: Sequence[int], text: Tokens) -> float:
    """Return the share of places where both prompt lookups propose the same.

    AssertionError where they differ although the n-gram that both find occurs only once before.
    """
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=setup.depth,
        max_matching_ngram_size=drafter.config.max_ngram,
        max_length=len(prompt) + len(text) + setup.depth,
    )
    state = drafter.begin(setup.target.readout, torch.tensor([prompt[0]]), 0)
    drafter.observe(state, torch.tensor([prompt[1:]]), [len(prompt) - 1], None)
    same = 0
    for place in range(len(text)):
        known = [*prompt, *text[:place]]
        ours = drafter.propose(state, setup.depth).tokens[0].tolist()
        found = theirs.get_candidates(torch.tensor([known]))[0][0, len(known) :].tolist()
        sizes = range(min(drafter.config.max_ngram, len(known) - 1), 0, -1)
        earlier = [occurrences(known, size) for size in sizes]
        ambiguous = next((count for count in earlier if count), 0) > 1
        assert ours == found or ambiguous, f"lookups differ at {place}: {ours}, {found}"
        same += ours == found
        drafter.observe(state, torch.tensor([[text[place]]]), [1], None)
    return same / len(text)


def occurrences(tokens: list[int], size: int) -> int:
    """Return how often the last `size` tokens occur before."""
    last = tokens[-size:]
    return sum(tokens[i : i + size] == last for i in range(len(tokens) - size))


def check_equal_work(
    setup: Setup, methods: dict[str, Method], draft: Any, ngram: Drafter
) -> dict[str, Any]:
    """Assert that all methods do the same work; return passes per prompt and what differs."""
    passes: dict[str, list[int]] = {name: [] for name in methods}
    same_lookups = []
    for prompt in setup.prompts:
        texts = {}
        for name, decode in methods.items():
            with counting(setup.target.decoder) as counted:
                texts[name] = decode(prompt)
            passes[name].append(len(counted))
        text = texts["plain"]
        wrong = [name for name, other in texts.items() if other != text]
        assert len(text) == setup.new_tokens
        assert not wrong, f"{', '.join(wrong)} must give the plain loop's tokens, and do not"
        runs = agreement(draft, prompt, text, setup.depth)
        for name, first in (("two_model", 1), ("assisted generation", 0)):
            if name in methods:
                expected = passes_of(runs, first)
                got = passes[name][-1]
                assert got == expected, f"{name} must take {expected} passes, got {got}"
        same_lookups.append(check_lookups(setup, ngram, prompt, text))
    return {"passes": passes, "same_lookups": float(np.mean(same_lookups))}


def measure(
    setup: Setup, methods: dict[str, Method], repeats: int, clock: Callable[[], float]
) -> dict[str, np.ndarray]:
    """Return the seconds of each method, by repeat and prompt; the order of methods rotates."""
    names = list(methods)
    seconds = {name: np.zeros((repeats, len(setup.prompts))) for name in names}
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            for place, prompt in enumerate(setup.prompts):
                shift = (repeat + place) % len(names)
                for name in names[shift:] + names[:shift]:
                    started = clock()
                    methods[name](prompt)
                    seconds[name][repeat, place] = clock() - started
            gc.collect()
    finally:
        gc.enable()
    return seconds


def ratio(theirs: np.ndarray, ours: np.ndarray) -> dict[str, float]:
    """Return the median ratio of paired seconds with its 95 % interval over prompts.

    The repeats of a prompt are drawn with it: they are no prompts of their own.
    """
    ratios = theirs / ours  # by repeat and prompt
    interval = scipy.stats.bootstrap(
        (np.arange(ratios.shape[1]),),
        lambda drawn: np.median(ratios[:, drawn]),
        n_resamples=2000,
        method="percentile",
        vectorized=False,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return {"ratio": float(np.median(ratios)), "low": interval.low, "high": interval.high}


class Meter:
    """Seconds inside functions that it wraps, each interval with its start; nested ones once."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        self.inside = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside = True
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.intervals.append((started, time.perf_counter() - started))
            self.inside = False
            return result

        return timed


@contextlib.contextmanager
def metered(target: Target, drafter: Drafter | None) -> Iterator[Meter]:
    """Time the computation of both models: the decoders, the heads, and a drafter's own modules."""
    meter = Meter()
    modules: list[nn.Module] = [target.decoder]
    if drafter is not None:  # two levels: a model inside the drafter, or its single layers
        for child in drafter.children():
            modules += [child, *child.children()]
    readout = target.readout
    try:
        for module in modules:
            module.__dict__["forward"] = meter.wrap(module.forward)
        readout.__dict__["logits"] = meter.wrap(readout.logits)  # the dataclass is frozen
        yield meter
    finally:
        for module in modules:
            del module.__dict__["forward"]
        del readout.__dict__["logits"]


def time_outside(setup: Setup, drafter: Drafter | None, repeats: int) -> dict[str, float]:
    """Return the share of the steps after the prompt's that is spent outside the two models."""
    decode = our_decoding(setup, drafter)
    shares, stated, step_s = [], [], []
    with metered(setup.target, drafter) as meter:
        for prompt in setup.prompts * repeats:
            meter.intervals.clear()
            started = time.perf_counter()
            stats = decode(prompt).stats
            ended = time.perf_counter()
            begun = started + stats.prefill_s
            inside = sum(took for start, took in meter.intervals if start >= begun)
            steps = ended - begun
            shares.append(1 - inside / steps)
            stated.append(stats.other_s / steps)
            step_s.append(steps / stats.num_target_passes)
    return {
        "outside": float(np.median(shares)),
        "other_s": float(np.median(stated)),
        "step_ms": 1e3 * float(np.median(step_s)),
    }


def main() -> None:
    """Compare, print a table and append a line of json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="float32")
    parser.add_argument("--draft-layers", type=int, default=2, help="of the target, as a draft")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of this process, on busy machines"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/decode.jsonl"))
    arguments = parser.parse_args()
    if arguments.prompts < 2:
        parser.error(f"--prompts must be at least 2, which intervals need, got {arguments.prompts}")
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    target = load_target(load_choice("model", "tiny"), TORCH_DTYPES[arguments.dtype], "cpu")
    read, _ = read_prompts(BUILTIN_PROMPTS, None)
    chosen = read[:: max(1, len(read) // arguments.prompts)][: arguments.prompts]
    template = load_choice("data", "selfgen").text_format
    prompts = [
        prompt_tokens([Message("user", prompt.turns[0])], target.tokenizer, template)
        for prompt in chosen
    ]
    setup = Setup(target, prompts, arguments.new_tokens, arguments.depth)
    target.model.generation_config.eos_token_id = None
    ngram = load_choice("drafter", "ngram").build(target.spec)
    drafters: dict[str, Drafter | None] = {"plain": None, "ngram": ngram}
    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory() as folder:
        draft = first_layers(target, arguments.draft_layers, Path(folder))
        if (conf_dir() / "drafter" / "two_model.yaml").is_file():
            config = dataclasses.replace(load_choice("drafter", "two_model"), path=folder)
            drafter = config.build(target.spec).to(target.dtype).eval()
            drafter.attach(target.tokenizer)
            drafters["two_model"] = drafter
    draft.generation_config.update(
        eos_token_id=None,
        num_assistant_tokens=arguments.depth,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    methods: dict[str, Method] = {
        name: (lambda decode: lambda prompt: decode(prompt).tokens)(our_decoding(setup, drafter))
        for name, drafter in drafters.items()
    }
    methods["generate"] = their_decoding(setup)
    methods["prompt lookup"] = their_decoding(
        setup,
        prompt_lookup_num_tokens=arguments.depth,
        max_matching_ngram_size=ngram.config.max_ngram,
    )
    methods["assisted generation"] = their_decoding(setup, assistant_model=draft)
    work = check_equal_work(setup, methods, draft, ngram)
    seconds = measure(setup, methods, arguments.repeats, CLOCKS[arguments.clock])
    rows = []
    for ours, theirs, wanted in PAIRS:
        if ours not in methods:
            console.print(f"{ours}: not in conf/drafter, left out")
            continue
        passes = [sum(work["passes"][name]) for name in (ours, theirs)]
        row = {"ours": ours, "theirs": theirs, "wanted": wanted, "passes": passes}
        row |= ratio(seconds[theirs], seconds[ours])
        row["ratio_per_pass"] = row["ratio"] * passes[0] / passes[1]
        row |= {
            f"{who}_tokens_per_second": setup.new_tokens * len(prompts) / np.median(s.sum(1))
            for who, s in (("our", seconds[ours]), ("their", seconds[theirs]))
        }
        row |= time_outside(setup, drafters[ours], max(1, arguments.repeats // 2))
        rows.append(row)
    console.print(table(rows))
    console.print(
        f"tiny target, {arguments.dtype}, threads: {arguments.threads}, depth {setup.depth}; equal "
        f"tokens asserted; both lookups propose the same at {work['same_lookups']:.0%} of places"
    )
    made_by = provenance([]) | {"command": shlex.join(["python", *sys.argv])}
    record = {**made_by, "arguments": {k: str(v) for k, v in vars(arguments).items()}}
    with arguments.json.open("a") as stream:
        stream.write(json.dumps({**record, "rows": rows, "work": work}) + "\n")


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the measurements as a table for a terminal."""
    shown = Table("ours", "theirs", "tok/s", "theirs", "times as fast", "per pass", "wanted")
    shown.add_column("passes")
    shown.add_column("outside the models")
    for row in rows:
        reached = "yes" if row["ratio"] >= row["wanted"] else "NO"
        inside = "yes" if row["outside"] <= OUTSIDE else "NO"
        shown.add_row(
            row["ours"],
            row["theirs"],
            f"{row['our_tokens_per_second']:.0f}",
            f"{row['their_tokens_per_second']:.0f}",
            f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
            f"{row['ratio_per_pass']:.2f}",
            f">= {row['wanted']} {reached}",
            "{} {}".format(*row["passes"]),
            f"{row['outside']:.1%} of {row['step_ms']:.1f} ms ({inside})",
        )
    return shown


if __name__ == "__main__":
    main()
