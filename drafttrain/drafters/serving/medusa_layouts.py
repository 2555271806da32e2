"""Files of Medusa heads: vLLM's layout, and FasterDecoding's, which published heads use."""

import re
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.engines import hands_on_divided
from drafttrain.drafters.serving.layout import (
    DECLARED,
    SPECIFIC,
    V1,
    Config,
    Expected,
    Files,
    Layout,
    Reading,
    ServedLayout,
    Sign,
    Unfit,
    architectures_of,
    misfits,
    tensor_sign,
)
from drafttrain.drafters.serving.values import MAX_LAYERS, MAX_WIDTH, Values
from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, shown

PREFIX = "medusa_heads."
BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)", re.ASCII)
HEAD = re.compile(r"(\d{1,3})\.(\d{1,3})\.weight", re.ASCII)
RESIDUAL_BLOCK = re.compile(r"(?:medusa_heads\.)?\d+\.\d+\.linear\.weight")


class MedusaLayout(ServedLayout):
    """vLLM's layout: blocks.I.layers.J, lm_heads.I, and token_map of a truncated vocabulary."""

    kind = family = method = "medusa"
    title = "Medusa in vLLM's layout"
    architectures = ("MedusaModel",)
    vllm_runners = (V1,)
    settings: ClassVar = {"medusa_fc_bias": "fc_bias"}
    samples_drafts = False  # vLLM takes every head's most likely token

    def recognises(self, files: Files) -> Sign | None:
        because = _declared(files.config)
        if because is not None and _residual_block(files) is None:
            return Sign(DECLARED, because)
        return tensor_sign(files, "blocks.0.layers.0.weight")

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        raw = _renamed(files.config)
        raw.setdefault("num_hidden_layers", 1)
        values = Values(raw)
        hidden = values.integer("hidden_size", MAX_WIDTH)
        vocab = values.integer("vocab_size", MAX_VOCABULARY)
        num_heads = values.integer("num_heads", MAX_LAYERS)
        num_layers = values.integer("num_hidden_layers", MAX_LAYERS)
        size = values.integer("truncated_vocab_size", MAX_VOCABULARY, vocab)
        if size > vocab and not values.complaints:
            values.complaints.append(
                f"config.json's truncated_vocab_size must be in 1..{vocab}, got {size}"
            )
        scale = values.number("logit_scale", 1.0)
        shared, bias = values.flag("original_lm_head", False), values.flag("medusa_fc_bias", False)
        if values.complaints:
            raise Unfit(values.complaints)
        sizes = {"num_heads": num_heads, "num_layers": num_layers}
        config = replace(base, **sizes, fc_bias=bias, shared_head=shared, logit_scale=scale)
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in files.tensors().items()}
        if shared and "lm_head.weight" in tensors:
            tensors.setdefault("lm_heads.0.weight", tensors.pop("lm_head.weight"))
        if shared:  # all heads are the first one
            first = "lm_heads.0.weight"
            tensors = {
                n: t for n, t in tensors.items() if n == first or not n.startswith("lm_heads.")
            }
        reading = _reading(config, spec, vocab, hidden, tensors)
        if not config.fc_bias and any(re.fullmatch(r"blocks\..*\.bias", name) for name in tensors):
            reading.complaints.append(
                "config.json's medusa_fc_bias must be true, because the blocks have biases (vLLM "
                "drops them otherwise)"
            )
        _truncate(reading, size)
        return reading

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        table = {}
        for head in range(config["num_heads"]):
            for layer in range(config["num_hidden_layers"]):
                table[f"blocks.{head}.layers.{layer}.weight"] = Expected((hidden, hidden))
                if config.get("medusa_fc_bias"):
                    table[f"blocks.{head}.layers.{layer}.bias"] = Expected((hidden,))
            if head == 0 or not config.get("original_lm_head"):
                table[f"lm_heads.{head}.weight"] = Expected((vocab, hidden))
        return table

    def required_keys(self, config: Config, spec: TargetSpec) -> Config:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "medusa_fc_bias": True,
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "truncated_vocab_size": spec.vocab_size,
        }

    def vllm_refuses(self, spec: TargetSpec) -> str:
        return hands_on_divided(spec)

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        return ("vLLM drafts one chain from the heads.",) if served else ()


