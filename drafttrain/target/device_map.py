"""A target whose layers are on several devices of one process: `accelerate`'s device map."""

import atexit
import shutil
import tempfile
from collections import Counter
from typing import Any

import accelerate
import torch

from drafttrain.core.types import TargetSpec
from drafttrain.target.describe import open_target, with_fingerprint
from drafttrain.target.model import Target
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.limits import final_norm_of
from drafttrain.target.pretrained.models import load_model
from drafttrain.target.pretrained.shards import skeleton


def load_spread(
    config: ModelConfig, dtype: torch.dtype, device: str, room: dict[int | str, int]
) -> "SpreadTarget":
    """Load a target onto the GPUs of this process, then its host, then its disk.

    room: bytes that may be used on each GPU (by its number) and on the host ("cpu"); layers that
    fit on none are read from their files each time they run. The readout is on `device`. ValueError
    for weights that do not fit the configuration, or cannot be spread.
    """
    if isinstance(config, RandomModelConfig):
        raise ValueError(
            f"hardware.target_placement=device_map reads weights, and model={config.name} draws"
            " them; use hardware.target_placement=device"
        )
    model_config, tokenizer, spec = open_target(config)
    quantized = getattr(model_config, "quantization_config", None) is not None
    spread: dict[str, Any] = {"device_map": "auto", "max_memory": room}
    if config.quantization is None and not quantized:  # Transformers alone knows quantised sizes
        spread = {"device_map": device_map(skeleton(config, model_config, dtype), device, room)}
    # For weights that cannot be read from the model's own files, because names or dtypes differ.
    offload = tempfile.mkdtemp(prefix="drafttrain-offload-")
    atexit.register(shutil.rmtree, offload, ignore_errors=True)
    spread["offload_folder"] = offload
    model = load_model(config, model_config, dtype, device, spread)
    norm = final_norm_of(model.get_decoder())
    tables = (model.get_input_embeddings(), model.get_output_embeddings(), norm)
    if any(weight.device.type == "meta" for table in tables for weight in table.parameters()):
        raise ValueError(
            f"hardware.target_placement=device_map found no room on {device} for the embedding and"
            f" the head of model={config.name}; free memory there, or use a larger device"
        )
    target = SpreadTarget(model, tokenizer, with_fingerprint(spec, config, dtype, device))
    target.check_readout()
    return target


def device_map(model: Any, device: str, room: dict[int | str, int]) -> dict[str, int | str]:
    """Return each module's device: layers where there is room, everything else on `device`.

    `accelerate` places the layers, in order and whole.
    """
    place = torch.device(device)
    main: int | str = "cpu" if place.type == "cpu" else (place.index or 0)
    head = model.get_output_embeddings().weight  # which accelerate would put last, anywhere
    room = room | {main: max(0, room[main] - head.numel() * model.dtype.itemsize)}
    told = {"no_split_module_classes": list(model._no_split_modules or []), "dtype": model.dtype}
    if len(room) > 2:  # several GPUs share evenly: by default the first would be filled
        room = accelerate.utils.get_balanced_memory(model, max_memory=room, **told)
    dealt = accelerate.infer_auto_device_map(model, max_memory=room, **told)
    chosen: dict[str, int | str] = {}
    decoder = model.get_decoder()
    layers = {id(layer) for layer in decoder.layers}
    for name, module in model.named_modules():
        if id(module) in layers:
            chosen[name] = _lookup(dealt, name)
        elif not name or module is decoder or module is decoder.layers:
            continue
        elif not any(name.startswith(f"{parent}.") for parent in chosen):
            chosen[name] = main
    return chosen


def _lookup(dealt: dict[str, int | str], name: str) -> int | str:
    # The most specific entry; a layer that was split goes where its first part goes.
    exact = [key for key in dealt if key in ("", name) or name.startswith(f"{key}.")]
    parts = [key for key in dealt if key.startswith(f"{name}.")]
    return dealt[max(exact, key=len)] if exact else dealt[parts[0]]


class SpreadTarget(Target):
    """A target with layers on several devices; weights or hidden states are moved as it runs."""

    def __init__(self, model: Any, tokenizer: Any, spec: TargetSpec) -> None:
        super().__init__(model, tokenizer, spec)
        # Transformers sets no map where there is only one device.
        dealt = getattr(model, "hf_device_map", {"": str(self.device)})
        layers = {id(layer) for layer in self.layers}
        named = self.model.named_modules()
        places = [_lookup(dealt, name) for name, module in named if id(module) in layers]
        counts = Counter(f"GPU {where}" if type(where) is int else where for where in places)
        told = ", ".join(f"{count} on {where}" for where, count in counts.items())
        self.where = f"device_map: of {len(self.layers)} layers {told}"
