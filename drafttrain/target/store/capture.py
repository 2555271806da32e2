"""Write what several drafters read of the target to the disk, once: a store of features."""

import errno
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from drafttrain.core.types import FeatureSource, Sample
from drafttrain.data.batches import collate
from drafttrain.runtime.disk import DiskError
from drafttrain.runtime.journal import append_records
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import progress
from drafttrain.target.model import Target
from drafttrain.target.served import ServedTarget
from drafttrain.target.store.config import StoreConfig, StoreContents
from drafttrain.target.store.features import rows_per_shard
from drafttrain.target.store.folder import duration, finish, prepare, size_of
from drafttrain.target.store.manifest import read_manifest
from drafttrain.target.store.shards import (
    FINAL,
    SCALE,
    STORED,
    Manifest,
    Shard,
    decode,
    encode,
    kept_positions,
    plan_shards,
    shard_name,
    write_tensors,
)

PROBE_BYTES = 32e6  # written once to learn how fast the disk is


def capture(
    target: Target | ServedTarget,
    samples: list[Sample],
    asked: StoreContents,
    config: StoreConfig,
    *,
    template: str,
    record: dict[str, Any],
    micro_batch: int,
    ranks: Ranks,
    stop: StopRequest,
    say: Callable[[str], None],
) -> Manifest:
    """Write the store, or what is missing of it; every rank takes its share of the shards.

    A conversation is computed beside those of its own shard only, so a shard has the same bytes
    whenever it is written. template: fingerprint of the chat template. record: provenance, its
    command in it. micro_batch: conversations in one pass. Raises ValueError where the disk cannot
    hold it, and where the folder holds a store of other settings; Stopped where `stop` was asked.
    """
    folder = Path(config.dir)
    rows = [int(kept_positions(sample.loss_mask, asked.reach).sum()) for sample in samples]
    with _disk_full_explained(folder):
        if ranks.is_main:
            prepare(folder, target, samples, rows, asked, config, template, record, say)
        ranks.barrier()
        manifest = read_manifest(folder)
        assert manifest is not None, "just written"
        if manifest.complete:
            return manifest
        plan = plan_shards(rows, rows_per_shard(manifest))
        there = {record.file for record in manifest.shards}
        missing = [number for number in range(len(plan)) if shard_name(number) not in there]
        writer = Writer(target, samples, rows, manifest, folder, micro_batch)
        with target.in_step():
            if ranks.is_main:
                places = [place for number in missing for place in plan[number]]
                say(writer.time_of(places, ranks.world_size))
        mine = missing[ranks.rank :: ranks.world_size]
        total = sum(len(samples[i].tokens) for number in mine for i in plan[number])
        started, done = time.monotonic(), 0
        with target.in_step(), progress("capture", total, show=ranks.is_main) as tick:
            for number in mine:
                shard = writer.write(shard_name(number), plan[number])
                append_records(folder / f"journal-{ranks.rank}.jsonl", [asdict(shard)])
                done += shard.tokens
                tick(shard.tokens, f"{done / (time.monotonic() - started):,.0f} tokens/s")
                stop.obey()
        ranks.barrier()
        if ranks.is_main:
            finish(folder, manifest, plan)
        ranks.barrier()
    finished = read_manifest(folder)
    assert finished is not None, "just written"
    return finished


