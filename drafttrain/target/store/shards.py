"""The format of stored features: shards of rows, a manifest that names them, and their checks.

    DIR/manifest.json               the settings, the target, and every shard with its checksum
        readout.safetensors         embedding, head, norm: what drafters share with the target
        conversations.safetensors   tokens, loss mask, lengths and index of every conversation
        shard-00000.safetensors     for each captured layer and the final hidden state: one row
                                    per token, conversations in the store's order
        journal-0.jsonl             while capturing: a line for each shard that rank 0 finished

A file appears under its name only when it is whole and on the disk; a shard counts once its line
is in a journal or in the manifest. So a capture that is killed loses at most the current shard.
A store may come from anybody, so it is checked: it names files by a store's own names only, none
is a link, and its numbers agree with each other, with its files' headers and with the request.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.runtime.disk import (
    LinkError,
    digest_of,
    replacing,
    require_own,
    sha256_of,
    write_whole,
)
from drafttrain.runtime.journal import read_records
from drafttrain.runtime.run_folder import MANIFEST, call
from drafttrain.runtime.untrusted_input import (
    MAX_JSON_BYTES,
    MAX_VOCABULARY,
    Count,
    FileName,
    Sha256,
    TensorEntry,
    UntrustedError,
    parse_json,
    read_bytes,
    shown,
    typed,
)
from drafttrain.target.store.config import DTYPES, LARGEST_SHARD_MB, SMALLEST_SHARD_MB

FORMAT = 1
PROVENANCE = "provenance.json"
CONVERSATIONS, READOUT = "conversations.safetensors", "readout.safetensors"
SHARD = re.compile(r"shard-\d{5,9}\.safetensors")
JOURNAL = re.compile(r"journal-\d{1,9}\.jsonl")
# Names of unfinished files that a kill leaves behind, ours and safetensors'.
UNFINISHED = re.compile(r"\..*\.tmp|\.tmp\w{6}")
FINAL = "final_hidden"
REACH = "reach of store.drafters"  # among the settings: null, or positions before a trained token
SCALE = ".scale"  # suffix of the name of a float8 tensor's scales
STORED = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float8_e4m3fn), strict=True))
LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
MAX_WIDTH = 1 << 20  # of a target's hidden states and its other sizes, except the vocabulary
CONVENTION = (
    "layer.i is Transformers' hidden_states[i]: the input of layer i, before any norm (i = number "
    "of layers: the input of the final norm); final_hidden is after the final norm, what the "
    "output head reads"
)


class StoreError(ValueError):
    """A store is unfinished, damaged, or not the one required."""


@dataclass(frozen=True)
class File:
    file: FileName
    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class Shard(File):
    """A file of features, and what is in it.

    squares: each tensor's sum of squared rounding errors and sum of squared values.
    """

    tokens: Count  # of its conversations
    rows: Count  # of features: as many as tokens, or fewer with store.assistant_only
    conversations: list[Count]
    squares: dict[str, list[float]]


@dataclass(frozen=True)
class StoredReadout:
    file: File
    embedding_scale: float
    logit_scale: float
    soft_cap: float | None


@dataclass(frozen=True)
class Manifest:
    """The record of a store: its target, its settings, and the shards written so far.

    settings: all that its content depends on, by the config keys that set it.
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
        return tuple(self.settings["store.layers"])

    @property
    def reach(self) -> int | None:
        return self.settings[REACH]

    @property
    def names(self) -> list[str]:
        return names_in(self.settings)

    def relative_errors(self) -> dict[str, float]:
        """Return the relative error of each tensor that was rounded: a ratio of L2 norms."""
        errors = {}
        for name in self.names:
            pairs = [shard.squares[name] for shard in self.shards]
            wrong, whole = (sum(pair[i] for pair in pairs) for i in (0, 1))
            errors[name] = (wrong / whole) ** 0.5 if whole else 0.0
        return errors

    def summary(self) -> str:
        held = ", ".join(self.names)
        errors = self.relative_errors()
        worst = max(errors, key=lambda name: errors[name])
        lost = f"relative error {errors[worst]:.1e} ({worst})" if errors[worst] else "exact"
        return (
            f"stored: {self.num_tokens:,} tokens of {self.num_conversations:,} conversations, "
            f"{held} of {self.target.name} in {self.settings['store.dtype']}, {lost}"
        )

    def write(self, folder: Path) -> None:
        """Replace the manifest on disk atomically."""
        plain = asdict(self)
        shards = [json.dumps(shard) for shard in plain.pop("shards")]
        head = {
            "format": FORMAT,
            "fingerprint": digest_of(self.settings)[:32],
            "convention": CONVENTION,
            **plain,
            "relative_error": self.relative_errors(),
        }
        text = json.dumps(head, indent=1)[:-2] + ',\n "shards": [\n  '
        write_whole(folder / MANIFEST, text + ",\n  ".join(shards) + "\n ]\n}\n")


