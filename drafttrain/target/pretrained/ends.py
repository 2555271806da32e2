"""The two ends of a model, its embedding and its head, without the layers between them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.limits import final_norm_of
from drafttrain.target.pretrained.models import find
from drafttrain.target.pretrained.shards import Place, names_of, put, read, skeleton


def load_ends(config: ModelConfig, model_config: Any, dtype: torch.dtype, device: str) -> Any:
    """Return the target's Transformers model with only its embedding, final norm and head loaded.

    The layers stay on the meta device: a 70B model takes the memory of two tables.
    ValueError if the target has no directory, or its weights are pickled.
    """
    weights = files.weight_files(directory(config))
    if weights[0].suffix != ".safetensors":
        raise ValueError(
            f"{config.origin} must hold its weights as safetensors, from which single tensors can "
            f"be read, got {weights[0].name}; convert them"
        )
    stored = {key: file for file in weights for key in files.tensors_in(file, config.origin)}
    model = skeleton(config, model_config, dtype)
    named = names_of(model)
    norm = final_norm_of(model.get_decoder())
    for module in (model.get_input_embeddings(), norm, model.get_output_embeddings()):
        for parameter in list(module.parameters(recurse=False)):
            names = named.pop(id(parameter), None)
            if names is None:  # tied, and already loaded
                continue
            key = stored_as(names[0], stored, config.origin)
            place = Place(stored[key], key, tuple(names))
            value = read(place, dtype)
            if value.shape != parameter.shape or not value.is_floating_point():
                raise ValueError(
                    f"{config.origin}: {key} must be of shape {tuple(parameter.shape)} and not "
                    f"quantised, got {tuple(value.shape)} in {value.dtype}"
                )
            put(model, place, nn.Parameter(value.to(device), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model


def directory(config: ModelConfig) -> Path:
    """Return the target's directory; ValueError if the target is not what is on the disk."""
    if isinstance(config, RandomModelConfig):
        raise ValueError(
            f"model={config.name} draws its weights, and vLLM loads those of a directory; choose "
            "another model=, or another hardware.target_placement or regenerate.backend"
        )
    config.require_null("vLLM", "inflate", "quantization", "adapter")
    folder = find(config, weights=True)
    assert folder is not None, "only random targets have no directory"
    return folder


def stored_as(name: str, stored: dict[str, Path], origin: str) -> str:
    """Return the key of a tensor; multimodal checkpoints have other prefixes."""
    end = "." + ".".join(name.split(".")[-2:])
    like = [key for key in stored if f".{key}".endswith(end) and ".layers." not in key]
    if name not in stored and len(like) != 1:
        raise ValueError(f"{origin}: the weights must hold {name}, got {', '.join(like) or 'none'}")
    return name if name in stored else like[0]
