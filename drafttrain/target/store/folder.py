"""Beginning, resuming and finishing a store: what is there, what must agree, what has room."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain.core.readout import Readout
from drafttrain.core.types import FeatureSource, Sample
from drafttrain.runtime.disk import write_whole
from drafttrain.runtime.run_folder import MANIFEST
from drafttrain.target.store.config import StoreConfig, StoreContents
from drafttrain.target.store.features import rows_per_shard, samples_to_tensors
from drafttrain.target.store.manifest import read_journals, read_manifest
from drafttrain.target.store.shards import (
    CONVERSATIONS,
    JOURNAL,
    PROVENANCE,
    REACH,
    READOUT,
    SHARD,
    UNFINISHED,
    File,
    Manifest,
    Shard,
    StoredReadout,
    StoreError,
    bytes_per_row,
    own_files,
    plan_shards,
    problem_of,
    shard_name,
    tensor_names,
    write_tensors,
)

OWN = re.compile(
    "|".join(map(re.escape, (MANIFEST, PROVENANCE, CONVERSATIONS, READOUT)))
    + f"|{SHARD.pattern}|{JOURNAL.pattern}|{UNFINISHED.pattern}|probe"
)
SPARE_BYTES = 1e6  # for what no plan counts: headers, the manifest, names


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
    """Begin a store, or check the one that is there and strike out what is damaged of it."""
    folder.mkdir(parents=True, exist_ok=True)
    own_files(folder, OWN)  # before anything is written or removed
    for leftover in own_files(folder, UNFINISHED):
        leftover.unlink()
    earlier = read_manifest(folder)
    tensors = samples_to_tensors(samples)
    settings = settings_of(target, tensors, asked, config, template)
    if earlier is not None:
        require_same(folder, earlier.settings, settings)
    write_whole(folder / PROVENANCE, json.dumps(record, indent=2) + "\n")
    head, about = readout_to_tensors(target.readout)
    names = tensor_names(asked.layers, config.final_hidden)
    size = bytes_per_row(config.dtype, target.spec.hidden_size, len(names))
    manifest = Manifest(
        complete=False,
        settings=settings,
        target=target.spec,
        readout=about,
        conversations=File(CONVERSATIONS, 0, ""),
        num_conversations=len(samples),
        num_tokens=sum(len(sample.tokens) for sample in samples),
        num_rows=sum(rows),
        bytes_per_row=size,
        shards=[],
    )
    plan = plan_shards(rows, rows_per_shard(manifest))
    if earlier is not None:
        records = [*earlier.shards, *read_journals(folder, manifest.names)]
        planned = [_contents(samples, rows, places) for places in plan]
        manifest = replace(manifest, shards=intact(folder, records, planned, config.verify, say))
    if len(manifest.shards) < len(plan):
        beside = 0 if earlier else sum(t.nbytes for t in (*head.values(), *tensors.values()))
        require_room(folder, manifest, len(plan), beside, say)
    if earlier is None:
        readout = replace(about, file=write_tensors(folder / READOUT, head))
        conversations = write_tensors(folder / CONVERSATIONS, tensors)
    else:
        readout, conversations = earlier.readout, earlier.conversations
        for file, content in ((readout.file, head), (conversations, tensors)):
            if problem := problem_of(folder, file, config.verify):
                say(f"{folder / file.file} {problem}: written again")
                write_tensors(folder / file.file, content)
    complete = len(manifest.shards) == len(plan)
    manifest = replace(manifest, complete=complete, readout=readout, conversations=conversations)
    manifest.write(folder)
    for journal in own_files(folder, JOURNAL):  # the manifest has what they had
        journal.unlink()


def settings_of(
    target: FeatureSource,
    tensors: dict[str, Tensor],
    asked: StoreContents,
    config: StoreConfig,
    template: str,
) -> dict[str, Any]:
    """Return all that decides what a store holds, by the name that a user knows it by."""
    return {
        "model": target.spec.fingerprint,
        "chat template": template,
        "data": fingerprint_of(tensors),
        "hardware.train_dtype": str(target.readout.embedding.dtype).removeprefix("torch."),
        "store.layers": list(asked.layers),
        "store.final_hidden": config.final_hidden,
        "store.dtype": config.dtype,
        "store.assistant_only": asked.reach is not None,
        REACH: asked.reach,
        "store.shard_mb": float(config.shard_mb),
    }


def fingerprint_of(tensors: dict[str, Tensor]) -> str:
    """Return a fingerprint of the conversations."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].numpy().tobytes())
    return found.hexdigest()[:32]