class FasterDecodingLayout(Layout):
    """FasterDecoding's layout: I.J.linear, and the head as the last entry of each list.

    Its config.json states neither width nor vocabulary, and published ones state too few heads (2
    instead of 5): the tensors decide.
    """

    kind = "fasterdecoding"
    family = method = "medusa"
    title = "Medusa in FasterDecoding's layout"
    weight_files = ("medusa_lm_head",)

    def recognises(self, files: Files) -> Sign | None:
        declared, block = _declared(files.config), _residual_block(files)
        if declared is not None and block is not None:
            return Sign(DECLARED, f"{declared} and the tensor {block}")
        shown_by = ("0.0.linear.weight", "medusa_heads.0.0.linear.weight")
        if sign := tensor_sign(files, *shown_by):
            return sign
        if "medusa_num_heads" in files.config:
            return Sign(SPECIFIC, "medusa_num_heads in config.json")
        return None

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        raw = _renamed(files.config)
        tensors: dict[str, Tensor] = {}
        heads: dict[int, tuple[int, Tensor]] = {}
        blocks: set[tuple[int, int]] = set()
        for name, tensor in files.tensors().items():
            plain = name.removeprefix(PREFIX)
            if match := BLOCK.fullmatch(plain):
                blocks.add((int(match[1]), int(match[2])))
                tensors[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
            elif match := HEAD.fullmatch(plain):
                heads[int(match[1])] = int(match[2]), tensor
                tensors[f"lm_heads.{match[1]}.weight"] = tensor
            else:
                tensors[plain] = tensor
        if not heads or not blocks:
            raise Unfit(["it must hold heads I.J.linear.weight and I.J.weight, found none"])
        values = Values(raw)
        counted = values.integer("num_heads", MAX_LAYERS, 0) if "num_heads" in raw else 0
        num_heads = max(max(heads) + 1, counted)
        num_layers = values.integer(
            "num_hidden_layers", MAX_LAYERS, 1 + max(layer for _, layer in blocks)
        )
        if num_heads > MAX_LAYERS or num_layers > MAX_LAYERS:
            values.complaints.append(f"it must have at most {MAX_LAYERS} heads and layers of them")
        first = next(iter(heads.values()))[1]
        if first.dim() != 2:
            raise Unfit([f"its heads must be matrices, got {shown(list(first.shape))}"])
        vocab = values.integer("vocab_size", MAX_VOCABULARY, first.shape[0])
        hidden = values.integer("hidden_size", MAX_WIDTH, first.shape[1])
        if values.complaints:
            raise Unfit(values.complaints)
        sizes = {"num_heads": num_heads, "num_layers": num_layers}
        config = replace(base, **sizes, fc_bias=True, shared_head=False, logit_scale=1.0)
        reading = _reading(config, spec, vocab, hidden, tensors)
        reading.spelled = {
            **{f"blocks.{i}.layers.{j}.": f"{i}.{j}.linear." for i in range(num_heads)
               for j in range(num_layers)},
            **{f"lm_heads.{i}.": f"{i}.{num_layers}." for i in range(num_heads)},
        }  # fmt: skip
        reading.complaints += [
            f"the head of {i} must be {i}.{num_layers}.weight, got {i}.{place}.weight"
            for i, (place, _) in sorted(heads.items())
            if place != num_layers
        ]
        if "num_heads" in raw and counted < num_heads:
            told = f"config.json counts {counted} heads, the weights hold {num_heads}"
            reading.notes.append(told)
        return reading


def _declared(config: Config) -> str | None:
    architectures = architectures_of(config)
    if "MedusaModel" in architectures:
        return f"architectures={architectures}"
    return "model_type=medusa" if config.get("model_type") == "medusa" else None


def _residual_block(files: Files) -> str | None:
    return next(filter(RESIDUAL_BLOCK.fullmatch, sorted(files.names)), None)


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys of heads and layers to vLLM's names."""

    def name(key: str) -> str:
        if "num" not in key:
            return key
        return "num_heads" if "heads" in key else "num_hidden_layers" if "layers" in key else key

    return {name(key): value for key, value in config.items()}


def _reading(
    config: Any, spec: TargetSpec, vocab: int, hidden: int, tensors: dict[str, Tensor]
) -> Reading:
    declared = replace(spec, vocab_size=vocab, hidden_size=hidden)
    spelled = {"target_ids": "token_map"}
    return Reading(config, declared, tensors, spelled, misfits(spec, vocab, hidden))


def _truncate(reading: Reading, size: int) -> None:
    """Sort a token_map (absolute ids in any order), and the heads' rows with it."""
    tensors, vocab = reading.tensors, reading.declared.vocab_size
    if size == vocab:
        return
    ids = tensors.pop("token_map", None)
    wrong = None
    if ids is None:
        wrong = f"token_map, which names the {size:,} tokens of the heads, is missing"
    elif ids.shape != (size,) or ids.is_floating_point():
        wrong = f"token_map must be {size:,} integers, got {list(ids.shape)} of {ids.dtype}"
    elif len(ids.unique()) < size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        wrong = f"token_map must name {size:,} different ids below {vocab:,}"
    if wrong is not None:
        reading.complaints.append(wrong)
        tensors["target_ids"] = torch.arange(size)
        return
    assert ids is not None
    tensors["target_ids"], order = ids.long().sort()
    for name in [name for name in tensors if name.startswith("lm_heads.")]:
        rows = tensors[name]
        if not rows.dim():
            continue  # the check of shapes reports it
        if rows.shape[0] == vocab:  # whole heads: vLLM takes the named rows
            tensors[name] = rows[tensors["target_ids"]]
        elif rows.shape[0] == size:
            tensors[name] = rows[order]