def names_in(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors in a store's shards, without scales."""
    layers = [f"layer.{layer}" for layer in settings["store.layers"]]
    return layers + [FINAL] * settings["store.final_hidden"]


def bytes_per_row(settings: Mapping[str, Any], hidden_size: int) -> int:
    """Return the bytes that the features of one position take on disk."""
    dtype = settings["store.dtype"]
    scale = 4 if dtype == "float8" else 0
    return len(names_in(settings)) * (hidden_size * STORED[dtype].itemsize + scale)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def plan_shards(rows: Sequence[int], settings: Mapping[str, Any], row_bytes: int) -> list[range]:
    """Group conversations, given by their numbers of rows, into shards of at most store.shard_mb.

    The order is kept and a conversation is never split: a longer one is a shard of its own.
    """
    most = int(settings["store.shard_mb"] * 1e6) // row_bytes
    shards, first, held = [], 0, 0
    for place, count in enumerate(rows):
        if place > first and held + count > most:
            shards.append(range(first, place))
            first, held = place, 0
        held += count
    return [*shards, range(first, len(rows))]


def kept_positions(loss_mask: Bool[Tensor, " seq"], reach: int | None) -> Bool[Tensor, " seq"]:
    """Return which positions have features: those 1 to `reach` before a trained token."""
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


def own_files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of a store whose names match; LinkError if one of them is a link."""
    found = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    for path in found:
        require_own(path)
    return found


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> File:
    """Write a file that appears whole or not at all; OSError if the disk is full."""
    with replacing(path) as beside:
        save_file(tensors, beside)
        beside.chmod(0o644)  # save_file makes it private, and stores are shared
        return File(path.name, beside.stat().st_size, sha256_of(beside))


def problem_of(folder: Path, record: File, checksum: bool) -> str | None:
    """Return what is wrong with a file of a store, None if it is as it was written."""
    path = folder / record.file
    try:
        require_own(path)
        size = path.stat().st_size
        if size != record.bytes:
            return f"must have the {record.bytes:,} bytes that were written, got {size:,}"
        if checksum and (found := sha256_of(path)) != record.sha256:
            return f"must have the checksum {record.sha256[:12]}..., got {found[:12]}..."
    except OSError as error:
        return f"must be readable, got {error.strerror}"
    return None


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a store, None if there is none; StoreError if it is damaged."""
    path = folder / MANIFEST
    try:
        require_own(path)
        content = read_bytes(path, MAX_JSON_BYTES)
        plain = parse_json(content, "it")
        if not isinstance(plain, dict):
            raise ValueError(f"it must hold an object, got {type(plain).__name__}")
        if plain.get("format") != FORMAT:
            raise StoreError(
                f"{path} must be of format {FORMAT}, which this version reads, got "
                f"{shown(plain.get('format'))}; capture again into another store.dir"
            )
        if plain.get("fingerprint") != digest_of(plain.get("settings"))[:32]:
            raise ValueError("its settings are not those of its fingerprint")
        manifest = typed(Manifest, content, "it")
        wrong = next(_wrong(manifest), None)
        if wrong is not None:
            raise ValueError(wrong)
        return manifest
    except FileNotFoundError:
        return None
    except (StoreError, LinkError):
        raise
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path} must be a manifest as `capture` wrote it, but cannot be used: {error}; "
            f"restore it, or remove {folder} and capture again"
        ) from error


