"""Training steps of EAGLE-3 against their plain form: benchmarks/train.py [--quick] [--json FILE].

A step is forward, backward and AdamW over features that are ready: a random target's, with 256
hidden values. Plain is the definition (tests/plain_training.py): the logits of all positions at
once, scores of all pairs. Both are timed in turns in one process; medians of `--repeats` turns.
Before that they must give the same loss and gradient. Memory is the most that torch held beyond
weights and features during a step, gradients included: on a CPU the sum of its allocator's events
in a step that is not timed, on CUDA `max_memory_allocated`. Recomputing is what
hardware.gradient_checkpointing=true does, compiled what hardware.compile=true does.

Then the shape of the best public EAGLE-3 trainer's record: 2,360 tokens/s in float32, 4,500 in
bfloat16 on two threads, next to the operations of the definition and the rate that the machine
reaches in one large product. Every position is trained and every first choice of the target lies
in the draft vocabulary, so that nothing is skipped.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from plain_training import plain_losses  # noqa: E402

from drafttrain.config.groups import content_of  # noqa: E402
from drafttrain.core.ops.layer_calls import LayerCalls  # noqa: E402
from drafttrain.core.placed_batch import placed  # noqa: E402
from drafttrain.core.readout import Readout  # noqa: E402
from drafttrain.core.types import (  # noqa: E402
    Batch,
    Losses,
    TargetFeatures,
    TargetSpec,
    weighted_sum,
)
from drafttrain.drafters.base import TrainingChance  # noqa: E402
from drafttrain.drafters.eagle3 import Eagle3, Eagle3Config  # noqa: E402

HIDDEN, INNER, HEADS = 256, 1024, 4
VOCABS, LENGTHS, UNROLLS = (4096, 32768, 131072), (512, 2048, 8192), (1, 4, 7)
RECORD = {"float32": 2360, "bfloat16": 4500}


class NoChance(TrainingChance):
    """EAGLE-3 draws nothing."""

    def uniform_like(self, values: Tensor, document: Tensor) -> Tensor:
        """Return a half everywhere."""
        return torch.full_like(values, 0.5)


def setting(
    vocab: int, draft_vocab: int, rows: int, length: int, unroll: int, device: str
) -> tuple[Eagle3, Batch, TargetFeatures]:
    """Return a drafter, a batch whose every token is trained, and features of a random target."""
    torch.manual_seed(0)
    spec = TargetSpec(
        *("random", "0" * 64, "llama", vocab, HIDDEN, INNER, 8, HEADS, HEADS, HIDDEN // HEADS),
        *(1e-5, 1e4, 1 << 17, (1,), None, None),
    )
    values = content_of("drafter", "eagle3")
    del values["_target_"]
    values |= {"unroll": unroll, "draft_vocab_size": draft_vocab, "draft_vocab_coverage": 1.0}
    drafter = Eagle3(Eagle3Config(**values), spec)
    head = torch.randn(vocab, HIDDEN) / 16
    head[draft_vocab:] *= 1e-2  # so that the draft vocabulary has the target's likeliest tokens
    readout = Readout(torch.randn(vocab, HIDDEN), head, torch.ones(HIDDEN))
    counts = torch.zeros(vocab, dtype=torch.long)
    counts[:draft_vocab] = 1
    drafter.prepare(counts, readout)
    shape = (rows, length)
    batch = Batch(
        torch.randint(0, draft_vocab, shape),
        torch.ones(shape, dtype=torch.bool),
        torch.arange(length).expand(shape).contiguous(),
        torch.arange(rows)[:, None].expand(shape).contiguous(),
    )
    states = {layer: torch.randn(*shape, HIDDEN) for layer in drafter.captures}
    features = TargetFeatures(states, torch.randn(*shape, HIDDEN), readout)
    if device != "cpu":
        drafter, batch = drafter.to(device), placed(batch, torch.device(device))
        moved = {layer: hidden.to(device) for layer, hidden in states.items()}
        tables = (readout.embedding.to(device), head.to(device), torch.ones(HIDDEN, device=device))
        features = TargetFeatures(moved, features.final_hidden.to(device), Readout(*tables))
    return drafter, batch, features


class Form:
    """One way to compute the losses, and the step around it."""

    def __init__(
        self,
        losses: Callable[[], Losses],
        drafter: Eagle3,
        batch: Batch,
        dtype: str,
    ) -> None:
        self.losses, self.drafter, self.tokens = losses, drafter, batch.tokens.numel()
        self.device, self.dtype = batch.tokens.device.type, dtype
        fused = {"fused": True}
        self.optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5, **fused)

    def gradient(self) -> float:
        """Run forward and backward; return the loss."""
        half = torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16")
        with half:
            loss = weighted_sum(self.losses()) / self.tokens
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        """Return the seconds of a training step."""
        synchronise(self.device)
        start = time.perf_counter()
        self.gradient()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronise(self.device)
        return time.perf_counter() - start

    def peak(self) -> int:
        """Return the most bytes held during forward and backward, beyond what was held before."""
        self.optimizer.zero_grad()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.gradient()
            most = torch.cuda.max_memory_allocated() - before
        else:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile:
                self.gradient()
            held = most = 0
            for event in sorted(profile.profiler.kineto_results.events(), key=start_of):
                if event.name() == "[memory]":
                    held += event.nbytes()
                    most = max(most, held)
        self.optimizer.zero_grad()
        return most


def start_of(event: Any) -> int:
    """Return when an event of the profiler began."""
    return event.start_ns()


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def ours(setting: Any, dtype: str, recompute: bool = False, compiled: str | None = None) -> Form:
    """Return the drafter's own form, with the options of `hardware`."""
    drafter, batch, features = setting
    calls = LayerCalls(recompute, compiled)

    def losses() -> Losses:
        with calls.active():
            return drafter(batch, features, NoChance())

    return Form(losses, drafter, batch, dtype)


