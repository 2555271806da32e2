"""The files of a model directory: which are required, and whether they are whole."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drafttrain.runtime.disk import digest_of
from drafttrain.runtime.untrusted_input import (
    TensorEntry,
    UntrustedError,
    header_bytes,
    header_of,
    read_object,
    shards_of,
    shown,
)
from drafttrain.target.pretrained.limits import check_sizes

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
SAFE = "model.safetensors"
PICKLED = "pytorch_model.bin"
HASHED_WHOLE_BYTES = 1 << 30
WINDOWS, WINDOW_BYTES = 1 << 14, 1 << 12  # of all tensors together; of each window
# The files that Transformers reads besides weights and vocabulary: all small objects.
GENERATION = "generation_config.json"
SETTINGS = (
    *(GENERATION, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", "processor_config.json"),
)
ADAPTER = "adapter_config.json"
# The keys in which two copies of one configuration may differ.
VOLATILE = ("transformers_version", "_name_or_path", "use_cache")


def check(folder: Path, origin: str, weights: bool, allow_pickle: bool) -> None:
    """Raise ValueError, naming `origin`, if a model directory lacks a file or holds a torn one."""
    check_kind(folder, origin)
    missing = []
    if not (folder / CONFIG).is_file():
        missing.append(CONFIG)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json or tokenizer.model)")
    safe = _listed(folder, SAFE, origin)
    pickled = not safe and bool(_listed(folder, PICKLED, origin))
    if weights and not pickled and not safe:
        missing.append(f"weights ({SAFE} or {SAFE}.index.json with its shards)")
    if missing:
        raise ValueError(
            f"{origin} must hold {CONFIG}, a tokenizer and weights; missing: {', '.join(missing)}"
        )
    settings = read_object(folder / CONFIG, f"{origin}: {CONFIG}")
    check_sizes(settings, origin)
    check_settings(settings, origin)
    for name in SETTINGS:
        if (folder / name).is_file():
            read_object(folder / name, f"{origin}: {name}")
    if not weights:
        return
    if pickled and not allow_pickle:
        raise ValueError(only_pickled(origin))
    files = weight_files(folder)
    torn = [file.name for file in files if not file.is_file()]
    if torn:
        raise ValueError(
            f"{origin}: {(SAFE if not pickled else PICKLED)}.index.json names {len(files)} shards,"
            f" missing: {', '.join(torn)}; copy or download them again"
        )
    for file in files:
        if file.suffix == ".safetensors":
            tensors_in(file, origin)


def check_kind(folder: Path, origin: str) -> None:
    """Raise ValueError, naming what it is, unless a folder may hold a model as Transformers does.

    An adapter is refused even beside weights: Transformers would load the model that it names.
    """
    if not folder.is_dir():
        problem = "which is a file" if folder.exists() else "which does not exist"
        raise ValueError(
            f"{origin} must be a directory that holds a model, or a GGUF file, {problem};"
            " give the directory that holds config.json"
        )
    whole = (folder / CONFIG).is_file()
    if not (folder / ADAPTER).exists():
        return
    base = "another model"
    with suppress(UntrustedError, OSError, KeyError):
        base = shown(read_object(folder / ADAPTER)["base_model_name_or_path"])
    kind = "an adapter beside a model" if whole else "an adapter alone, such as LoRA's"
    remedy = ", or remove that file to have the model without it" if whole else ""
    raise ValueError(
        f"{origin} must hold a whole model, and holds {kind} ({ADAPTER}), for {base}; give a target"
        f" by its own directory, with model.adapter={shown(folder, 400)} to have this merged into "
        "it; for another model, merge it with PEFT (merge_and_unload, then save_pretrained)"
        f"{remedy}"
    )


def check_settings(settings: dict[str, Any], origin: str) -> None:
    """Raise ValueError if config.json names its weights, or code of the Hub."""
    if settings.get("transformers_weights") is not None:
        raise ValueError(
            f"{origin}: config.json must not name its weights (transformers_weights): {SAFE} and"
            f" {SAFE}.index.json do; remove that key"
        )
    inner = [value for value in settings.values() if isinstance(value, dict)]
    for part in (settings, *inner):
        for key, value in part.items():
            if key.endswith("_implementation") and "/" in json.dumps(value):
                raise ValueError(
                    f"{origin}: config.json must not name code of the Hub, got {shown(key)}="
                    f"{shown(value)}; remove that key"
                )


def tensors_in(file: Path, origin: str) -> dict[str, TensorEntry]:
    """Return the tensors in a safetensors file's header; ValueError if the file is torn.

    An interrupted download leaves a file with fewer bytes than its header states.
    """
    try:
        return header_of(file, f"{origin}: {file.name}")
    except UntrustedError as error:
        raise ValueError(f"{error}; copy or download it again") from None


def only_pickled(origin: str, file: str = PICKLED, section: str = "model") -> str:
    return (
        f"{origin} holds its weights only as pickle ({file}), a format that can run code;"
        f" convert them to safetensors, or set {section}.allow_pickle=true to have them read with"
        " weights_only=True"
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, safetensors before pickle, shards in order."""
    return [folder / name for name in _listed(folder, SAFE) or _listed(folder, PICKLED)]


