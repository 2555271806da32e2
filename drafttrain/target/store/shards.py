"""The format of stored features: shards of rows, a manifest that names them, and their checks.

    DIR/manifest.json               what the store is of, and every shard with its checksum
        readout.safetensors         embedding, head, norm: what drafters share with the target
        conversations.safetensors   tokens, loss mask, lengths and index of every conversation
        shard-00000.safetensors     per captured layer and for the final hidden state: one row a
                                    token, conversations one after another in the store's order
        journal-0.jsonl             while capturing: a line for each shard that rank 0 finished

A file appears under its name only when it is whole and on the disk; a shard counts once its line
is in a journal or in the manifest. So a capture that is killed loses at most the shard at hand.
"""

import hashlib
import json
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.runtime.disk import replacing, sha256_of, write_whole
from drafttrain.runtime.run_folder import MANIFEST
from drafttrain.runtime.untrusted_input import (
    Count,
    FileName,
    Sha256,
)

FORMAT = 1
PROVENANCE = "provenance.json"
CONVERSATIONS, READOUT = "conversations.safetensors", "readout.safetensors"
SHARD = re.compile(r"shard-\d{5,9}\.safetensors")
JOURNAL = re.compile(r"journal-\d{1,9}\.jsonl")
UNFINISHED = re.compile(r"\..*\.tmp")  # what a kill leaves of a file that was being written
FINAL = "final_hidden"
REACH = "reach of store.drafters"  # among the settings: null, or positions before a trained token
SCALE = ".scale"  # ends the name of the scales of a tensor in float8
STORED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}
LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
CONVENTION = (
    "layer.i is Transformers' hidden_states[i]: the input of layer i, before any norm (i = number "
    "of layers: the input of the final norm); final_hidden is after the final norm, what the "
    "output head reads"
)


class StoreError(ValueError):
    """A store is unfinished, damaged, or of something else."""


@dataclass(frozen=True)
class File:
    """A file of a store as it was written."""

    file: FileName
    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class Shard(File):
    """A file of features, and what is in it.

    squares: of each tensor, the sum of squared errors of what is stored and of squared values.
    """

    tokens: Count  # of its conversations
    rows: Count  # features: as many, unless the store keeps those before trained tokens only
    conversations: list[Count]
    squares: dict[str, list[float]]


@dataclass(frozen=True)
class StoredReadout:
    """The file of the target's ends, and its numbers that are no tensors."""

    file: File
    embedding_scale: float
    logit_scale: float
    soft_cap: float | None


@dataclass(frozen=True)
class Manifest:
    """What a store is of, and the shards that it has so far.

    settings: all that decides its content, by the name under which a user sets it.
    """

    complete: bool
    settings: dict[str, Any]
    target: TargetSpec
    readout: StoredReadout
    conversations: File
    num_conversations: Count
    num_tokens: Count
    num_rows: Count
    bytes_per_row: Count
    shards: list[Shard]

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layers."""
        return tuple(self.settings["store.layers"])

    @property
    def reach(self) -> int | None:
        """How many positions before a trained token have features; None: every position has."""
        return self.settings[REACH]

    @property
    def names(self) -> list[str]:
        """The tensors of each shard, without scales."""
        return tensor_names(self.layers, self.settings["store.final_hidden"])

    def relative_errors(self) -> dict[str, float]:
        """Return, by tensor, the root of squared errors over squared values of what was rounded."""
        errors = {}
        for name in self.names:
            pairs = [shard.squares[name] for shard in self.shards]
            wrong, whole = (sum(pair[i] for pair in pairs) for i in (0, 1))
            errors[name] = (wrong / whole) ** 0.5 if whole else 0.0
        return errors

    def summary(self) -> str:
        """Return a line on what is in the store."""
        held = ", ".join(self.names)
        errors = self.relative_errors()
        worst = max(errors, key=lambda name: errors[name])
        lost = f"relative error {errors[worst]:.1e} ({worst})" if errors[worst] else "exact"
        return (
            f"stored: {self.num_tokens:,} tokens of {self.num_conversations:,} conversations, "
            f"{held} of {self.target.name} in {self.settings['store.dtype']}, {lost}"
        )

    def write(self, folder: Path) -> None:
        """Put the manifest in place of the one before it, at once."""
        plain = asdict(self)
        shards = [json.dumps(shard) for shard in plain.pop("shards")]
        head = {
            "format": FORMAT,
            "fingerprint": digest(self.settings),
            "convention": CONVENTION,
            **plain,
            "relative_error": self.relative_errors(),
        }
        text = json.dumps(head, indent=1)[:-2] + ',\n "shards": [\n  '
        write_whole(folder / MANIFEST, text + ",\n  ".join(shards) + "\n ]\n}\n")


def tensor_names(layers: Sequence[int], final_hidden: bool) -> list[str]:
    """Return what a shard's tensors are called."""
    return [*(f"layer.{layer}" for layer in layers), *([FINAL] if final_hidden else [])]


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.safetensors"