def plain(setting: Any, dtype: str) -> Form:
    """Return the definition, on the same weights."""
    drafter, batch, features = setting
    return Form(lambda: plain_losses(drafter, batch, features), drafter, batch, dtype)


def agree(one: Form, other: Form) -> float:
    """Check that loss and gradient are the same; return the gradients' relative distance."""
    found = []
    for form in (one, other):
        form.optimizer.zero_grad()
        loss = form.gradient()
        found.append((loss, [p.grad.clone() for p in form.drafter.parameters()]))
        form.optimizer.zero_grad()
    (loss, own), (expected, theirs) = found
    near = 1e-4 if one.dtype == "float32" else 5e-2
    assert abs(loss - expected) <= near * abs(expected), (loss, expected)
    distance = sum(float((a - b).square().sum()) for a, b in zip(own, theirs, strict=True)) ** 0.5
    distance /= sum(float(b.square().sum()) for b in theirs) ** 0.5
    assert distance < 10 * near, distance
    return distance


def timed(competitors: list[Form], repeats: int) -> list[list[float]]:
    """Return the seconds of each form's steps, taken in turns."""
    for form in competitors:
        form.step()
    turns = [[form.step() for form in competitors] for _ in range(repeats)]
    return [list(column) for column in zip(*turns, strict=True)]


def operations(vocab: int, draft_vocab: int, length: int, unroll: int) -> float:
    """Return the operations per token of the definition; a multiply-add counts as two.

    Forward and twice that backward; the target's head forward only; half for causal attention.
    """
    layer = 2 * HIDDEN * 3 * HIDDEN + HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    attention = HIDDEN * length  # scores and mixture, half of the pairs
    depth = layer + attention + HIDDEN * draft_vocab
    return 6 * (3 * HIDDEN * HIDDEN + unroll * depth) + 2 * HIDDEN * vocab


def peak_rate(device: str, dtype: str) -> float:
    """Return the operations per second that one large product reaches."""
    kind, size = getattr(torch, dtype), 2048 if device == "cpu" else 8192
    one, other = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        synchronise(device)
        start = time.perf_counter()
        one @ other
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def plain_bytes(vocab: int, length: int, unroll: int) -> float:
    """Return roughly the bytes of the plain form: logits, probabilities, autograd's, by depth."""
    return 4.0 * length * (vocab * (3 + 4 * unroll) + HEADS * length * 4 * unroll)


