"""EAGLE-3's files: the native layout, which engines load, and speculators' format."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.eagle_layout import OneLayer, decoder_layer, layer_tensors
from drafttrain.drafters.serving.engines import (
    LLAMA_CPP,
    SGLANG,
    SGLANG_EAGLE3,
    VLLM,
    VLLM_EAGLE3,
    VLLM_TRANSFORMERS,
)
from drafttrain.drafters.serving.layer_ids import (
    LAYER_IDS,
    named_for_sglang,
    read_by_sglang,
    read_by_v1,
    read_by_v2,
    runners_differ,
    usual_layers,
    written_for_sglang,
)
from drafttrain.drafters.serving.layout import (
    DECLARED,
    Config,
    Expected,
    Files,
    Reading,
    Sign,
    Tensors,
    Unfit,
    architectures_of,
    misfits,
    tensor_sign,
)
from drafttrain.drafters.serving.speculators_layout import NativeView, SpeculatorsLayout
from drafttrain.drafters.serving.values import MAX_WIDTH, Values
from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, shown

# Settings that vLLM reads; SGLang does not read the first.
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Speculators(SpeculatorsLayout):
    """EAGLE-3 in the speculators format."""

    kind = "speculators_eagle3"
    family = method = speculators_type = "eagle3"
    title = "EAGLE-3 in the speculators format"
    loaded_by = "Eagle3DraftModel"
    names_layers = True

    def native(self) -> "Eagle3Layout":
        return Eagle3Layout()

    def read_otherwise(self, native: Config) -> list[str]:
        if "norm_before_residual" in native:
            return []
        return [
            "norm_before_residual is absent and taken as true, as vLLM does; speculators "
            "itself takes false: write into config.json what it was trained with"
        ]

    def native_keys(self, config: Config) -> Config:
        keys = ("draft_vocab_size", "target_hidden_size", LAYER_IDS, *VARIANTS)
        return {key: config[key] for key in keys if key in config}

    def own_keys(self, native: Config) -> Config:
        return {
            "draft_vocab_size": native["draft_vocab_size"],
            LAYER_IDS: native[LAYER_IDS],
            "target_hidden_size": None,
            # All of them: vLLM and the package take others where they are absent.
            **{key: native.get(key, False) for key in VARIANTS},
            "embed_requires_grad": False,
        }

    def renamed(self, tensors: Tensors) -> dict[str, Tensor]:
        return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}

    def refuses(self, native: Config, spec: TargetSpec) -> str:
        if len(native[LAYER_IDS]) != 3:
            return f"{VLLM} reads three layers from it, and this drafter reads {native[LAYER_IDS]}"
        if native["hidden_size"] != spec.hidden_size:
            return "it holds no drafter of another width than its target's"
        return ""


class Eagle3Layout(OneLayer):
    """The native `LlamaForCausalLMEagle3`."""

    kind = family = method = "eagle3"
    title = "EAGLE-3 in the native layout"
    sglang: ClassVar[str | None] = "EAGLE3"
    llama_cpp: ClassVar[str | None] = "draft-eagle3"
    architectures = ("LlamaForCausalLMEagle3",)
    derived: ClassVar = {"speculators": Eagle3Speculators()}
    false_by_default = ("bias", *VARIANTS)
    names_layers = True

    def recognises(self, files: Files) -> Sign | None:
        architectures = architectures_of(files.config)
        if any("Eagle3" in name for name in architectures):
            return Sign(DECLARED, f"architectures={architectures}")
        norms = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
        return tensor_sign(files, *norms, "d2t")

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        return read_eagle3(files, base, spec, layers)

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        drafted = config["draft_vocab_size"]
        target_hidden = config.get("target_hidden_size") or hidden
        fused = config["num_aux_hidden_states"]
        table = {
            "fc.weight": Expected((hidden, fused * target_hidden)),
            "midlayer.input_layernorm.weight": Expected((hidden,)),
            "midlayer.hidden_norm.weight": Expected((hidden,)),
            **layer_tensors(config, "midlayer", 2 * hidden),
            "norm.weight": Expected((hidden,)),
            "lm_head.weight": Expected((drafted, hidden)),
            # Without it engines use the target's, which fits if the widths are equal.
            "embed_tokens.weight": Expected((vocab, hidden), required=target_hidden != hidden),
        }
        if config.get("norm_before_fc"):
            table["input_norm.weight"] = Expected((fused * target_hidden,))
        if config.get("fc_norm"):
            table |= {f"fc_norm.{i}.weight": Expected((target_hidden,)) for i in range(fused)}
        if drafted != vocab:
            table["d2t"] = Expected((drafted,), (torch.int64,))
            table["t2d"] = Expected((vocab,), (torch.bool,))
        return table

    def misread(
        self, config: Config, tensors: Tensors, spec: TargetSpec, captures: tuple[int, ...]
    ) -> list[str]:
        complaints = _wrong_captures(config, spec, captures)
        if "d2t" in tensors:
            complaints += _wrong_maps(tensors["d2t"], tensors["t2d"], config["vocab_size"])
        return complaints

    def vllm_refuses(self, spec: TargetSpec) -> str:
        kind, reason = spec.architecture, super().vllm_refuses(spec)
        if reason or kind in VLLM_EAGLE3 | VLLM_TRANSFORMERS:
            return reason
        return f"{VLLM} has no EAGLE-3 for {kind} targets; drafter=eagle is served with them"

    def sglang_refuses(self, config: Config, own_embedding: bool, spec: TargetSpec) -> str:
        kind, layers = spec.architecture, config[LAYER_IDS]
        if reason := super().sglang_refuses(config, own_embedding, spec):
            return reason
        if config.get(VARIANTS[0]):
            return f"{SGLANG} computes a drafter with {VARIANTS[0]} as one without"
        if kind not in SGLANG_EAGLE3:
            return f"{SGLANG} is not known to read layers of {kind} targets for EAGLE-3"
        if not named_for_sglang(layers, kind):
            return f"{SGLANG} would add 1 to the layers of {kind} targets where the first is 1"
        # It captures between two layers.
        if min(layers) < 1 or max(layers) >= spec.num_layers:
            return f"{SGLANG} reads layers 1..{spec.num_layers - 1}, and this drafter {layers}"
        return ""

    def llama_cpp_refuses(self, config: Config, spec: TargetSpec) -> str:
        layers = config[LAYER_IDS]
        if len(layers) != 3 or max(layers) >= spec.num_layers:
            return f"{LLAMA_CPP} reads the inputs of three layers, and this drafter reads {layers}"
        if dropped := [f"drafter.{key}" for key in ("fc_norm", "norm_output") if config.get(key)]:
            keys = " and ".join(dropped)
            return f"{keys} must be false in training, got true: {LLAMA_CPP} has no such norms"
        return ""

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        nested, layers = config.get("eagle_config"), config[LAYER_IDS]
        if nested is None:
            return ()
        written = f"Reads target layers {layers}, not the engines' default: written so for vLLM"
        if not named_for_sglang(layers, spec.architecture):
            return (f"{written}.",)
        return (f"{written}, and as {nested[LAYER_IDS]} in eagle_config, as SGLang counts them.",)


def read_eagle3(
    files: Files,
    base: Any,
    spec: TargetSpec,
    layers: list[int] | None,
    num_layers: int = 1,
    by_v1: bool = False,
) -> Reading:
    """Return the reading of the native layout; `layers` overrides theirs.

    num_layers: how many decoder layers it has. by_v1: whether vLLM's V1 runner alone serves it, so
    that the layers are those that this runner reads.
    """
    top = Values(files.config)
    speculators = isinstance(files, NativeView)  # which has defaults of its own
    nested = Values(top.mapping("eagle_config"), top.complaints)
    if top.complaints:
        raise Unfit(top.complaints)
    prefix = "layers.0." if any(n.startswith("layers.0.") for n in files.names) else "midlayer."
    settings, window = decoder_layer(top, files.names, prefix, speculators, num_layers)
    if nested.raw.get("use_aux_hidden_state") is False:
        raise Unfit(["eagle_config.use_aux_hidden_state must be true: EAGLE-3 reads fused layers"])
    vocab = top.integer("vocab_size", MAX_VOCABULARY)
    hidden = top.integer("hidden_size", MAX_WIDTH)
    read_width = top.integer("target_hidden_size", MAX_WIDTH, hidden)
    draft_vocab = top.integer("draft_vocab_size", vocab, vocab)
    ids, notes = _layer_ids(top.raw, spec, layers, by_v1)
    before_fc = nested if "norm_before_fc" in nested.raw else top
    settings |= {
        "layers": ids,
        "hidden_size": hidden,
        # If it is absent, vLLM assumes true in speculators' format and false in the native one.
        "norm_before_residual": top.flag("norm_before_residual", speculators),
        "norm_before_fc": before_fc.flag("norm_before_fc", False),
        **{key: top.flag(key, False) for key in VARIANTS[2:] if hasattr(base, key)},
        "own_embedding": "embed_tokens.weight" in files.names or read_width != hidden,
    }
    if top.complaints:
        raise Unfit(top.complaints)
    tensors = {
        "midlayer." + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
        for name, tensor in files.tensors().items()
    }
    deepest = max(spec.num_layers, *ids)
    declared = replace(spec, vocab_size=vocab, hidden_size=read_width, num_layers=deepest)
    spelled = {"midlayer.": prefix, "target_ids": "d2t"}
    reading = Reading(replace(base, **settings), declared, tensors, spelled, notes=notes)
    reading.complaints = misfits(spec, vocab, read_width, ids)
    reading.longest = window
    fused = tensors.get("fc.weight")
    fused_layers, rest = len(ids), 0
    if fused is not None and fused.dim():
        fused_layers, rest = divmod(fused.shape[-1], read_width)
    if fused_layers != len(ids) and not rest:
        reading.complaints.append(
            f"fc.weight fuses {fused_layers} layers, but {len(ids)} are named ({ids}); name "
            "those it was trained on, drafter.layers=[...]"
        )
    _reduced_vocabulary(reading, draft_vocab, vocab)
    return reading


def _layer_ids(
    config: Config, spec: TargetSpec, wanted: list[int] | None, by_v1: bool
) -> tuple[list[int], list[str]]:
    """Return the captured layers as vLLM's V2 runner reads them, and notes where others differ.

    by_v1: as its V1 runner does, without such notes.
    """
    top, usual = f"config.json's {LAYER_IDS}", f"the default for {spec.num_layers} layers"
    read, elsewhere = (
        (read_by_v1(config), "config.json's eagle_config")
        if by_v1
        else (read_by_v2(config), "config.json's layer_ids")
    )
    sources: list[tuple[str, Any]] = [
        ("drafter.layers", wanted),
        (top if config.get(LAYER_IDS) else elsewhere, read),
        (f"{usual} (2, L/2, L-3)", usual_layers(spec.num_layers)),
    ]
    where, ids = next(source for source in sources if source[1] is not None)
    if not (isinstance(ids, list) and ids and all(type(layer) is int for layer in ids)):
        raise Unfit([f"{where} must be a list of integers, got {shown(repr(ids))}"])
    if len(ids) > spec.num_layers + 1 or max(map(abs, ids)) > MAX_WIDTH:
        raise Unfit([f"{where} must be layers of {spec.name}'s, got {shown(ids)}"])
    differ = [] if by_v1 else runners_differ(config, spec.num_layers)
    if len(set(ids)) < len(ids):
        raise Unfit(
            [
                f"{where} repeats a layer, {ids}: name those it was trained on, "
                "drafter.layers=[...]",
                *differ,
            ]
        )
    notes = [f"reads layers {sorted(ids)}, by {where}", *differ]
    nested = read_by_sglang(config, spec.architecture)
    if differ and isinstance(nested, list):
        notes[1] += (
            f"; SGLang reads {shown(nested)} by eagle_config: name those that it was trained on, "
            "drafter.layers=[...]"
        )
    return sorted(ids), notes


def _reduced_vocabulary(reading: Reading, size: int, vocab_size: int) -> None:
    """Turn d2t, an offset, into the ids that can be drafted; complain if it is invalid."""
    tensors, first = reading.tensors, torch.arange(size)  # so that the head's shape is checked too
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if size != vocab_size:
        tensors["target_ids"] = first
    if d2t is None:
        if size != vocab_size:
            reading.complaints.append(
                f"d2t, which maps its {size:,} tokens to the target's {vocab_size:,}, is missing; "
                "engines would draft the first ids"
            )
    elif d2t.shape != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        got = f"got {list(d2t.shape)} of {d2t.dtype}"
        reading.complaints.append(f"d2t must be {size:,} integers (draft_vocab_size), {got}")
        tensors["target_ids"] = first
    else:
        wrong = _wrong_maps(d2t.long(), t2d, vocab_size)
        reading.complaints += wrong
        if size != vocab_size and not any(line.startswith("d2t") for line in wrong):
            tensors["target_ids"] = d2t.long() + first


def _wrong_maps(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> list[str]:
    """Return what is wrong with d2t, an offset, and with t2d, the mask of the ids it maps to."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not (ascending and bool(((ids >= 0) & (ids < vocab_size)).all())):
        own = bool((d2t[1:] > d2t[:-1]).all()) and 0 <= int(d2t[0]) and int(d2t[-1]) < vocab_size
        return [
            f"d2t must be an offset (target id = i + d2t[i]) that gives ascending ids below "
            f"{vocab_size:,}, got {int(ids.min()):,}..{int(ids.max()):,}"
            + ("" if ascending else ", not ascending")
            + ("; it looks like the ids themselves" if own else "")
        ]
    if t2d is not None:
        marked = t2d.bool().nonzero().squeeze(-1) if t2d.dim() == 1 else ids[:0]
        if len(t2d) != vocab_size or not torch.equal(marked, ids):
            return ["t2d must mark exactly the ids that d2t gives"]
    return []


def _wrong_captures(config: Config, spec: TargetSpec, captures: tuple[int, ...]) -> list[str]:
    """Return why an engine would not read the layers that training read."""
    usual, kind = usual_layers(spec.num_layers), spec.architecture
    engines = {"vLLM's V1 runner": read_by_v1, "vLLM's V2 runner": read_by_v2}
    read = {name: tuple(sorted({*(reads(config) or usual)})) for name, reads in engines.items()}
    if named_for_sglang(captures, kind):
        read["SGLang"] = tuple(read_by_sglang(config, kind) or usual)
    complaints = [
        f"{engine} would read layers {list(layers)}, trained on {list(captures)}: set "
        f"{LAYER_IDS} to the ids, eagle_config's to {written_for_sglang(captures, kind)}"
        for engine, layers in read.items()
        if layers != captures
    ]
    if config.get("num_aux_hidden_states") != len(captures):
        complaints.append(
            f"config.json's num_aux_hidden_states must be {len(captures)}, "
            f"got {config.get('num_aux_hidden_states')}"
        )
    return complaints