def bytes_per_row(dtype: str, hidden_size: int, num_tensors: int) -> int:
    """Return what the features of one position take on the disk."""
    scale = 4 if dtype == "float8" else 0
    return num_tensors * (hidden_size * STORED[dtype].itemsize + scale)


def plan_shards(rows: Sequence[int], most: int) -> list[range]:
    """Cut conversations of so many rows, in order, into shards of at most `most` rows.

    A conversation is never cut: one that is longer is a shard of its own.
    """
    shards, first, held = [], 0, 0
    for place, count in enumerate(rows):
        if place > first and held + count > most:
            shards.append(range(first, place))
            first, held = place, 0
        held += count
    return [*shards, range(first, len(rows))]


def kept_positions(loss_mask: Bool[Tensor, " seq"], reach: int | None) -> Bool[Tensor, " seq"]:
    """Return the positions that have features: those 1 to `reach` before a trained token."""
    if reach is None:
        return torch.ones_like(loss_mask)
    kept = torch.zeros_like(loss_mask)
    for distance in range(1, min(reach, len(loss_mask) - 1) + 1):
        kept[:-distance] |= loss_mask[distance:]
    return kept


def encode(values: Float[Tensor, "row hidden"], dtype: str) -> list[Tensor]:
    """Return the values in a stored dtype; in float8 with a scale for each row, in float32."""
    if dtype != "float8":
        return [values.to(STORED[dtype])]
    wide = values.float()
    scale = wide.abs().amax(-1) / LARGEST_FLOAT8
    scale = torch.where(scale > 0, scale, 1.0)
    return [(wide / scale[:, None]).to(STORED[dtype]), scale]


def decode(stored: Sequence[Tensor], into: Float[Tensor, "row hidden"]) -> None:
    """Write stored values into a tensor of any dtype."""
    into.copy_(stored[0])
    if len(stored) > 1:
        into.mul_(stored[1][:, None])


def refuse_unless_own(path: Path) -> None:
    """Raise StoreError if a file of a store is no plain file; FileNotFoundError without one.

    What stands behind a link is not the store's: to be read, written over or removed.
    """
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        what = "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "special file"
        raise StoreError(
            f"{path} must be a file of the store's own, got a {what}; copy what it stands for "
            "there, or remove it"
        )


def own_files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of a store whose names match; StoreError for a link by such a name."""
    found = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    for path in found:
        refuse_unless_own(path)
    return found


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> File:
    """Write a file that appears whole or not at all; OSError where the disk is full."""
    with replacing(path) as beside:
        save_file(tensors, beside)
        beside.chmod(0o644)  # save_file leaves it to its owner alone, and stores are shared
        return File(path.name, beside.stat().st_size, sha256_of(beside))


def problem_of(folder: Path, record: File, checksum: bool) -> str | None:
    """Return what is wrong with a file of a store, None if it is as it was written."""
    path = folder / record.file
    try:
        refuse_unless_own(path)
        size = path.stat().st_size
        if size != record.bytes:
            return f"must have the {record.bytes:,} bytes that were written, got {size:,}"
        if checksum and (found := sha256_of(path)) != record.sha256:
            return f"must have the checksum {record.sha256[:12]}..., got {found[:12]}..."
    except OSError as error:
        return f"must be readable, got {error.strerror}"
    return None


def digest(plain: Any) -> str:
    """Return a fingerprint of plain data."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
