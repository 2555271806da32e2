"""Training from a store against training online with the target, interleaved (--help).

The same drafter, batches, dtype and threads on the embedded target. Blocks of steps alternate in
one process. At the start of a block nothing has been read ahead: its first step waits for that,
which is in the time, but not in the share of waiting. Tokens are random.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from drafttrain.commands.capture import asked_by
from drafttrain.commands.setup.target_and_drafter import shape_of
from drafttrain.config.compose import load_choice
from drafttrain.core.types import FeatureSource, Sample
from drafttrain.data.batches import Batches, token_counts
from drafttrain.data.prefetch import Prefetcher
from drafttrain.runtime.hardware import TORCH_DTYPES
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.run_folder import provenance
from drafttrain.runtime.signals import StopRequest
from drafttrain.target.model import Target, load_target
from drafttrain.target.store.capture import capture
from drafttrain.target.store.config import StoreConfig
from drafttrain.target.store.features import StoredTarget
from drafttrain.training.engine.build import build_engine
from drafttrain.training.loop import StepChance, StopVote, optimizer_step

CPU = torch.device("cpu")


class Quiet:
    """Discards what a step reports."""

    def add(self, *term: Any) -> None:
        """Drop a term."""

    def steps(self, loss_tokens: int, tokens: int) -> None:
        """Drop a count."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", nargs="+", default=["eagle3", "eagle", "medusa"])
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=TORCH_DTYPES
    )
    parser.add_argument("--stored", default="bfloat16", help="dtype of the store in bfloat16 runs")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--conversations", type=int, default=128)
    parser.add_argument("--out", type=Path)
    told = parser.parse_args(arguments)
    torch.set_num_threads(told.threads)
    samples = conversations(told.conversations)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for dtype in told.dtypes:
            target = load_target(load_choice("model", "tiny"), TORCH_DTYPES[dtype], "cpu")
            folder = Path(place) / dtype
            stored = "float32" if dtype == "float32" else told.stored
            speed = write_store(target, samples, told.drafters, folder, stored)
            store = StoredTarget(folder, TORCH_DTYPES[dtype], CPU, checksums=True)
            for name in told.drafters:
                measured = compare(name, target, store, samples, told)
                rows.append({"drafter": name, "dtype": dtype, "captured_per_s": speed, **measured})
    show(rows, told)
    if told.out:
        command = ["benchmarks/store.py", *(arguments or sys.argv[1:])]
        record = provenance([]) | {"command": " ".join(["python", *command]), "rows": rows}
        told.out.write_text(json.dumps(record, indent=1) + "\n")


def conversations(count: int) -> list[Sample]:
    """Return texts of 60 to 190 random tokens, of which the last two thirds are trained."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        length = int(torch.randint(60, 190, (), generator=generator))
        tokens = torch.randint(6, 4096, (length,), generator=generator)
        found.append(Sample(tokens, torch.arange(length) >= length // 3, index))
    return found


def write_store(
    target: Target, samples: list[Sample], drafters: list[str], folder: Path, dtype: str
) -> float:
    """Capture for all drafters; return tokens per second."""
    config = StoreConfig(
        dir=str(folder),
        drafters=drafters,
        layers=None,
        final_hidden=True,
        dtype=dtype,
        shard_mb=16.0,
        assistant_only=False,
        verify=False,
    )
    shapes = [shape_of(load_choice("drafter", name), target.spec) for name in drafters]
    started = time.perf_counter()
    capture(
        target,
        samples,
        asked_by(shapes, config),
        config,
        template="",
        record={},
        micro_batch=8,
        ranks=Ranks(0, 0, 1, CPU),
        stop=StopRequest(),
        say=print,
    )
    return sum(len(s.tokens) for s in samples) / (time.perf_counter() - started)


def compare(
    name: str, target: Target, store: StoredTarget, samples: list[Sample], told: Any
) -> dict[str, Any]:
    """Return tokens per second of both, their ratio by block, and the share of waiting."""
    sides: dict[str, tuple[FeatureSource, Any, Prefetcher]] = {}
    for side, source in (("online", target), ("stored", store)):
        torch.manual_seed(0)
        drafter = load_choice("drafter", name).build(source.spec)
        drafter.prepare(token_counts(samples, source.spec.vocab_size), source.readout)
        engine = build_engine(
            drafter,
            load_choice("deepspeed", "none"),
            device="cpu",
            dtype=source.dtype,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        read = partial(store.read, captures=drafter.captures) if source is store else None
        batches = Batches(samples, told.tokens, 8, seed=0)
        sides[side] = (source, engine, Prefetcher(batches, 2, read))
    times: dict[str, list[float]] = {side: [] for side in sides}
    waits: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(told.blocks + 1):
        for side, (source, engine, steps) in sides.items():
            seconds, tokens, waited, after_first = 0.0, 0, 0.0, 0.0
            for step in range(told.steps):
                started = time.perf_counter()
                group = steps.next_group()
                asked = time.perf_counter()
                vote = StopVote(engine.ranks, StopRequest())
                chance = StepChance(0, step)
                optimizer_step(engine, source, group, chance, 1e-4, Quiet(), vote)  # type: ignore[arg-type]
                ended = time.perf_counter()
                seconds, tokens = seconds + ended - started, tokens + group.tokens
                if step:
                    waited, after_first = waited + asked - started, after_first + ended - started
            steps.close()
            if block:  # the first warms up, and checks the shards
                times[side].append(tokens / seconds)
                waits[side].append(waited / after_first)
    ratios = [b / a for a, b in zip(times["online"], times["stored"], strict=True)]
    return {
        "online_per_s": statistics.median(times["online"]),
        "stored_per_s": statistics.median(times["stored"]),
        "ratios": ratios,
        "wait_online": statistics.median(waits["online"]),
        "wait_stored": statistics.median(waits["stored"]),
    }


def show(rows: list[dict[str, Any]], told: Any) -> None:
    """Print the table."""
    table = Table(title=f"tokens/s in steps of {told.tokens}, {told.threads} threads")
    for column in ("drafter", "dtype", "online", "stored", "ratio", "waiting online, stored"):
        table.add_column(column)
    for row in rows:
        low, middle, high = min(row["ratios"]), statistics.median(row["ratios"]), max(row["ratios"])
        table.add_row(
            row["drafter"],
            row["dtype"],
            f"{row['online_per_s']:,.0f}",
            f"{row['stored_per_s']:,.0f}",
            f"{middle:.2f} [{low:.2f}, {high:.2f}]",
            f"{row['wait_online']:.2%}, {row['wait_stored']:.2%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
