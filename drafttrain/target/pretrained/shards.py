"""Weights one tensor at a time: a model without weights, and where each of them lies on disk."""

from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from drafttrain.runtime.untrusted_input import TensorEntry
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.fit import match, refuse_misfit
from drafttrain.target.pretrained.models import attention_of, find

GENERATION = "generation_config.json"
FLOATING = ("F64", "F32", "F16", "BF16")  # what is converted to the dtype that is asked for


class Place(NamedTuple):
    """Where a parameter or buffer of a model lies, and what it is called."""

    file: Path
    key: str  # in the file
    names: tuple[str, ...]  # in the model: several where weights are tied


def skeleton(config: ModelConfig, model_config: Any, dtype: torch.dtype) -> Any:
    """Return a model whose parameters have a shape and no storage; its buffers are real."""
    attention = attention_of(model_config) if config.attention == "auto" else config.attention
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(
            model_config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
        )
    model.tie_weights()  # once more: what was moved to the meta device has come apart
    folder = find(config, weights=False)
    if folder is not None and (folder / GENERATION).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights in `dtype`, as the headers of its files say.

    Integers, which are quantised weights, count as they are, and so do pickled files.
    """
    folder = find(config, weights=True)
    assert folder is not None, "random weights lie nowhere"
    if not _safe(folder):
        return sum(file.stat().st_size for file in files.weight_files(folder))
    return sum(
        _bytes(entry, dtype)
        for file in files.weight_files(folder)
        for entry in files.tensors_in(file, config.origin).values()
    )


def _bytes(entry: TensorEntry, dtype: torch.dtype) -> int:
    first, last = entry.data_offsets
    if entry.dtype not in FLOATING:
        return last - first
    return torch.Size(entry.shape).numel() * dtype.itemsize


def _safe(folder: Path) -> bool:
    return all(file.suffix == ".safetensors" for file in files.weight_files(folder))


def places(config: ModelConfig, model: Any) -> list[Place]:
    """Return where each weight of a skeleton lies, file by file.

    ValueError if one is missing or of another shape, or if the names in the files are not those
    of the model's own modules.
    """
    folder = find(config, weights=True)
    assert folder is not None, "random weights lie nowhere"
    if not _safe(folder):
        raise ValueError(
            f"{config.origin} must hold safetensors for hardware.target_placement=zero3, which"
            " reads one tensor at a time, got pickled weights; convert them, or use"
            " hardware.target_placement=device_map"
        )
    tied: dict[int, list[str]] = {}
    shapes = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tied.setdefault(id(tensor), []).append(name)
        shapes[name] = list(tensor.shape)
    found, others = match(config.origin, files.weight_files(folder), model)
    misshapen = [
        f"{name} is {place.entry.shape} instead of {shapes[name]}"
        for name, place in found.items()
        if place.entry.shape != shapes[name]
    ]
    missing: list[str] = []
    chosen = []
    for names in tied.values():
        there = [found[name] for name in names if name in found]
        if there:
            chosen.append(Place(there[0].file, there[0].key, tuple(names)))
        else:
            missing += names
    refuse_misfit(config.origin, misshapen, missing, others)
    return sorted(chosen)


def read(place: Place, dtype: torch.dtype) -> Tensor:
    """Return a weight, of floating point in `dtype`, as a tensor of its own.

    The file is mapped for this alone, so that what was read before does not stay in memory.
    """
    with safe_open(place.file, framework="pt") as opened:
        tensor = opened.get_tensor(place.key)
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def put(model: nn.Module, place: Place, weight: Tensor) -> None:
    """Let a model's modules hold `weight` in that place: a parameter, or any tensor as a buffer."""
    for name in place.names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        module._parameters.pop(leaf, None)
        module._buffers.pop(leaf, None)
        if isinstance(weight, nn.Parameter):
            module.register_parameter(leaf, weight)
        else:
            module.register_buffer(leaf, weight)
