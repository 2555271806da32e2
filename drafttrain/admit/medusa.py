"""What config.json and the tensors of Medusa heads mean, in this package's settings."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.admit.folder import Folder
from drafttrain.admit.layouts import Reading, Unfit, misfits, positive
from drafttrain.drafters.medusa import MedusaConfig
from drafttrain.types import TargetSpec

PREFIX = "medusa_heads."
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


def read_medusa(folder: Folder, base: MedusaConfig, spec: TargetSpec) -> Reading:
    """Read vLLM's layout: blocks.I.layers.J, lm_heads.I, and token_map of a truncated vocabulary.

    Raises Unfit.
    """
    raw = _renamed(folder.config)
    raw.setdefault("num_hidden_layers", 1)
    keys = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
    complaints = positive(raw, keys)
    size: Any = raw.get("truncated_vocab_size") or raw.get("vocab_size")
    if not complaints and not (type(size) is int and 1 <= size <= raw["vocab_size"]):
        complaints.append(
            f"config.json's truncated_vocab_size must be in 1..{raw['vocab_size']}, got {size!r}"
        )
    scale = raw.get("logit_scale") or 1.0
    if complaints:
        raise Unfit(complaints)
    shared = bool(raw.get("original_lm_head"))
    config = replace(
        base,
        num_heads=raw["num_heads"],
        num_layers=raw["num_hidden_layers"],
        fc_bias=bool(raw.get("medusa_fc_bias")),
        shared_head=shared,
        logit_scale=float(scale),
    )
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in folder.tensors().items()}
    if shared and "lm_head.weight" in tensors:
        tensors.setdefault("lm_heads.0.weight", tensors.pop("lm_head.weight"))
    if shared:  # every other head is the first one
        others = [n for n in tensors if n.startswith("lm_heads.") and n != "lm_heads.0.weight"]
        for name in others:
            del tensors[name]
    reading = _reading(config, spec, raw["vocab_size"], raw["hidden_size"], tensors)
    if not config.fc_bias and any(re.fullmatch(r"blocks\..*\.bias", name) for name in tensors):
        reading.complaints.append(
            "config.json's medusa_fc_bias must be true, because the blocks have biases (vLLM drops "
            "them otherwise)"
        )
    _truncate(reading, size)
    return reading


def read_faster_decoding(folder: Folder, base: MedusaConfig, spec: TargetSpec) -> Reading:
    """Read FasterDecoding's layout: I.J.linear, and the head as the last entry of each list.

    Its config.json says neither width nor vocabulary, and published ones count too few heads (2
    where there are 5): the tensors decide. Raises Unfit.
    """
    raw = _renamed(folder.config)
    tensors: dict[str, Tensor] = {}
    heads: dict[int, tuple[int, Tensor]] = {}
    blocks: set[tuple[int, int]] = set()
    for name, tensor in folder.tensors().items():
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
    said = raw.get("num_heads")
    num_heads = max(max(heads) + 1, said if type(said) is int else 0)
    layers = raw.get("num_hidden_layers")
    num_layers = layers if type(layers) is int else 1 + max(layer for _, layer in blocks)
    vocab, hidden = next(iter(heads.values()))[1].shape
    config = replace(
        base,
        num_heads=num_heads,
        num_layers=num_layers,
        fc_bias=True,
        shared_head=False,
        logit_scale=1.0,
    )
    reading = _reading(
        config, spec, raw.get("vocab_size") or vocab, raw.get("hidden_size") or hidden, tensors
    )
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
    if type(said) is int and said < num_heads:
        reading.notes.append(f"config.json counts {said} heads, the weights hold {num_heads}")
    return reading


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Call heads and layers what vLLM calls them, which takes any key with those words."""
    raw = {}
    for key, value in config.items():
        if "num" in key and "heads" in key:
            key = "num_heads"
        elif "num" in key and "layers" in key:
            key = "num_hidden_layers"
        raw[key] = value
    return raw


def _reading(
    config: MedusaConfig, spec: TargetSpec, vocab: int, hidden: int, tensors: dict[str, Tensor]
) -> Reading:
    declared = replace(spec, vocab_size=vocab, hidden_size=hidden)
    spelled = {"target_ids": "token_map"}
    return Reading(config, declared, tensors, spelled, misfits(spec, vocab, hidden))


def _truncate(reading: Reading, size: int) -> None:
    """Sort a token_map, absolute ids in any order, and the rows of the heads with it."""
    tensors, vocab = reading.tensors, reading.declared.vocab_size
    if size == vocab:
        return
    ids = tensors.pop("token_map", None)
    wrong = None
    if ids is None:
        wrong = f"token_map is missing, which names the {size:,} tokens of the heads"
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
        if rows.shape[0] == vocab:  # whole heads: vLLM takes the named rows
            tensors[name] = rows[tensors["target_ids"]]
        elif rows.shape[0] == size:
            tensors[name] = rows[order]
