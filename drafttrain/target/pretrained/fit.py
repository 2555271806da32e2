"""Check by their headers alone, loading nothing, that weight files fit a configuration."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from drafttrain.runtime.untrusted_input import TensorEntry, shown
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.limits import without_weights

NAMED = 3  # tensors of each kind in a message
MISSING_SHARE = 0.01  # of a model's numbers that files may lack: Transformers computes some itself
BYTES_PER_NUMBER = 1 / 16  # the least that quantised weights take


class Found(NamedTuple):
    file: Path
    key: str
    entry: TensorEntry


def match(origin: str, weights: list[Path], model: Any) -> tuple[dict[str, Found], list[str]]:
    """Return the files' tensors that belong to a model, by its own names, and the other keys."""
    names = set(model.state_dict(keep_vars=True))
    found: dict[str, Found] = {}
    others = []
    for file in weights:
        for key, entry in files.tensors_in(file, origin).items():
            # A base model is saved without the prefix that it has in the whole model.
            name = key if key in names else f"{model.base_model_prefix}.{key}"
            if name in names:
                found[name] = Found(file, key, entry)
            else:
                others.append(key)
    return found, others


def require_fit(origin: str, weights: list[Path], model_config: Any, code: bool) -> None:
    """Raise ValueError, before anything is loaded, if files cannot hold a model's weights.

    The message names shapes that differ. A model with more numbers than its files hold is refused:
    loading it would take the memory that config.json declares. code: trust_remote_code.
    """
    if any(file.suffix != ".safetensors" for file in weights):
        return  # what a pickle holds is not known before it is loaded
    entries = [entry for file in weights for entry in files.tensors_in(file, origin).values()]
    layers = getattr(model_config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(entries):  # such a model would take long to build
        raise ValueError(
            f"{origin}: the weights must fit config.json, which declares {layers:,} layers; the "
            f"files hold {len(entries):,} tensors"
        )
    try:
        model = without_weights(model_config, code)
    except Exception as error:  # the model's code raises errors of many classes
        reason = shown(error, 400)
        raise ValueError(f"{origin}: config.json makes no model: {reason}") from error
    found, others = match(origin, weights, model)
    quantized = getattr(model_config, "quantization_config", None) is not None
    own = {name: list(p.shape) for name, p in model.named_parameters()}  # tied weights once
    wrong = [
        f"{name} is {place.entry.shape} instead of {own[name]}"
        for name, place in found.items()
        # Transformers may transpose: the same count in another shape is allowed.
        if not quantized and name in own and math.prod(place.entry.shape) != math.prod(own[name])
    ]
    declared = sum(parameter.numel() for parameter in model.parameters())
    held = sum(math.prod(entry.shape) for entry in entries)
    if quantized:
        held = int(sum(file.stat().st_size for file in weights) / BYTES_PER_NUMBER)
    if wrong or declared * (1 - MISSING_SHARE) > held:
        missing = [f"{name} {shape}" for name, shape in own.items() if name not in found]
        refuse_misfit(origin, wrong, missing, others)
        raise ValueError(
            f"{origin}: the weights must fit config.json, which declares {declared:,} numbers; the "
            f"files hold {held:,}"
        )


def refuse_loaded_misfit(origin: str, report: Mapping[str, Any]) -> None:
    """Raise as `refuse_misfit` does, by the loading information of Transformers."""
    misshapen = [str(key) for key, *_ in report["mismatched_keys"]]
    missing = [str(key) for key in report["missing_keys"]]
    refuse_misfit(origin, misshapen, missing, list(map(str, report["unexpected_keys"])))


def refuse_misfit(origin: str, misshapen: list[str], missing: list[str], others: list[str]) -> None:
    """Raise ValueError if weights are missing or do not have the configuration's shapes."""
    if not misshapen and not missing:
        return
    parts = (("of another shape", misshapen), ("missing", missing), ("unknown", others))
    lists = [
        f"{what}: {', '.join(map(shown, sorted(names)[:NAMED]))}"
        f"{' ...' if len(names) > NAMED else ''} ({len(names)})"
        for what, names in parts
        if names
    ]
    raise ValueError(f"{origin}: the weights must fit config.json; {'; '.join(lists)}")
