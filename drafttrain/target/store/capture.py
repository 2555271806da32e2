"""Write the target's features that several drafters read to disk, once: a store."""

import hashlib
import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich import filesize
from torch import Tensor

from drafttrain.core.placed_batch import placed
from drafttrain.core.types import FeatureSource, Sample, changed_part
from drafttrain.data.batches import collate
from drafttrain.runtime.disk import FULL, write_whole, written
from drafttrain.runtime.hardware import dtype_name
from drafttrain.runtime.journal import append_records
from drafttrain.runtime.load import SpeedWatch
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.run_folder import MANIFEST
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import followed, progress
from drafttrain.target.model import Target
from drafttrain.target.served import ServedTarget
from drafttrain.target.store import shards
from drafttrain.target.store.config import StoreConfig, StoreContents
from drafttrain.target.store.shards import Manifest, Shard, StoredReadout, StoreError

PROBE_BYTES = 32e6  # written once to learn how fast the disk is
OWN = re.compile(
    "|".join(map(re.escape, (MANIFEST, shards.PROVENANCE, shards.CONVERSATIONS, shards.READOUT)))
    + f"|{shards.SHARD.pattern}|{shards.JOURNAL.pattern}|{shards.UNFINISHED.pattern}|[.]probe"
)
SPARE_BYTES = 1e6  # for what the plan does not count: headers, the manifest, names


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
    """Write the store, or its missing shards; every rank takes its share of the shards.

    A conversation is batched with those of its own shard only, so a shard has the same bytes
    whenever it is written. template: fingerprint of the chat template. record: provenance, with
    the command. micro_batch: conversations in one pass. Raises ValueError if the disk cannot hold
    the store or the folder holds one with other settings, and Stopped if `stop` was requested.
    """
    folder = Path(config.dir)
    rows = [int(shards.kept_positions(sample.loss_mask, asked.reach).sum()) for sample in samples]
    with written(folder, "store.dir", FULL, "; the same command then resumes where it stopped"):
        if ranks.is_main:
            prepare(folder, target, samples, rows, asked, config, template, record, say)
        ranks.barrier()
        manifest = shards.read_manifest(folder)
        if manifest is None:
            raise _not_shared(folder, "the store that rank 0 began", ranks)
        if manifest.complete:
            return manifest
        plan = shards.plan_shards(rows, manifest.settings, manifest.bytes_per_row)
        there = {shard.file for shard in manifest.shards}
        missing = [number for number in range(len(plan)) if shards.shard_name(number) not in there]
        writer = Writer(target, samples, rows, manifest, folder, micro_batch)
        with target.in_step():
            if ranks.is_main:
                places = [place for number in missing for place in plan[number]]
                say(writer.time_of(places, ranks.world_size))
        mine = missing[ranks.rank :: ranks.world_size]
        total = sum(len(samples[i].tokens) for number in mine for i in plan[number])
        started, done = time.monotonic(), 0
        watch = SpeedWatch("features", say)
        with target.in_step(), progress("capture", total, show=ranks.is_main) as tick:
            for number in mine:
                shard = writer.write(shards.shard_name(number), plan[number])
                append_records(folder / f"journal-{ranks.rank}.jsonl", [asdict(shard)])
                done += shard.tokens
                watch.add(shard.tokens)
                tick(shard.tokens, f"{done / (time.monotonic() - started):,.0f} tokens/s")
                stop.obey()
        ranks.barrier()
        if ranks.is_main:
            journals = shards.read_journals(folder, manifest.names)
            every = _by_file([*manifest.shards, *journals])
            if len(every) < len(plan):
                raise _not_shared(folder, f"{len(plan) - len(every)} shards of other ranks", ranks)
            replace(manifest, complete=True, shards=every).write(folder)
            _remove(folder, shards.JOURNAL)
        ranks.barrier()
    finished = shards.read_manifest(folder)
    assert finished is not None, "just written"
    return finished


def _not_shared(folder: Path, lacking: str, ranks: Ranks) -> ValueError:
    return ValueError(
        f"store.dir={folder} must be one folder for all machines, on a file system that they share,"
        f" but rank {ranks.rank} does not find {lacking} there"
    )


