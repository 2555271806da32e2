"""What a store says of itself: its manifest and journals, believed as far as they can be.

A store may come from anybody. It names files by a store's own names only, none of them is a link,
and its numbers agree with one another, with the headers of its files and with what was asked.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from drafttrain.core.types import TargetSpec
from drafttrain.runtime.journal import read_records
from drafttrain.runtime.run_folder import MANIFEST
from drafttrain.runtime.untrusted_input import (
    MAX_JSON_BYTES,
    MAX_VOCABULARY,
    TensorEntry,
    UntrustedError,
    parse_json,
    read_bytes,
    shown,
    typed,
)
from drafttrain.target.store.config import LARGEST_SHARD_MB, SMALLEST_SHARD_MB
from drafttrain.target.store.shards import (
    CONVERSATIONS,
    FORMAT,
    JOURNAL,
    PROVENANCE,
    REACH,
    READOUT,
    SHARD,
    STORED,
    File,
    Manifest,
    Shard,
    StoreError,
    bytes_per_row,
    digest,
    own_files,
    problem_of,
    refuse_unless_own,
    shard_name,
)

MAX_WIDTH = 1 << 20  # of a target's hidden states, and of its other sizes but the vocabulary


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a store, None if there is none; StoreError if it is damaged.

    Its names are those of a store's own files, and its numbers agree with one another.
    """
    path = folder / MANIFEST
    try:
        refuse_unless_own(path)
        content = read_bytes(path, MAX_JSON_BYTES)
        plain = parse_json(content, "it")
        if not isinstance(plain, dict):
            raise ValueError(f"it must hold an object, got {type(plain).__name__}")
        if plain.get("format") != FORMAT:
            raise StoreError(
                f"{path} must be of format {FORMAT}, which this version reads, got "
                f"{shown(plain.get('format'))}; capture again into another store.dir"
            )
        if plain.get("fingerprint") != digest(plain.get("settings")):
            raise ValueError("its settings are not those of its fingerprint")
        manifest = typed(Manifest, content, "it")
        wrong = next(_wrong(manifest), None)
        if wrong is not None:
            raise ValueError(wrong)
        return manifest
    except FileNotFoundError:
        return None
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path} must be a manifest as `capture` wrote it, but cannot be used: {error}; "
            f"restore it, or remove {folder} and capture again"
        ) from error


def _wrong(manifest: Manifest) -> Iterator[str]:
    """Yield what a manifest of the right types must not say."""
    yield from wrong_spec(manifest.target)
    settings, target = manifest.settings, manifest.target
    layers, final = settings.get("store.layers"), settings.get("store.final_hidden")
    dtype, size, reach = (settings.get(key) for key in ("store.dtype", "store.shard_mb", REACH))
    deepest = target.num_layers
    if (
        not isinstance(layers, list)
        or not all(type(layer) is int and 0 <= layer <= deepest for layer in layers)
        or sorted(set(layers)) != layers
    ):
        yield f"store.layers must be layers in 0..{deepest}, ascending, got {_got(layers)}"
    if type(final) is not bool or not (layers or final):
        yield f"store.final_hidden must be true or false (true without layers), got {_got(final)}"
    if not isinstance(dtype, str) or dtype not in STORED:
        yield f"store.dtype must be one of {', '.join(STORED)}, got {_got(dtype)}"
    if not isinstance(size, float) or not SMALLEST_SHARD_MB <= size <= LARGEST_SHARD_MB:
        sizes = f"[{SMALLEST_SHARD_MB}, {LARGEST_SHARD_MB:g}]"
        yield f"store.shard_mb must be in {sizes}, got {_got(size)}"
    if reach is not None and (type(reach) is not int or not 1 <= reach <= MAX_WIDTH):
        yield f"{REACH} must be null or an integer of at least 1, got {_got(reach)}"
    if settings.get("store.assistant_only") is not (reach is not None):
        yield f"store.assistant_only must say whether there is a {REACH}"
    for key in ("model", "chat template", "data", "hardware.train_dtype"):
        value = settings.get(key)
        if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
            yield f"{key} must be a fingerprint or a name, got {_got(value)}"
    each = bytes_per_row(str(dtype), target.hidden_size, len(manifest.names))
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
    """Yield what no target can be, of what somebody recorded of one."""
    for field in fields(target):
        value, place = getattr(target, field.name), f"target.{field.name}"
        if isinstance(value, str):
            least = 0 if field.default == "" else 1  # what is empty where there is nothing to say
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
            most = {"vocab_size": MAX_VOCABULARY, "max_positions": 1 << 31}.get(
                field.name, MAX_WIDTH
            )
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
    """Return the shards that journals record; a torn last line, left by a kill, is left out.

    names: of the tensors that the store's shards hold.
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
    """Raise StoreError that names the file and how to mend it, unless it is as it was written."""
    problem = problem_of(folder, record, checksum)
    if problem is not None:
        raise StoreError(
            f"{folder / record.file} {problem}: it is damaged or changed; this writes again what "
            f"is damaged, and nothing else: {recapture(folder, manifest, 'store.verify=true')}"
        )


def recapture(folder: Path, manifest: Manifest, *more: str) -> str:
    """Return the command that goes on with a store, as its settings say.

    Not the one that its provenance records: that may be anybody's text, and would be typed.
    """
    told = [f"store.dir={folder}"]
    for key in (
        *("store.layers", "store.final_hidden", "store.dtype", "store.assistant_only"),
        "store.shard_mb",
    ):
        value = json.dumps(manifest.settings[key], separators=(",", ":"))
        told.append(f"{key}={value.strip(chr(34))}")
    command = shlex.join(["python", "-m", "drafttrain", "capture", *told, *more])
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
