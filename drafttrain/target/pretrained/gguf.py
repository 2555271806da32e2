"""GGUF files as targets: each is dequantised once, into a directory as Transformers writes it.

Everything else (sharding, features, vLLM, exports) reads that directory like any other.
Transformers reads the file with the package `gguf`, which the extra drafttrain[gguf] installs.
"""

import contextlib
import importlib.util
import io
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from safetensors.torch import save_file

from drafttrain.runtime.disk import put_folder, write_whole, writing
from drafttrain.runtime.lock import alone
from drafttrain.runtime.terminal import console, working
from drafttrain.runtime.untrusted_input import shown
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.fit import refuse_loaded_misfit
from drafttrain.target.pretrained.hub import HOME
from drafttrain.target.pretrained.limits import check_sizes, without_weights

CACHE = HOME / "drafttrain" / "gguf"
SOURCE = "dequantized_from"  # the key of config.json that names the GGUF file
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
MAX_TENSORS, MAX_KEYS = 1 << 20, 1 << 16


def file_of(path: Path, origin: str) -> Path | None:
    """Return the GGUF file that `path` is, or that the directory holds; None if it is no GGUF.

    A directory with a config.json is a model in Transformers' format, whatever lies beside it.
    ValueError if a directory holds several, or a file is one part of several.
    """
    if (path / files.CONFIG).is_file():
        return None
    found = [file for file in (path, *sorted(path.glob("*.gguf"))) if file.is_file()]
    if not found or not (found[0].suffix == ".gguf" or _starts_as_gguf(found[0])):
        return None
    if SPLIT.search(found[0].name):
        raise ValueError(
            f"{origin} must be one GGUF file, and {shown(found[0].name)} is a part of several; "
            "join them with llama.cpp's llama-gguf-split --merge"
        )
    if len(found) > 1:
        names = ", ".join(shown(file.name) for file in found)
        raise ValueError(f"{origin} must hold one GGUF file, got {names}; give the path of one")
    return found[0]


def directory_of(file: Path, origin: str, weights: bool) -> Path:
    """Return the directory with the dequantised model, which is written if it is not there yet.

    It lies in the cache of the Hugging Face Hub, under the file's name and a hash of its content.
    weights=False: configuration and tokenizer are enough, which takes seconds for any size.
    ValueError if the file cannot be read: see `write_directory`.
    """
    folder = CACHE / f"{file.stem[:80]}-{_digest(file, file.stat().st_mtime_ns)}"

    def is_written() -> bool:
        written = (folder / files.CONFIG).is_file()
        return written and (not weights or bool(files.weight_files(folder)))

    if not is_written():
        _count_values(file, origin)  # before anything is made
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder):  # one rank or command writes, the others wait for it
            if not is_written():
                made = folder.with_name(f".{folder.name}.new")
                shutil.rmtree(made, ignore_errors=True)
                write_directory(file, made, origin, weights)
                put_folder(made, folder)
    return folder


def write_directory(file: Path, folder: Path, origin: str, weights: bool = True) -> None:
    """Write the model of a GGUF file as Transformers does; float32, so that nothing is rounded.

    A tokenizer beside the file is taken before the one in it. ValueError, naming `origin`, if the
    package `gguf` is missing, the file is torn, or its architecture or quantisation is unknown.
    """
    values = _count_values(file, origin)
    if weights:
        _require_space(4 * values, f"{origin}: {shown(file.name)}")
    console.print(f"{origin}: reading {shown(file.name)} into {folder.parent}, once")
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    beside = any((file.parent / name).is_file() for name in files.TOKENIZERS)
    try:
        with working(f"reading {shown(file.name)}"):
            config = transformers.AutoConfig.from_pretrained(file.parent, **source)
            check_sizes(config.to_dict(), origin, f"{shown(file.name)}'s ")
            empty = without_weights(config, trust_code=False)
            if sum(weight.numel() for weight in empty.parameters()) > 1.01 * values:
                raise ValueError(f"it states a larger model than its {values:,} numbers")
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                file.parent, **({"local_files_only": True} if beside else source)
            )
            model = _load(file, config, origin) if weights else None
    except Exception as error:  # Transformers and NumPy raise errors of many classes
        raise ValueError(
            f"{origin}: {shown(file.name)} must hold a model and a tokenizer that Transformers "
            f"{transformers.__version__} reads from GGUF ({shown(str(error).strip(), 400)}); "
            "download it again if it is damaged, or give a directory of safetensors"
        ) from error
    with writing(folder):
        tokenizer.save_pretrained(folder)
        if model is not None:  # tied weights once
            tensors = {name: weight.data for name, weight in model.named_parameters()}
            save_file(tensors, folder / files.SAFE, metadata={"format": "pt"})
        settings = config.to_diff_dict() | {"architectures": [type(empty).__name__]}
        settings[SOURCE] = file.name
        settings.pop("_model_name_or_path", None)  # a title, which nothing can load
        write_whole(folder / files.CONFIG, json.dumps(settings, indent=2) + "\n")


def _load(file: Path, config: Any, origin: str) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            local_files_only=True,
            config=config,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    model, report = loaded
    refuse_loaded_misfit(origin, report)
    return model


def _count_values(file: Path, origin: str) -> int:
    """Return how many numbers the tensors hold; ValueError if the file ends too early."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"{origin} is GGUF, which needs the package gguf; pip install 'drafttrain[gguf]'"
        )
    import gguf

    name = f"{origin}: {shown(file.name)}"
    with file.open("rb") as stream:
        head = stream.read(24)
    tensors, keys = int.from_bytes(head[8:16], "little"), int.from_bytes(head[16:], "little")
    if head[:4] != b"GGUF" or len(head) < 24 or tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise ValueError(f"{name} must begin with the header of a GGUF file; download it again")
    try:
        return sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(file).tensors)
    except Exception as error:  # NumPy raises errors of many classes for what was cut off
        reason = shown(str(error).strip() or type(error).__name__, 200)
        raise ValueError(
            f"{name} is damaged or not wholly downloaded ({reason}); download it again"
        ) from error


def _require_space(needed: int, name: str) -> None:
    """Raise ValueError unless memory and disk have the bytes that the dequantised weights take."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for kind, free in (
        ("memory", psutil.virtual_memory().available),
        ("disk space", shutil.disk_usage(CACHE).free),
    ):
        if needed > free:
            raise ValueError(
                f"{name}: its dequantised weights need {needed / 1e9:.1f} GB of {kind}, and "
                f"{free / 1e9:.1f} GB are free; give a directory of safetensors"
            )


def _starts_as_gguf(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == b"GGUF"


@cache
def _digest(file: Path, changed: int) -> str:
    """Return a hash of a file's content; `changed`, its time of change, is part of the key."""
    return files.hash_of_weights([file])[:16]