def prepare(
    folder: Path,
    target: FeatureSource,
    samples: list[Sample],
    rows: list[int],
    asked: StoreContents,
    config: StoreConfig,
    template: str,
    record: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Start a store, or check the existing one and discard its damaged files."""
    folder.mkdir(parents=True, exist_ok=True)
    shards.own_files(folder, OWN)  # before anything is written or removed
    _remove(folder, shards.UNFINISHED)
    earlier = shards.read_manifest(folder)
    tensors = {
        "tokens": torch.cat([sample.tokens for sample in samples]).to(torch.int32),
        "loss_mask": torch.cat([sample.loss_mask for sample in samples]),
        "lengths": torch.tensor([len(sample.tokens) for sample in samples]),
        "index": torch.tensor([sample.index for sample in samples]),
    }
    conversations = hashlib.sha256()
    for name in sorted(tensors):
        conversations.update(name.encode() + tensors[name].numpy().tobytes())
    readout = target.readout
    settings: dict[str, Any] = {  # all that a store's content depends on, by the user's keys
        "model": target.spec.fingerprint,
        "chat template": template,
        "data": conversations.hexdigest()[:32],
        "hardware.train_dtype": dtype_name(readout.embedding.dtype),
        "store.layers": list(asked.layers),
        "store.final_hidden": config.final_hidden,
        "store.dtype": config.dtype,
        "store.assistant_only": asked.reach is not None,
        shards.REACH: asked.reach,
        "store.shard_mb": float(config.shard_mb),
    }
    begun = settings if earlier is None else earlier.settings
    for key, value in settings.items():
        if (before := begun.get(key)) != value:
            need, got = f"be {before}, as when {folder} was started", value
            if key == "model":
                need = f"be the target that {folder} was started with"
                got = f"{target.spec.name}: {changed_part(str(before), value)}"
            raise StoreError(
                f"{key} must {need}, got {got}; set it as it was, or capture into another store.dir"
            )
    write_whole(folder / shards.PROVENANCE, json.dumps(record, indent=2) + "\n")
    ends = {"embedding": readout.embedding, "norm": readout.norm, "head_bias": readout.head_bias}
    if readout.head is not readout.embedding:
        ends["head"] = readout.head
    head = {name: end.contiguous().cpu() for name, end in ends.items() if end is not None}
    size = shards.bytes_per_row(settings, target.spec.hidden_size)
    plan = shards.plan_shards(rows, settings, size)
    kept, files = [], {}
    if earlier is not None:
        kept = _intact(folder, earlier, samples, rows, plan, config.verify, say)
        files = {file.file: file for file in (earlier.readout.file, earlier.conversations)}
    if len(kept) < len(plan):
        whole, num_tokens = sum(rows) * size, sum(len(sample.tokens) for sample in samples)
        needed = whole - sum(shard.rows for shard in kept) * size
        some = "" if asked.reach is None else f", features of {sum(rows):,} of them"
        say(
            f"store: {len(samples):,} conversations of {num_tokens:,} tokens{some}, {size:,} bytes "
            f"each: {filesize.decimal(whole)} in {len(plan):,} shards"
            + ("" if needed == whole else f"; {filesize.decimal(needed)} of it still to write")
        )
        beside = 0 if earlier else sum(t.nbytes for t in (*head.values(), *tensors.values()))
        needed, free = needed + beside + int(SPARE_BYTES), shutil.disk_usage(folder).free
        if needed > free:
            raise ValueError(
                f"store.dir must have {filesize.decimal(needed)} free for what is to be written, "
                f"got {filesize.decimal(free)} free in {folder}; use another disk, "
                "store.dtype=float8, or fewer conversations"
            )
    for name, content in ((shards.READOUT, head), (shards.CONVERSATIONS, tensors)):
        problem = shards.problem_of(folder, files[name], config.verify) if name in files else None
        if problem is not None:
            say(f"{folder / name} {problem}: written again")
        if problem is not None or name not in files:
            files[name] = shards.write_tensors(folder / name, content)
    Manifest(
        complete=len(kept) == len(plan),
        settings=settings,
        target=target.spec,
        readout=StoredReadout(
            files[shards.READOUT], readout.embedding_scale, readout.logit_scale, readout.soft_cap
        ),
        conversations=files[shards.CONVERSATIONS],
        num_conversations=len(samples),
        num_tokens=sum(len(sample.tokens) for sample in samples),
        num_rows=sum(rows),
        bytes_per_row=size,
        shards=kept,
    ).write(folder)
    _remove(folder, shards.JOURNAL)  # the manifest now lists their shards


def _intact(
    folder: Path,
    earlier: Manifest,
    samples: list[Sample],
    rows: list[int],
    plan: list[range],
    checksum: bool,
    say: Callable[[str], None],
) -> list[Shard]:
    """Return the shards that are intact and match the plan; remove the others."""
    kept = []
    there = _by_file([*earlier.shards, *shards.read_journals(folder, earlier.names)])
    for shard in followed("checking shards", there, show=checksum):
        number = int(shard.file.removeprefix("shard-").partition(".")[0])
        places = (
            plan[number] if number < len(plan) and shard.file == shards.shard_name(number) else ()
        )
        problem = shards.problem_of(folder, shard, checksum)
        if not places or (shard.tokens, shard.rows, shard.conversations) != (
            sum(len(samples[place].tokens) for place in places),
            sum(rows[place] for place in places),
            [samples[place].index for place in places],
        ):
            problem = "must hold the conversations planned for it, and is recorded with others"
        if problem is not None:
            say(f"{folder / shard.file} {problem}: captured again")
            (folder / shard.file).unlink(missing_ok=True)
        else:
            kept.append(shard)
    return kept


def _by_file(records: list[Shard]) -> list[Shard]:
    """Return the last record of each shard, in order: shard-99999 comes before shard-100000."""
    last = {shard.file: shard for shard in records}
    return [last[name] for name in sorted(last, key=lambda name: (len(name), name))]


def _remove(folder: Path, pattern: re.Pattern[str]) -> None:
    for file in shards.own_files(folder, pattern):
        file.unlink()


class Writer:
    """Computes and writes single shards; `places` are the indices of their conversations."""

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
        self.lengths = [len(sample.tokens) for sample in samples]

    def write(self, name: str, places: Sequence[int]) -> Shard:
        tensors, squares = self.compute(places)
        return Shard(
            **asdict(shards.write_tensors(self.folder / name, tensors)),
            tokens=sum(self.lengths[place] for place in places),
            rows=sum(self.rows[place] for place in places),
            conversations=[self.samples[place].index for place in places],
            squares=squares,
        )

    def time_of(self, places: Sequence[int], world_size: int) -> str:
        """Return a log line with the time these conversations take, from one pass and one file."""
        per_token, per_byte = self._measure(places)
        tokens = sum(self.lengths[place] for place in places)
        size = sum(self.rows[place] for place in places) * self.manifest.bytes_per_row
        seconds = tokens * per_token / world_size + size * per_byte
        each = f" on each of {world_size} ranks" if world_size > 1 else ""
        return (
            f"time: about {_duration(seconds)}, at {1 / per_token:,.0f} tokens/s{each} and "
            f"{1e-6 / per_byte:,.0f} MB/s of the disk"
        )

    @torch.no_grad()
    def compute(self, places: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
        """Return a shard's tensors, and each one's sums of squared errors and squared values."""
        names, dtype = self.manifest.names, self.manifest.settings["store.dtype"]
        ends = itertools.accumulate(self.rows[place] for place in places)
        stored = {i: slice(stop - self.rows[i], stop) for i, stop in zip(places, ends, strict=True)}
        shape = (sum(self.rows[place] for place in places), self.target.spec.hidden_size)
        tensors = {name: torch.empty(shape, dtype=shards.STORED[dtype]) for name in names}
        if dtype == "float8":
            tensors |= {name + shards.SCALE: torch.empty(shape[0]) for name in names}
        squares = {name: [0.0, 0.0] for name in names}
        longest_first = sorted(places, key=lambda i: (-self.lengths[i], i))
        for first in range(0, len(longest_first), self.micro_batch):
            chosen = longest_first[first : first + self.micro_batch]
            batch = collate([self.samples[place] for place in chosen])
            batch = placed(batch, self.target.readout.embedding.device)
            features = self.target.features(batch, self.manifest.layers)
            hidden = {f"layer.{layer}": states for layer, states in features.captured.items()}
            hidden[shards.FINAL] = features.final_hidden
            for name in names:
                states = hidden[name].cpu()
                for row, place in enumerate(chosen):
                    kept = shards.kept_positions(self.samples[place].loss_mask, self.manifest.reach)
                    values = states[row, : len(kept)][kept]
                    parts = shards.encode(values, dtype)
                    for part, suffix in zip(parts, ("", shards.SCALE), strict=False):
                        tensors[name + suffix][stored[place]] = part
                    wide = values.double()
                    back = torch.empty_like(wide)
                    shards.decode(parts, back)
                    squares[name][0] += float((back - wide).square().sum())
                    squares[name][1] += float(wide.square().sum())
        return tensors, squares

    def _measure(self, places: Sequence[int]) -> tuple[float, float]:
        """Return the target's seconds per token and the disk's seconds per byte."""
        by_length = sorted(places, key=lambda i: (self.lengths[i], i))
        count = min(self.micro_batch, len(by_length))
        chosen = [by_length[(2 * i + 1) * len(by_length) // (2 * count)] for i in range(count)]
        for _ in range(2):  # the first pass warms up
            started = time.perf_counter()
            tensors, _ = self.compute(chosen)
            elapsed = time.perf_counter() - started
        held = max(1, sum(tensor.nbytes for tensor in tensors.values()))
        limit = min(PROBE_BYTES, self.manifest.settings["store.shard_mb"] * 1e6)
        times = max(1, int(limit // held))
        probe = {f"{i}.{name}": t.clone() for i in range(times) for name, t in tensors.items()}
        started = time.perf_counter()
        path = self.folder / ".probe"
        shards.write_tensors(path, probe)
        path.unlink()
        per_byte = (time.perf_counter() - started) / (held * times)
        return elapsed / sum(self.lengths[i] for i in chosen), per_byte


def _duration(seconds: int | float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
