"""The two ends of a model, what embeds tokens and what reads them out, without what is between."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.limits import final_norm_of
from drafttrain.target.pretrained.models import find


def load_ends(config: ModelConfig, model_config: Any, dtype: torch.dtype, device: str) -> Any:
    """Return the target's Transformers model with its embedding, final norm and head alone.

    Everything between stays on the meta device: a 70B model takes the memory of two tables.
    ValueError where the target has no directory, or its weights lie in pickle.
    """
    import transformers
    from accelerate import init_empty_weights

    folder = directory(config)
    weights = files.weight_files(folder)
    if weights[0].suffix != ".safetensors":
        raise ValueError(
            f"{config.origin} must hold its weights as safetensors, from which single tensors can "
            f"be read, got {weights[0].name}; convert them"
        )
    with init_empty_weights(include_buffers=False):  # buffers hold scales that no file has
        model = transformers.AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    stored = where_stored(weights)
    embedder, head, norm = (
        model.get_input_embeddings(),
        model.get_output_embeddings(),
        final_norm_of(model.get_decoder()),
    )
    tied = bool(model_config.get_text_config(decoder=True).tie_word_embeddings)
    for module in (embedder, norm) if tied else (embedder, norm, head):
        prefix = next(name for name, other in model.named_modules() if other is module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            file, key = stored_as(f"{prefix}.{name}", stored, config.origin)
            with safe_open(file, "pt", device="cpu") as opened:  # mapped: nothing is read yet
                value = opened.get_tensor(key)
            if value.shape != parameter.shape or not value.is_floating_point():
                raise ValueError(
                    f"{config.origin}: {key} must be of shape {tuple(parameter.shape)} and not "
                    f"quantised, got {tuple(value.shape)} in {value.dtype}"
                )
            kept = torch.nn.Parameter(value.to(device, dtype), requires_grad=False)
            setattr(module, name, kept)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    if tied:
        head.weight = embedder.weight
    return model.eval().requires_grad_(False)


def directory(config: ModelConfig) -> Path:
    """Return the target's directory; ValueError where what runs is not what lies on the disk."""
    if isinstance(config, RandomModelConfig):
        raise ValueError(
            f"model={config.name} draws its weights, and vLLM loads those of a directory; choose "
            "another model=, or another hardware.target_placement or regenerate.backend"
        )
    for key in ("inflate", "quantization"):
        if getattr(config, key) is not None:
            raise ValueError(
                f"model.{key} must be null where vLLM runs the target, got {getattr(config, key)}: "
                "it loads the weights that are on the disk"
            )
    folder = find(config, weights=True)
    assert folder is not None, "only random targets have no directory"
    return folder


def where_stored(weights: list[Path]) -> dict[str, Path]:
    """Return the file of every tensor."""
    stored: dict[str, Path] = {}
    for file in weights:
        with safe_open(file, "pt") as opened:
            stored |= dict.fromkeys(opened.keys(), file)
    return stored


def stored_as(name: str, stored: dict[str, Path], origin: str) -> tuple[Path, str]:
    """Return file and key of a tensor; checkpoints of several modalities have other prefixes."""
    if name in stored:
        return stored[name], name
    end = "." + ".".join(name.split(".")[-2:])
    like = [key for key in stored if f".{key}".endswith(end) and ".layers." not in key]
    if len(like) != 1:
        raise ValueError(f"{origin}: the weights must hold {name}, got {', '.join(like) or 'none'}")
    return stored[like[0]], like[0]