@contextmanager
def _disk_full_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, DiskError) as error:
        cause = error.__cause__ if isinstance(error, DiskError) else error
        full = getattr(cause, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if not full:
            raise
        raise DiskError(
            f"the disk of store.dir={folder} is full "
            f"({size_of(shutil.disk_usage(folder).free)} free): make room there; the same command "
            "then goes on where it stopped"
        ) from error


class Writer:
    """Computes and writes single shards."""

    def __init__(
        self,
        target: FeatureSource,
        samples: list[Sample],
        rows: list[int],
        manifest: Manifest,
        folder: Path,
        micro_batch: int,
    ) -> None:
        self.target, self.samples, self.rows = target, samples, rows
        self.manifest, self.folder, self.micro_batch = manifest, folder, micro_batch
        self.dtype = manifest.settings["store.dtype"]
        self.device = target.readout.embedding.device

    def write(self, name: str, places: Sequence[int]) -> Shard:
        """Compute the features of these conversations and write them as one shard."""
        tensors, squares = self.compute(places)
        written = write_tensors(self.folder / name, tensors)
        return Shard(
            **asdict(written),
            tokens=sum(len(self.samples[place].tokens) for place in places),
            rows=sum(self.rows[place] for place in places),
            conversations=[self.samples[place].index for place in places],
            squares=squares,
        )

    def time_of(self, places: Sequence[int], world_size: int) -> str:
        """Return a line on how long these conversations take: from one pass and one file."""
        per_token, per_byte = measure(self, places)
        tokens = sum(len(self.samples[place].tokens) for place in places)
        size = sum(self.rows[place] for place in places) * self.manifest.bytes_per_row
        seconds = tokens * per_token / world_size + size * per_byte
        each = f" on each of {world_size} ranks" if world_size > 1 else ""
        return (
            f"time: about {duration(seconds)}, at {1 / per_token:,.0f} tokens/s{each} and "
            f"{1e-6 / per_byte:,.0f} MB/s of the disk"
        )

    @torch.no_grad()
    def compute(self, places: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
        """Return the tensors of a shard, and of each the squared error and the squared values."""
        names, width = self.manifest.names, self.target.spec.hidden_size
        stored = dict(zip(places, self._ranges(places), strict=True))
        total = sum(self.rows[place] for place in places)
        tensors = {name: torch.empty(total, width, dtype=STORED[self.dtype]) for name in names}
        if self.dtype == "float8":
            tensors |= {name + SCALE: torch.empty(total) for name in names}
        squares = {name: [0.0, 0.0] for name in names}
        longest_first = sorted(places, key=lambda i: (-len(self.samples[i].tokens), i))
        for first in range(0, len(longest_first), self.micro_batch):
            chosen = longest_first[first : first + self.micro_batch]
            batch = collate([self.samples[place] for place in chosen]).to(self.device)
            features = self.target.features(batch, self.manifest.layers)
            for name in names:
                layer = None if name == FINAL else int(name.removeprefix("layer."))
                hidden = features.final_hidden if layer is None else features.captured[layer]
                hidden = hidden.cpu()
                for row, place in enumerate(chosen):
                    kept = kept_positions(self.samples[place].loss_mask, self.manifest.reach)
                    values = hidden[row, : len(kept)][kept]
                    parts = encode(values, self.dtype)
                    for part, suffix in zip(parts, ("", SCALE), strict=False):
                        tensors[name + suffix][stored[place]] = part
                    wrong, whole = squared(values, parts)
                    squares[name][0] += wrong
                    squares[name][1] += whole
        return tensors, squares

    def _ranges(self, places: Sequence[int]) -> list[slice]:
        ends = list(itertools.accumulate(self.rows[place] for place in places))
        return [slice(stop - self.rows[i], stop) for i, stop in zip(places, ends, strict=True)]


def squared(values: Tensor, stored: list[Tensor]) -> tuple[float, float]:
    """Return the sums of squared errors and of squared values of what was stored."""
    wide = values.double()
    back = torch.empty_like(wide)
    decode(stored, back)
    return float((back - wide).square().sum()), float(wide.square().sum())


def measure(writer: Writer, places: Sequence[int]) -> tuple[float, float]:
    """Return seconds a token of the target and seconds a byte of the disk, each measured once."""
    by_length = sorted(places, key=lambda i: (len(writer.samples[i].tokens), i))
    count = min(writer.micro_batch, len(by_length))
    chosen = [by_length[(2 * i + 1) * len(by_length) // (2 * count)] for i in range(count)]
    for _ in range(2):  # the first pass warms up
        started = time.perf_counter()
        tensors, _ = writer.compute(chosen)
        elapsed = time.perf_counter() - started
    per_token = elapsed / sum(len(writer.samples[i].tokens) for i in chosen)
    held = max(1, sum(tensor.nbytes for tensor in tensors.values()))
    limit = min(PROBE_BYTES, writer.manifest.settings["store.shard_mb"] * 1e6)
    times = max(1, int(limit // held))
    probe = {f"{i}.{name}": t.clone() for i in range(times) for name, t in tensors.items()}
    started = time.perf_counter()
    path = writer.folder / "probe"
    write_tensors(path, probe)
    path.unlink()
    return per_token, (time.perf_counter() - started) / (held * times)