def require_same(folder: Path, earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise StoreError unless the store in `folder` was begun with the settings of now."""
    for key, value in now.items():
        if earlier.get(key) != value:
            raise StoreError(
                f"{key} must be {earlier.get(key)}, with which {folder} was begun, got {value}; "
                "give what the store was begun with, or capture into another store.dir"
            )


Contents = tuple[int, int, list[int]]  # tokens, rows and conversations of a shard


def _contents(samples: list[Sample], rows: list[int], places: range) -> Contents:
    tokens = sum(len(samples[place].tokens) for place in places)
    return tokens, sum(rows[i] for i in places), [samples[i].index for i in places]


def intact(
    folder: Path,
    records: list[Shard],
    planned: list[Contents],
    checksum: bool,
    say: Callable[[str], None],
) -> list[Shard]:
    """Return the shards that are as they were written, in order; the others are removed.

    planned: what each must hold. A record of anything else is not one of this store's.
    """
    due = {shard_name(number): contents for number, contents in enumerate(planned)}
    kept = []
    for record in sorted({record.file: record for record in records}.values(), key=_number):
        problem = problem_of(folder, record, checksum)
        if due.get(record.file) != (record.tokens, record.rows, record.conversations):
            problem = "must hold the conversations that are its share, and is recorded with others"
        if problem is not None:
            say(f"{folder / record.file} {problem}: captured again")
            (folder / record.file).unlink(missing_ok=True)
        else:
            kept.append(record)
    return kept


def finish(folder: Path, manifest: Manifest, plan: list[range]) -> None:
    """Gather what all ranks have written into one manifest, and drop their journals."""
    shards = {
        record.file: record for record in [*manifest.shards, *read_journals(folder, manifest.names)]
    }
    assert len(shards) == len(plan), f"{len(shards)} of {len(plan)} shards"
    ordered = sorted(shards.values(), key=_number)
    replace(manifest, complete=True, shards=ordered).write(folder)
    for journal in own_files(folder, JOURNAL):
        journal.unlink()


def readout_to_tensors(readout: Readout) -> tuple[dict[str, Tensor], StoredReadout]:
    """Return what is written of the readout once, and what the manifest says of it."""
    tensors = {"embedding": readout.embedding, "norm": readout.norm, "head_bias": readout.head_bias}
    if readout.head is not readout.embedding:
        tensors["head"] = readout.head
    about = StoredReadout(
        File(READOUT, 0, ""), readout.embedding_scale, readout.logit_scale, readout.soft_cap
    )
    return {k: t.contiguous().cpu() for k, t in tensors.items() if t is not None}, about


def _number(record: Shard) -> tuple[int, str]:
    return len(record.file), record.file  # shard-99999 comes before shard-100000


def require_room(
    folder: Path, manifest: Manifest, num_shards: int, beside: int, say: Callable[[str], None]
) -> None:
    """Say how large the store will be; ValueError with both numbers if the disk is too small.

    beside: bytes of what else is to be written.
    """
    whole = manifest.num_rows * manifest.bytes_per_row
    needed = whole - sum(shard.rows for shard in manifest.shards) * manifest.bytes_per_row
    kept = "" if manifest.reach is None else f", features of {manifest.num_rows:,} of them"
    say(
        f"store: {manifest.num_conversations:,} conversations of {manifest.num_tokens:,} tokens"
        f"{kept}, {manifest.bytes_per_row:,} bytes each: {size_of(whole)} in {num_shards:,} shards"
        + ("" if needed == whole else f"; {size_of(needed)} of it still to write")
    )
    needed += beside + int(SPARE_BYTES)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"store.dir must have {size_of(needed)} free for what is to be written, got "
            f"{size_of(free)} free in {folder}; use another disk, store.dtype=float8, or fewer "
            "conversations"
        )


def size_of(count: int | float) -> str:
    """Return bytes in words."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def duration(seconds: int | float) -> str:
    """Return a time in words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
