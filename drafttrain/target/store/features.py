"""Features from disk: captured once from the target, for any number of drafters and runs."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Sample, TargetFeatures, changed_part
from drafttrain.data.batches import documents_of
from drafttrain.runtime.lock import require_free
from drafttrain.runtime.run_folder import call
from drafttrain.runtime.untrusted_input import header_of
from drafttrain.target.store import shards
from drafttrain.target.store.config import DTYPES
from drafttrain.target.store.shards import Manifest, StoreError


class StoredTarget:
    """A target read from a store, as far as training needs one; `samples` are its conversations.

    Shards are mapped into memory, and each is checked when it is first read. Features have `dtype`,
    whatever is stored.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, checksums: bool
    ) -> None:
        self.folder, self.dtype, self.device, self.checksums = folder, dtype, device, checksums
        require_free(folder, "features.dir")
        manifest = shards.read_manifest(folder)
        if manifest is None:
            raise StoreError(
                f"features.dir must be a folder that `capture` made, got {folder}, which has "
                f"no manifest; make one: {call('capture', f'store.dir={folder}')}"
            )
        if not manifest.complete:
            raise StoreError(
                f"features.dir must be a finished store, but {folder} is not: the same "
                f"command resumes where it stopped: {shards.recapture(folder, manifest)}"
            )
        self.manifest, self.spec = manifest, manifest.target
        self.readout = self._readout()
        self.samples = read_samples(folder, manifest)
        self.ordinals = {sample.index: place for place, sample in enumerate(self.samples)}
        self._place_rows()
        self._opened: dict[int, dict[str, list[Tensor]]] = {}

    def _readout(self) -> Readout:
        about = self.manifest.readout
        shards.require_whole(self.folder, self.manifest, about.file, self.checksums)
        path = self.folder / shards.READOUT
        found = header_of(path)
        dtype = found["embedding"].dtype if "embedding" in found else "F32"
        table, row = [self.spec.vocab_size, self.spec.hidden_size], [self.spec.hidden_size]
        shapes = {"embedding": table, "head": table, "norm": row, "head_bias": table[:1]}
        here = {name: (dtype, shapes[name]) for name in shapes if name in {"embedding", *found}}
        shards.check_tensors(path, found, here)
        tensors = load_file(path)
        readout = Readout(
            tensors["embedding"],
            tensors.get("head", tensors["embedding"]),
            tensors.get("norm"),
            tensors.get("head_bias"),
            about.embedding_scale,
            about.logit_scale,
            about.soft_cap,
        ).to(self.dtype)
        return readout.to(self.device)

    def _place_rows(self) -> None:
        """Compute where the rows of each conversation begin, as `capture` laid them out."""
        manifest = self.manifest
        masks = [shards.kept_positions(sample.loss_mask, manifest.reach) for sample in self.samples]
        kept = [int(mask.sum()) for mask in masks]
        self.rows_at: list[tuple[int, int]] = []  # each conversation's shard and first row there
        planned = []
        plan = shards.plan_shards(kept, manifest.settings, manifest.bytes_per_row)
        for number, places in enumerate(plan):
            row = 0
            for place in places:
                self.rows_at.append((number, row))
                row += kept[place]
            planned.append((shards.shard_name(number), row))
        if planned != [(shard.file, shard.rows) for shard in manifest.shards]:
            raise StoreError(
                f"{self.folder}/manifest.json must list the {len(planned)} shards of its "
                "conversations in order, with the rows of each, and lists others; restore it, or "
                f"remove {self.folder} and capture again"
            )

    def features(self, batch: Batch, captures: tuple[int, ...]) -> TargetFeatures:
        return self.read(batch, captures).to(self.device)

    def read(self, batch: Batch, captures: tuple[int, ...]) -> TargetFeatures:
        """Return the features of a batch on the CPU: zeros at padding and where none are stored."""
        names = [*(f"layer.{layer}" for layer in captures), shards.FINAL]
        shape = (*batch.tokens.shape, self.spec.hidden_size)
        pinned = self.device.type != "cpu"
        out = {name: torch.zeros(shape, dtype=self.dtype, pin_memory=pinned) for name in names}
        for row, start, stop, document, position in documents_of(batch):
            place, end = self.ordinals[document], position + stop - start
            sample = self.samples[place]
            assert end <= len(sample.tokens), "a document of another data set"
            number, first = self.rows_at[place]
            shard = self._shard(number)
            kept = shards.kept_positions(sample.loss_mask, self.manifest.reach)
            first += int(kept[:position].sum())
            here = kept[position:end]
            where = slice(first, first + int(here.sum()))
            for name in names:
                stored, into = [part[where] for part in shard[name]], out[name][row, start:stop]
                if self.manifest.reach is None:
                    shards.decode(stored, into)
                else:
                    rows = torch.empty(len(stored[0]), shape[-1], dtype=self.dtype)
                    shards.decode(stored, rows)
                    into[here] = rows
        captured = {layer: out[f"layer.{layer}"] for layer in captures}
        return TargetFeatures(captured, out[shards.FINAL], self.readout)

    def require(self, name: str, captures: tuple[int, ...], reach: int | None) -> None:
        """Raise StoreError unless the store holds what a drafter reads.

        reach: how many positions before a trained token it reads; None: the whole text.
        """
        settings = self.manifest.settings
        missing = sorted(set(captures) - set(self.manifest.layers))
        if missing:
            needed = sorted({*self.manifest.layers, *captures})
            raise StoreError(
                f"features.dir={self.folder} must hold layers {list(captures)} for "
                f"drafter={name}, but lacks {missing} (it has {list(self.manifest.layers)}); "
                f"capture them into another folder with store.layers={needed}"
            )
        if not settings["store.final_hidden"]:
            raise StoreError(
                f"features.dir={self.folder} must hold the final hidden state for "
                f"drafter={name}, but was captured with store.final_hidden=false; capture again "
                "into another folder with store.final_hidden=true"
            )
        held = self.manifest.reach
        if held is not None and (reach is None or reach > held):
            wanted = "the whole conversation" if reach is None else f"{reach} positions"
            raise StoreError(
                f"features.dir={self.folder} has features only of the {held} positions before each "
                f"trained token (store.assistant_only=true), and drafter={name} reads "
                f"{wanted}; capture again into another folder with store.assistant_only=false"
            )

    def check_target(self, spec_fingerprint: str, template: str, origin: str) -> None:
        for key, found in (("model", spec_fingerprint), ("chat template", template)):
            stored = self.manifest.settings[key]
            if stored != found:
                differs = f"the {key} differs: fingerprint {stored[:16]}, now {found[:16]}"
                if key == "model":
                    differs = changed_part(stored, found)
                raise StoreError(
                    f"features.dir={self.folder} must be of {origin}, got one of {self.spec.name}: "
                    f"{differs}; point model.path (and model.adapter) at the target that was "
                    "captured (data.template_kwargs and data.template_date as they were), or "
                    "capture this one into another store.dir"
                )

    def _shard(self, number: int) -> dict[str, list[Tensor]]:
        if number not in self._opened:
            record = self.manifest.shards[number]
            shards.require_whole(self.folder, self.manifest, record, self.checksums)
            path, dtype = self.folder / record.file, self.manifest.settings["store.dtype"]
            features = (DTYPES[dtype], [record.rows, self.spec.hidden_size])
            expected: dict[str, Any] = dict.fromkeys(self.manifest.names, features)
            if dtype == "float8":
                scales = (name + shards.SCALE for name in self.manifest.names)
                expected |= dict.fromkeys(scales, ("F32", [record.rows]))
            shards.check_tensors(path, header_of(path), expected)
            with safe_open(path, framework="pt") as file:
                names = set(expected)
                self._opened[number] = {
                    # Memory maps: nothing is read before it is used.
                    name: [
                        file.get_tensor(part)
                        for part in (name, name + shards.SCALE)
                        if part in names
                    ]
                    for name in self.manifest.names
                }
        return self._opened[number]