def _wrong(manifest: Manifest) -> Iterator[str]:
    yield from wrong_spec(manifest.target)
    settings, deepest = manifest.settings, manifest.target.num_layers
    layers, final, dtype, size, reach = (
        settings.get(key)
        for key in ("store.layers", "store.final_hidden", "store.dtype", "store.shard_mb", REACH)
    )
    ascending = (
        isinstance(layers, list)
        and all(type(layer) is int and 0 <= layer <= deepest for layer in layers)
        and sorted(set(layers)) == layers
    )
    sized = isinstance(size, float) and SMALLEST_SHARD_MB <= size <= LARGEST_SHARD_MB
    reaches = type(reach) is int and 1 <= reach <= MAX_WIDTH
    limited = settings.get("store.assistant_only")
    rules = [
        ("store.layers", ascending, f"layers in 0..{deepest}, ascending"),
        (
            "store.final_hidden",
            type(final) is bool and bool(layers or final),
            "true, or false beside layers",
        ),
        ("store.dtype", isinstance(dtype, str) and dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("store.shard_mb", sized, f"in [{SMALLEST_SHARD_MB}, {LARGEST_SHARD_MB:g}]"),
        (REACH, reach is None or reaches, "null or an integer of at least 1"),
        ("store.assistant_only", limited is (reach is not None), f"whether there is a {REACH}"),
    ]
    for key in ("model", "chat template", "data", "hardware.train_dtype"):
        text = settings.get(key)
        fits = isinstance(text, str) and text.isprintable() and len(text) <= 200
        rules.append((key, fits, "a fingerprint or a name"))
    for key, holds, must in rules:
        if not holds:
            yield f"{key} must be {must}, got {_got(settings.get(key))}"
    each = bytes_per_row(settings, manifest.target.hidden_size)
    if manifest.bytes_per_row != each:
        yield f"bytes_per_row must be {each}, got {manifest.bytes_per_row}"
    for file, name in ((manifest.readout.file, READOUT), (manifest.conversations, CONVERSATIONS)):
        if file.file != name:
            yield f"its file must be {name}, got {file.file}"
    for key in ("embedding_scale", "logit_scale", "soft_cap"):
        number = getattr(manifest.readout, key)
        if number is not None and not (math.isfinite(number) and number):
            yield f"readout.{key} must be a number other than 0, got {number}"
    for shard in manifest.shards:
        yield from _wrong_shard(shard, manifest.names)
    if len({shard.file for shard in manifest.shards}) < len(manifest.shards):
        yield "shards must name each file once"


def wrong_spec(target: TargetSpec) -> Iterator[str]:
    """Yield each value in a recorded TargetSpec that no target can have."""
    for field in fields(target):
        value, place = getattr(target, field.name), f"target.{field.name}"
        if isinstance(value, str):
            least = 0 if field.default == "" else 1  # optional texts may be empty
            if not value.isprintable() or not least <= len(value) <= 1000:
                yield f"{place} must be a line of text, got {_got(value)}"
        elif isinstance(value, float):
            if not 0 < value < math.inf:
                yield f"{place} must be above 0, got {value}"
        elif isinstance(value, tuple) or field.name.endswith("_token_id"):
            ids = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(0 <= token < MAX_VOCABULARY for token in ids):
                yield f"{place} must be token ids, got {_got(value)}"
        elif isinstance(value, int):
            sizes = {"vocab_size": MAX_VOCABULARY, "max_positions": 1 << 31}
            most = sizes.get(field.name, MAX_WIDTH)
            if not 1 <= value <= most:
                yield f"{place} must be in 1..{most:,}, got {value:,}"


def _wrong_shard(shard: Shard, names: Sequence[str]) -> Iterator[str]:
    if not SHARD.fullmatch(shard.file):
        yield f"the file of a shard must be called as {shard_name(0)}, got {shard.file}"
    if set(shard.squares) != set(names):
        yield f"squares of {shard.file} must be of {', '.join(names)}"
    for pair in shard.squares.values():
        if len(pair) != 2 or any(value < 0 for value in pair):
            yield f"squares of {shard.file} must be two sums each, got {_got(pair)}"


def _got(value: object) -> str:
    return shown(repr(value))


def read_journals(folder: Path, names: Sequence[str]) -> list[Shard]:
    """Return the shards that journals record; a torn last line, left by a kill, is skipped.

    names: the names of the tensors in the store's shards.
    """
    found = []
    for path in own_files(folder, JOURNAL):
        try:
            for shard in read_records(path, Shard):
                wrong = next(_wrong_shard(shard, names), None)
                if wrong is not None:
                    raise UntrustedError(wrong)
                found.append(shard)
        except UntrustedError as error:
            raise StoreError(
                f"{path} must be a journal as `capture` wrote it, got: {error}; remove it: its "
                "shards are then captured again"
            ) from error
    return found


def require_whole(folder: Path, manifest: Manifest, record: File, checksum: bool) -> None:
    """Raise StoreError, with the file and the repair, unless it is as it was written."""
    problem = problem_of(folder, record, checksum)
    if problem is not None:
        raise StoreError(
            f"{folder / record.file} {problem}: it is damaged or changed; this writes again what "
            f"is damaged, and nothing else: {recapture(folder, manifest, 'store.verify=true')}"
        )


def recapture(folder: Path, manifest: Manifest, *more: str) -> str:
    """Return the command that resumes a store, built from its settings.

    Its provenance records one too, but that may be anybody's text, and users would run it.
    """
    told = [f"store.dir={folder}"]
    for key in ("layers", "final_hidden", "dtype", "assistant_only", "shard_mb"):
        value = json.dumps(manifest.settings[f"store.{key}"], separators=(",", ":"))
        told.append(f"store.{key}={value.strip(chr(34))}")
    command = call("capture", *told, *more)
    return f"{command} (with the model= and data= that {folder / PROVENANCE} names)"


def check_tensors(
    path: Path, found: Mapping[str, TensorEntry], expected: Mapping[str, tuple[str, list[int]]]
) -> None:
    """Raise StoreError unless a file's tensors are those expected, by dtype and shape."""
    for name, (dtype, shape) in expected.items():
        entry = found.get(name)
        if entry is None or entry.dtype != dtype or entry.shape != shape:
            got = "none" if entry is None else f"{shown(entry.shape)} of {entry.dtype}"
            raise StoreError(f"{path}: {name} must be {shape} of {dtype}, got {got}")
