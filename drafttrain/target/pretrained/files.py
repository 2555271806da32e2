"""The files of a model directory: which are required, and whether they are whole."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
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
    if not folder.is_dir():
        problem = "which is a file" if folder.exists() else "which does not exist"
        raise ValueError(
            f"{origin} must be a directory that holds a model, {problem};"
            " give the directory that holds config.json"
        )
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
    if (folder / ADAPTER).exists():  # Transformers would load the model it names, from anywhere
        raise ValueError(
            f"{origin} must hold a whole model, and holds an adapter of another ({ADAPTER}); merge"
            " it into the model, or remove that file to have the model without it"
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


def fingerprint(folder: Path, files: Sequence[Path] | None = None) -> str:
    """Return a hash of a model directory's configuration and weights, wherever it is.

    files: those that hold the weights, if they are not a model's. Weights up to 1 GiB in all are
    hashed whole. For larger ones, each file's name, size, header and 64 samples of 64 KiB are
    hashed: a fine-tune changes them, a copy does not, and a 70B model takes seconds.
    """
    settings = read_object(folder / CONFIG)
    digest = hashlib.sha256(_canonical(settings))
    files = weight_files(folder) if files is None else files
    whole = sum(file.stat().st_size for file in files) <= HASHED_WHOLE_BYTES
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            if whole:
                while block := stream.read(1 << 20):
                    digest.update(block)
                continue
            if file.suffix == ".safetensors":
                digest.update(header_bytes(file))
            for sample in range(SAMPLES):
                stream.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def fingerprint_settings(settings: dict[str, object]) -> str:
    return hashlib.sha256(_canonical(settings)).hexdigest()[:32]


def _canonical(settings: dict[str, object]) -> bytes:
    kept = {key: value for key, value in settings.items() if key not in VOLATILE}
    return json.dumps(kept, sort_keys=True, default=str).encode()