def read_samples(folder: Path, manifest: Manifest) -> list[Sample]:
    """Return the conversations of a store, in its order; StoreError if they are not valid."""
    shards.require_whole(folder, manifest, manifest.conversations, checksum=True)
    path, target = folder / shards.CONVERSATIONS, manifest.target
    number, total = [manifest.num_conversations], [manifest.num_tokens]
    expected = {
        **{"tokens": ("I32", total), "loss_mask": ("BOOL", total)},
        **{"lengths": ("I64", number), "index": ("I64", number)},
    }
    shards.check_tensors(path, header_of(path), expected)
    stored = load_file(path)
    tokens, lengths, index = stored["tokens"], stored["lengths"].tolist(), stored["index"].tolist()
    if not lengths or min(lengths) < 1 or sum(lengths) != len(tokens):
        raise StoreError(f"{path}: lengths must be at least 1 each and {len(tokens):,} together")
    if int(tokens.min()) < 0 or int(tokens.max()) >= target.vocab_size:
        raise StoreError(
            f"{path}: tokens must be in 0..{target.vocab_size - 1} for {target.name}, got "
            f"{int(tokens.min())}..{int(tokens.max())}"
        )
    twice = [place for place, count in Counter(index).items() if count > 1 or place < 0]
    if twice:
        raise StoreError(f"{path}: index must name each conversation once, from 0, got {twice[0]}")
    parts = zip(tokens.split(lengths), stored["loss_mask"].split(lengths), index, strict=True)
    samples = [Sample(tokens.long(), mask, index) for tokens, mask, index in parts]
    if not any(sample.loss_mask[1:].any() for sample in samples):
        raise StoreError(
            f"{path}: loss_mask must name some token to train on after the first of a "
            "conversation, got none; capture conversations with answers"
        )
    return samples
