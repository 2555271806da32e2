"""What lies in the directory of a drafter: its configuration, and the names of its tensors."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG = "config.json"
# In this order: what cannot run code wins over pickle.
SAFE = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
DERIVED = ("rotary_emb.inv_freq",)  # old Transformers saved what it computes from the configuration


@dataclass(frozen=True)
class Folder:
    """A directory with a configuration and weights; no weight is read before `tensors`."""

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    names: frozenset[str]  # of the tensors

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, on the CPU, as stored."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            found |= _load(file)
        return {name: found[name] for name in found if name in self.names}


def open_folder(path: Path, allow_pickle: bool) -> Folder:
    """Return what a directory holds.

    Raises ValueError, naming drafter.path, where it is no directory, lacks config.json or weights,
    holds a torn file, or only pickled weights and those are not allowed.
    """
    origin = f"drafter.path={path}"
    path = path.expanduser()
    if not path.is_dir():
        problem = "which is a file" if path.exists() else "which does not exist"
        raise ValueError(
            f"{origin} must be the directory of a trained drafter, {problem}; give the directory "
            f"that holds {CONFIG}"
        )
    if (path / "config.yaml").is_file() and not (path / CONFIG).is_file():
        raise ValueError(
            f"{origin} must be the directory of a drafter, but is the folder of a run: evaluate it "
            f"by run.dir={path}"
        )
    config = _config(path, origin)
    files = _weights(path, origin)
    if files[0].suffix != ".safetensors" and not allow_pickle:
        raise ValueError(
            f"{origin} holds its weights only as pickle ({files[0].name}), a format that can run "
            "code; convert them to safetensors, or set drafter.allow_pickle=true to have them read "
            "with weights_only=True"
        )
    names = [name for file in files for name in _names(file, origin)]
    return Folder(path, config, files, frozenset(n for n in names if not n.endswith(DERIVED)))


def _config(path: Path, origin: str) -> dict[str, Any]:
    file = path / CONFIG
    if not file.is_file():
        found = sorted(entry.name for entry in path.iterdir())
        holds = f"it holds {', '.join(found[:5])}" if found else "it is empty"
        adapter = "; a LoRA adapter must be merged first" if "adapter_config.json" in found else ""
        raise ValueError(f"{origin} must hold {CONFIG} and weights, but {holds}{adapter}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{origin}: {CONFIG} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{origin}: {CONFIG} must hold an object, got {type(config).__name__}")
    return config


def _weights(path: Path, origin: str) -> tuple[Path, ...]:
    for name in (*SAFE, *PICKLED):
        files = _shards(path, name, origin)
        if files:
            return files
    alone = sorted(path.glob("*.safetensors"))
    if len(alone) == 1:
        return (alone[0],)
    several = f", got {len(alone)} files of unknown order" if alone else ""
    raise ValueError(
        f"{origin} must hold weights ({', '.join((*SAFE, *PICKLED))}, or shards with an index)"
        f"{several}"
    )


def _shards(path: Path, name: str, origin: str) -> tuple[Path, ...]:
    index = path / f"{name}.index.json"
    if not index.is_file():
        return (path / name,) if (path / name).is_file() else ()
    try:
        listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(
            f"{origin}: {index.name} must hold a weight_map; copy or download it again"
        ) from None
    missing = [shard for shard in listed if not (path / shard).is_file()]
    if missing:
        raise ValueError(
            f"{origin}: {index.name} names {len(listed)} shards, missing: {', '.join(missing)}; "
            "copy or download them again"
        )
    return tuple(path / shard for shard in listed)


def _names(file: Path, origin: str) -> list[str]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        return list(_load(file))
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())
        more = "" if file.suffix == ".safetensors" else " or holds more than tensors (weights_only)"
        raise ValueError(
            f"{origin}: {file.name} is torn{more}; copy or download it again ({reason[:120]})"
        ) from error


def _load(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ValueError(f"{file} must hold tensors by name, got {type(loaded).__name__}")
    return loaded