def case(
    vocab: int, length: int, unroll: int, options: argparse.Namespace, rate: float
) -> dict[str, Any]:
    """Measure one shape; note, but do not measure, what cannot fit or takes too long."""
    row: dict[str, Any] = {"vocab": vocab, "length": length, "unroll": unroll}
    seconds = operations(vocab, vocab, length, unroll) * length / rate
    if seconds > options.seconds:
        return row | {"skipped": f"about {seconds:.0f} s a step"}
    shape = setting(vocab, vocab, 1, length, unroll, options.device)
    competitors = {"": ours(shape, "float32"), "recomputing_": ours(shape, "float32", True)}
    if plain_bytes(vocab, length, unroll) < options.gigabytes * 1e9:
        competitors["plain_"] = plain(shape, "float32")
        row["gradient_distance"] = agree(competitors[""], competitors["plain_"])
    times = timed(list(competitors.values()), options.repeats if seconds < 2 else 1)
    for (name, form), column in zip(competitors.items(), times, strict=True):
        row[f"{name}tokens_per_s"] = length / statistics.median(column)
        row[f"{name}peak_mb"] = form.peak() / 1e6
    if "plain_" in competitors:
        row["time_ratio"] = statistics.median(
            a / b for a, b in zip(times[0], times[2], strict=True)
        )
        row["memory_ratio"] = row["peak_mb"] / row["plain_peak_mb"]
    return row


def record(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the shape of the best public trainer's record."""
    rows = []
    for dtype, theirs in RECORD.items():
        rate = peak_rate(options.device, dtype)
        shape = setting(4096, 1024, 4, 256, 7, options.device)
        competitors = {"as written": ours(shape, dtype), "plain": plain(shape, dtype)}
        if options.compile:
            competitors["compiled"] = ours(shape, dtype, compiled="inductor")
        times = timed(list(competitors.values()), options.repeats * 2)
        rate = max(rate, peak_rate(options.device, dtype))
        each = operations(4096, 1024, 256, 7)
        for (name, form), column in zip(competitors.items(), times, strict=True):
            speed = form.tokens / statistics.median(column)
            rows.append(
                {
                    "dtype": dtype,
                    "form": name,
                    "tokens_per_s": speed,
                    "best_tokens_per_s": form.tokens / min(column),
                    "public_tokens_per_s": theirs,
                    "mflop_per_token": each / 1e6,
                    "peak_gflops": rate / 1e9,
                    "efficiency": speed * each / rate,
                    "gradient_distance": agree(form, competitors["plain"]),
                    "peak_mb": form.peak() / 1e6,
                }
            )
    return rows


def shown(value: Any) -> str:
    """Return a number as the tables have it."""
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value:.0f}"


def line(row: dict[str, Any], keys: list[str]) -> str:
    """Return a row of a markdown table."""
    cells = [row[key] if isinstance(row.get(key), str) else "" for key in keys]
    cells = [shown(row[k]) if not c and k in row else c for k, c in zip(keys, cells, strict=True)]
    return f"| {' | '.join(cells)} | {row.get('skipped', '')} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller shapes only")
    parser.add_argument("--only-record", action="store_true")
    parser.add_argument("--compile", action="store_true", help="the record's shape compiled, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="longest step that is measured")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="room for the plain form")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"threads": options.threads, "torch": torch.__version__}
    print(f"EAGLE-3, hidden {HIDDEN}, {options.device}, {options.threads} threads")
    result["record"] = record(options)
    keys = list(result["record"][0])
    print(f"| {' | '.join(keys)} | |\n|{'---|' * (len(keys) + 1)}")
    for row in result["record"]:
        print(line(row, keys), flush=True)
    result["shapes"] = []
    if not options.only_record:
        rate = peak_rate(options.device, "float32")
        keys = ["vocab", "length", "unroll", "tokens_per_s", "plain_tokens_per_s", "time_ratio"]
        keys += ["recomputing_tokens_per_s", "peak_mb", "plain_peak_mb", "memory_ratio"]
        keys += ["recomputing_peak_mb"]
        print(f"\n| {' | '.join(keys)} | |\n|{'---|' * (len(keys) + 1)}")
        for vocab in VOCABS[:2] if options.quick else VOCABS:
            for length in LENGTHS[:2] if options.quick else LENGTHS:
                for unroll in UNROLLS:
                    row = case(vocab, length, unroll, options, rate)
                    result["shapes"].append(row)
                    print(line(row, keys), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
