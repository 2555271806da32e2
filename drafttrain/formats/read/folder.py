"""The directory of a drafter: its configuration, and its tensors by name."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, TensorEntry, read_object, shown
from drafttrain.target.pretrained.files import only_pickled, shards_in, tensors_in

CONFIG = "config.json"
# In this order: safetensors, which cannot run code, come before pickle.
OTHERS = [name for layout in LAYOUTS for name in layout.weight_files]
SAFE = ("model.safetensors", *(f"{name}.safetensors" for name in OTHERS))
PICKLED = ("pytorch_model.bin", *(f"{name}.pt" for name in OTHERS))
DERIVED = ("rotary_emb.inv_freq",)  # computed from the configuration; old Transformers saved it


DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}


@dataclass(frozen=True)
class Folder:
    """A directory with a configuration and weights; no weight is read before `tensors`.

    outlined: weights are on the meta device, with shape and dtype, and are never read, except for
    the small tensors that map one vocabulary to another.
    """

    path: Path
    config: dict[str, Any]
    entries: dict[Path, dict[str, TensorEntry]]  # of each file with weights
    outlined: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        return tuple(self.entries)

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors."""
        return frozenset(name for entries in self.entries.values() for name in entries)

    def outline(self) -> "Folder":
        """Return the directory without its weights, to check the fit before they take memory."""
        return replace(self, outlined=True)

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors whose names begin so, by name, on the CPU, as stored."""
        found: dict[str, Tensor] = {}
        for file, every in self.entries.items():
            entries = {name: entry for name, entry in every.items() if name.startswith(prefix)}
            whole = [n for n, entry in entries.items() if not self.outlined or _is_map(entry)]
            found |= {
                name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
                for name, entry in entries.items()
                if self.outlined and not _is_map(entry)
            }
            if whole:
                found |= _load(file, whole)
        return found


def _is_map(entry: TensorEntry) -> bool:
    dtype = DTYPES[entry.dtype]
    return (
        len(entry.shape) == 1
        and entry.shape[0] <= MAX_VOCABULARY
        and not (dtype.is_floating_point or dtype.is_complex)
    )


def open_folder(path: Path, allow_pickle: bool) -> Folder:
    """Return a drafter's directory.

    Raises ValueError, naming drafter.path, if it is not a directory, lacks config.json or weights,
    holds a torn file, or holds only pickled weights and these are not allowed.
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
    file = path / CONFIG
    if not file.is_file():
        found = sorted(entry.name for entry in path.iterdir())
        holds = f"it holds {shown(', '.join(found[:5]))}" if found else "it is empty"
        adapter = "; a LoRA adapter must be merged first" if "adapter_config.json" in found else ""
        raise ValueError(f"{origin} must hold {CONFIG} and weights, but {holds}{adapter}")
    config, files = read_object(file, f"{origin}: {CONFIG}"), _weights(path, origin)
    pickled = [file.name for file in files if file.suffix != ".safetensors"]
    if pickled and not allow_pickle:
        raise ValueError(only_pickled(origin, pickled[0], "drafter"))
    return Folder(path, config, {file: _entries(file, origin) for file in files})


def _weights(path: Path, origin: str) -> tuple[Path, ...]:
    for name in (*SAFE, *PICKLED):
        files = _shards(path, name, origin)
        if files:
            return files
    alone = sorted(file for file in path.glob("*.safetensors") if file.is_file())
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
    listed = shards_in(index, origin)
    missing = [shard for shard in listed if not (path / shard).is_file()]
    if missing:
        raise ValueError(
            f"{origin}: {index.name} names {len(listed)} shards, missing: "
            f"{shown(', '.join(missing))}; copy or download them again"
        )
    return tuple(path / shard for shard in listed)


def _entries(file: Path, origin: str) -> dict[str, TensorEntry]:
    if file.suffix == ".safetensors":
        return _known(tensors_in(file, origin), file, origin)
    try:
        loaded = _unpickled(file)
    except Exception as error:  # torch raises pickle's own errors, zipfile's, and its own
        raise ValueError(
            f"{origin}: {file.name} is torn or holds more than tensors (weights_only); copy or "
            f"download it again ({shown(error)})"
        ) from error
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    entries = {
        name: TensorEntry(spelled.get(t.dtype, str(t.dtype)), list(t.shape), (0, 0))
        for name, t in loaded.items()
    }
    return _known(entries, file, origin)


def _known(entries: dict[str, TensorEntry], file: Path, origin: str) -> dict[str, TensorEntry]:
    other = next((entry.dtype for entry in entries.values() if entry.dtype not in DTYPES), None)
    if other is not None:
        raise ValueError(f"{origin}: {file.name} holds {other}, which is not computed in here")
    return {name: entry for name, entry in entries.items() if not name.endswith(DERIVED)}


def _load(file: Path, names: Iterable[str]) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        loaded = _unpickled(file)
        return {name: loaded[name] for name in names}
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in names}


def _unpickled(file: Path) -> dict[str, Tensor]:
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"it must hold tensors by name, got {type(loaded).__name__}")
    for name, tensor in loaded.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(f"it must hold tensors by name, got {shown(repr(name))}")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{shown(name)} must be a plain tensor, got {tensor.layout}")
    return loaded
