"""A target in a vLLM engine: the engine gives hidden states, embedding and head are loaded here."""

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, TargetFeatures, TargetSpec
from drafttrain.data.batches import documents_of
from drafttrain.runtime.hardware import dtype_name
from drafttrain.target.describe import open_target, read_out, with_fingerprint
from drafttrain.target.placement import SERVING_SHARE, engine_gpus
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.limits import final_norm_of
from drafttrain.target.pretrained.models import find
from drafttrain.target.pretrained.shards import Place, names_of, put, read, skeleton
from drafttrain.target.vllm.config import VllmConfig
from drafttrain.target.vllm.engine import VllmEngine

PROBE = 8  # prefixes on which the ends are compared with the engine
EXACT, ROUNDED = 1e-3, 0.02  # tolerated share of the largest value: in float32, in shorter formats


class ServedTarget:
    """A target in another process, with the hidden states that `Target.features` gives.

    It embeds and reads out, but cannot decode: `validate` and selfgen need a `Target`. Close it, or
    use it in a `with` block.
    """

    def __init__(
        self,
        engine: VllmEngine,
        norm: nn.Module,
        readout: Readout,
        spec: TargetSpec,
        tokenizer: Any,
    ) -> None:
        self.engine, self.norm, self.readout = engine, norm, readout
        self.spec, self.tokenizer = spec, tokenizer

    def __enter__(self) -> "ServedTarget":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def dtype(self) -> torch.dtype:
        """The readout's dtype, and that of the features."""
        return self.readout.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.readout.embedding.device

    def in_step(self) -> AbstractContextManager[None]:
        """Let ranks read different numbers of batches: each has an engine of its own."""
        return nullcontext()

    @torch.no_grad()
    def features(self, batch: Batch, captures: tuple[int, ...]) -> TargetFeatures:
        """Return the features of a batch; the engine reads each document on its own.

        Captured id i is the input of layer i; id num_layers is the input of the final norm. The
        final norm is applied here. Values at padding are zero. ValueError for a layer that the
        engine was not started with.
        """
        known = self.engine.captures
        for layer in captures:
            if layer not in known:
                raise ValueError(
                    f"vLLM was started to hand over layers {', '.join(map(str, known))}, got "
                    f"{layer}; start it with every layer that the drafter reads"
                )
        spans = documents_of(batch)
        tokens = batch.tokens.tolist()
        texts = [tokens[row][start:stop] for row, start, stop, *_ in spans]
        states, _ = self.engine.read(texts)
        shape = (*batch.tokens.shape, self.spec.hidden_size)
        gathered = {
            layer: torch.zeros(shape, dtype=self.dtype, device=self.device)
            for layer in {*captures, self.spec.num_layers}
        }
        for (row, start, stop, *_), document in zip(spans, states, strict=True):
            for layer, hidden in gathered.items():
                hidden[row, start:stop] = document[:, known.index(layer)].to(hidden)
        final = self.norm(gathered[self.spec.num_layers])
        captured = {layer: gathered[layer] for layer in captures}
        return TargetFeatures(captured, final, self.readout)

    def check(self) -> None:
        """Raise ValueError unless the engine embeds and reads out as our two ends do."""
        share = EXACT if self.dtype == torch.float32 else ROUNDED
        captures = self.engine.captures
        tokens = torch.arange(min(PROBE, self.spec.vocab_size), device=self.device)
        prefixes = [tokens[:length].tolist() for length in range(1, len(tokens) + 1)]
        states, firsts = self.engine.read(prefixes)
        for state, (token, theirs) in zip(states, firsts, strict=True):
            last = state[-1, captures.index(self.spec.num_layers)].to(self.device, self.dtype)
            logits = self.readout.logits(self.norm(last[None]))[0].float()
            ours = logits.log_softmax(-1)[token].item() if token < len(logits) else -math.inf
            if not abs(ours - theirs) <= share * max(1.0, logits.abs().max().item()):
                what = f"gives token {token} the log-probability {theirs:.4f}"
                raise self._disagreement(what, ours)
        if 0 in captures:
            embedded = self.readout.embed(tokens).float()
            first = states[-1][:, captures.index(0)].to(embedded)
            gap = (first - embedded).abs().max()
            if not gap <= share * embedded.abs().max():
                raise self._disagreement("embeds tokens differently, by up to", gap.item())

    def _disagreement(self, what: str, ours: float) -> ValueError:
        return ValueError(
            f"vLLM {what} where model={self.spec.name} ({self.spec.architecture}), read from the "
            f"disk, has {ours:.4f}: they must be the same model; use another "
            "hardware.target_placement"
        )

    def close(self) -> None:
        self.engine.close()


def open_served(
    config: ModelConfig,
    vllm: VllmConfig,
    dtype: torch.dtype,
    device: str,
    *,
    captures: Sequence[int],
    longest: int,
    folder: Path,
) -> ServedTarget:
    """Start an engine with the target and read the target's two ends.

    captures: every layer that will be asked for; the final norm's input is always included.
    longest: tokens of the longest document. folder: where the engine's log goes. ValueError if the
    engine does not start, or runs another model than the one on the disk.
    """
    model_config, tokenizer, spec = open_target(config)
    model = load_ends(config, model_config, dtype, device)
    spec.check_layers(captures)
    engine = start_engine(
        config,
        vllm,
        dtype,
        torch.device(device),
        longest=longest,
        folder=folder,
        captures=[*captures, spec.num_layers],
        asked="hardware.target_placement=vllm",
    )
    norm = final_norm_of(model.get_decoder())
    spec = with_fingerprint(spec, config, dtype, device)
    served = ServedTarget(engine, norm, read_out(model), spec, tokenizer)
    try:
        served.check()
    except BaseException:
        served.close()
        raise
    return served


def start_engine(
    config: ModelConfig,
    vllm: VllmConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    longest: int,
    folder: Path,
    captures: Sequence[int] = (),
    asked: str,
) -> VllmEngine:
    """Start an engine with a target on as many GPUs as its size needs; see `VllmEngine`."""
    share = SERVING_SHARE * vllm.memory
    spread = engine_gpus(vllm.tensor_parallel, config, dtype, device, share, vllm.devices)
    devices = vllm.devices
    if device.type == "cuda" and devices is None and spread == 1:
        devices = visible_name(device.index or 0)
    return VllmEngine(
        directory(config),
        replace(vllm, tensor_parallel=spread, devices=devices),
        dtype=dtype_name(dtype),
        device=device.type,
        longest=longest,
        folder=folder,
        captures=captures,
        trust_remote_code=config.trust_remote_code,
        asked=asked,
    )


def visible_name(index: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES with which another process sees this one's GPU."""
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return listed[index] if index < len(listed) else str(index)


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
