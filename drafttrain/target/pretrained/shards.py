"""Weights one tensor at a time: a model without weights, and where each weight is on disk."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.fit import match, refuse_misfit
from drafttrain.target.pretrained.models import attention_of, find, load_generation_config
from drafttrain.target.pretrained.quantize import WEIGHT_BYTES

FLOATING = ("F64", "F32", "F16", "BF16")  # converted to the requested dtype


class Place(NamedTuple):
    """Where a parameter or buffer of a model is on disk, and its names."""

    file: Path
    key: str  # in the file
    names: tuple[str, ...]  # in the model: several where weights are tied


def skeleton(config: ModelConfig, model_config: Any, dtype: torch.dtype) -> Any:
    """Return a model whose parameters have shapes but no storage; its buffers are real."""
    attention = attention_of(model_config) if config.attention == "auto" else config.attention
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(
            model_config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
        )
    model.tie_weights()  # again: moving to the meta device untied them
    if (generation := load_generation_config(config)) is not None:
        model.generation_config = generation
    return model.eval().requires_grad_(False)


def _weight_files(config: ModelConfig) -> list[Path]:
    folder = find(config, weights=True)
    assert folder is not None, "random weights lie nowhere"
    return files.weight_files(folder)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights in `dtype`, from the headers of its files.

    model.quantization makes the matrices of its layers smaller, but those of experts, which
    Transformers fuses. Integers (weights that are quantised already) and pickled files count at
    their size on disk.
    """
    weights = _weight_files(config)
    if weights[0].suffix != ".safetensors":
        return sum(file.stat().st_size for file in weights)
    small = WEIGHT_BYTES.get(config.quantization or "", float(dtype.itemsize))
    found = 0.0
    for file in weights:
        for name, entry in files.tensors_in(file, config.origin).items():
            if entry.dtype not in FLOATING:
                found += entry.data_offsets[1] - entry.data_offsets[0]
            else:
                matrix = len(entry.shape) == 2 and ".layers." in name and ".experts." not in name
                found += math.prod(entry.shape) * (small if matrix else dtype.itemsize)
    return round(found)


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each weight of a model, by its id: several names if it is tied."""
    named: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), []).append(name)
    return named


def places(config: ModelConfig, model: Any) -> list[Place]:
    """Return where each weight of a skeleton is stored, file by file.

    ValueError if one is missing or misshapen, or if the names in the files are not those of the
    model's own modules.
    """
    weights = _weight_files(config)
    if weights[0].suffix != ".safetensors":
        raise ValueError(
            f"{config.origin} must hold safetensors for hardware.target_placement=zero3, which"
            " reads one tensor at a time, got pickled weights; convert them, or use"
            " hardware.target_placement=device_map"
        )
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found, others = match(config.origin, weights, model)
    misshapen = [
        f"{name} is {place.entry.shape} instead of {shapes[name]}"
        for name, place in found.items()
        if place.entry.shape != shapes[name]
    ]
    missing: list[str] = []
    chosen = []
    for names in names_of(model).values():
        there = [found[name] for name in names if name in found]
        if there:
            chosen.append(Place(there[0].file, there[0].key, tuple(names)))
        else:
            missing += names
    refuse_misfit(config.origin, misshapen, missing, others)
    return sorted(chosen)


def read(place: Place, dtype: torch.dtype) -> Tensor:
    """Return a weight as a tensor of its own, converted to `dtype` if it is floating point.

    The file is mapped for each read, so that earlier reads do not stay in memory.
    """
    with safe_open(place.file, framework="pt") as opened:
        tensor = opened.get_tensor(place.key)
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def put(model: nn.Module, place: Place, weight: Tensor) -> None:
    """Set `weight` under all its names in a model, as a parameter or (a plain tensor) a buffer."""
    for name in place.names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        module._parameters.pop(leaf, None)
        module._buffers.pop(leaf, None)
        if isinstance(weight, nn.Parameter):
            module.register_parameter(leaf, weight)
        else:
            module.register_buffer(leaf, weight)
