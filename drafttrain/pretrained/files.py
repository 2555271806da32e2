"""The files of a model directory: which there must be, and whether they are whole."""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
SAFE = "model.safetensors"
PICKLED = "pytorch_model.bin"
HASHED_WHOLE_BYTES = 1 << 30
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
# What two copies of one configuration may differ in.
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
    pickled = bool(_listed(folder, PICKLED)) and not _listed(folder, SAFE)
    if weights and not pickled and not _listed(folder, SAFE):
        missing.append(f"weights ({SAFE} or {SAFE}.index.json with its shards)")
    if missing:
        raise ValueError(
            f"{origin} must hold {CONFIG}, a tokenizer and weights; missing: {', '.join(missing)}"
        )
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
            _check_whole(file, origin)


def only_pickled(origin: str) -> str:
    """Return the message for weights that exist as pickle alone."""
    return (
        f"{origin} holds its weights only as pickle ({PICKLED}), a format that can run code;"
        " convert them to safetensors, or set model.allow_pickle=true to have them read with"
        " weights_only=True"
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, safetensors before pickle, shards in order."""
    return [folder / name for name in _listed(folder, SAFE) or _listed(folder, PICKLED)]


def _listed(folder: Path, name: str) -> list[str]:
    index = folder / f"{name}.index.json"
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{index} must hold a weight_map; copy or download it again") from None
    return [name] if (folder / name).is_file() else []


def header_of(file: Path) -> bytes:
    """Return the header of a safetensors file, JSON; nothing where there is none."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        return stream.read(length) if 0 < length <= file.stat().st_size - 8 else b""


def _check_whole(file: Path, origin: str) -> None:
    # A download that broke off leaves a file whose header promises more bytes than there are.
    try:
        header = header_of(file)
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        expected = 8 + len(header) + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(
            f"{origin}: {file.name} is no safetensors file: its header cannot be read;"
            " copy or download it again"
        ) from None
    size = file.stat().st_size
    if size != expected:
        raise ValueError(
            f"{origin}: {file.name} is torn: {size:,} bytes, its header says {expected:,};"
            " copy or download it again"
        )


def fingerprint(folder: Path, files: Sequence[Path] | None = None) -> str:
    """Return a hash of a model directory's configuration and weights, wherever it lies.

    files: those that hold the weights, where they are not a model's.
    Weights up to 1 GiB in all are hashed whole. Of larger ones each file's name, size and header
    (tensor names, dtypes, shapes) and 64 samples of 64 KiB, evenly spaced: a fine-tune changes
    them, a copy does not, and a 70B model takes seconds.
    """
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
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
                digest.update(header_of(file))
            for sample in range(SAMPLES):
                stream.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def fingerprint_settings(settings: dict[str, object]) -> str:
    """Return the fingerprint of a model that is drawn from these settings."""
    return hashlib.sha256(_canonical(settings)).hexdigest()[:32]


def _canonical(settings: dict[str, object]) -> bytes:
    kept = {key: value for key, value in settings.items() if key not in VOLATILE}
    return json.dumps(kept, sort_keys=True, default=str).encode()