def _listed(folder: Path, name: str, origin: str | None = None) -> list[str]:
    # One file before shards, as in Transformers: what is checked is what is loaded.
    if (folder / name).is_file():
        return [name]
    index = folder / f"{name}.index.json"
    return shards_in(index, origin) if index.is_file() else []


def shards_in(index: Path, origin: str | None = None) -> list[str]:
    """Return the files that an index of weights names; ValueError if it is damaged."""
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    try:
        return shards_of(index, suffix, origin and f"{origin}: {index.name}")
    except UntrustedError as error:
        raise ValueError(f"{error}; copy or download it again") from None


def fingerprint(
    folder: Path, files: Sequence[Path] | None = None, settings: dict[str, Any] | None = None
) -> str:
    """Return a hash of a model's configuration and one of its weights, joined by a dash.

    settings: what the configuration amounts to, else config.json as it is. files: those that hold
    the weights, else those of a model. The names of the files, their order and which tensors each
    holds do not count: a tensor counts by its name, dtype, shape and content. Weights of up to
    1 GiB in all are hashed whole. Of larger ones, each tensor is read at fixed relative offsets, in
    windows of 4 KiB: up to 64 of them, fewer for a model of many tensors, at least its two ends.
    A fine-tune changes these, and a 70B model takes seconds; but a change to a few rows or experts
    of such a model may lie between the windows and go unnoticed.
    """
    raw = read_object(folder / CONFIG) if settings is None else settings
    kept = {key: value for key, value in raw.items() if key not in VOLATILE}
    return f"{digest_of(kept)[:8]}-{hash_of_weights(files or weight_files(folder))[:23]}"


def hash_of_weights(files: Sequence[Path]) -> str:
    """Return a hash of what files hold: see `fingerprint`."""
    held = {file: _extents(file) for file in files}
    extents = [extent for each in held.values() for extent in each]
    whole = sum(size for _, _, size in extents) <= HASHED_WHOLE_BYTES
    windows = min(64, max(2, WINDOWS // max(1, len(extents))))
    tensors = []
    for file, each in held.items():
        with file.open("rb") as stream:
            for about, start, size in each:
                # Processors have instructions for it: 1.35 GiB/s on one core, blake2b has 0.88.
                content = hashlib.sha256()
                step = (size - WINDOW_BYTES) / (windows - 1)
                sampled = not whole and size > windows * WINDOW_BYTES
                starts = [int(step * i) for i in range(windows)] if sampled else [0]
                for offset in starts:
                    stream.seek(start + offset)
                    left = WINDOW_BYTES if sampled else size
                    while left and (block := stream.read(min(left, 1 << 20))):
                        content.update(block)
                        left -= len(block)
                tensors.append([about, content.hexdigest()])
    return digest_of({"tensors": sorted(tensors)})


def _extents(file: Path) -> list[tuple[str, int, int]]:
    """Return, for each tensor of a file, what it is, where it begins, and its bytes."""
    if file.suffix != ".safetensors":  # what a pickle holds is not known before it is loaded
        return [(file.suffix, 0, file.stat().st_size)]
    begin = 8 + len(header_bytes(file))
    return [
        (f"{name} {entry.dtype} {entry.shape}", begin + first, end - first)
        for name, entry in header_of(file).items()
        for first, end in [entry.data_offsets]
    ]
