"""MTP modules within their target's checkpoint, named as MiMo's or as Qwen3-Next's.

Of what the Hub holds, MiMo-7B and its fine-tunes fit, by `model.trust_remote_code=true`: other
modules there are mixtures of experts (DeepSeek, GLM), or stand on linear attention (Qwen3-Next,
Qwen3.5), which are refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.eagle_layout import decoder_layer, layer_tensors
from drafttrain.drafters.serving.engines import SGLANG, VLLM
from drafttrain.drafters.serving.layout import (
    Config,
    Expected,
    Files,
    Reading,
    ServedLayout,
    Sign,
    Tensors,
    Unfit,
    misfits,
    tensor_sign,
)
from drafttrain.drafters.serving.values import MAX_WIDTH, Values
from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, shown

Value = TypeVar("Value")
MIMO, QWEN = VARIANTS = ("mimo", "qwen")
OWN = "layer."  # in a drafter's own names
MAX_TARGET_LAYERS = 1 << 12
# Own prefixes and those in files, the first that fits (vLLM's mimo_mtp.py, qwen3_next_mtp.py).
SPELLED: dict[str, dict[str, str]] = {
    MIMO: {OWN: "model.mtp_layers.0."},
    QWEN: {
        f"{OWN}input_proj.": "mtp.fc.",
        f"{OWN}final_layernorm.": "mtp.norm.",
        f"{OWN}hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
        f"{OWN}token_layernorm.": "mtp.pre_fc_norm_embedding.",
        OWN: "mtp.layers.0.",
    },
}
HELD = {MIMO: "model.mtp_layers.", QWEN: "mtp."}  # what every tensor of a module begins with
SIGNS = {MIMO: "model.mtp_layers.0.input_proj.weight", QWEN: "mtp.fc.weight"}
# The keys of the layer that engines read from the target's config.json.
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SHARED = (*SIZES, "rms_norm_eps", "rope_theta", "rope_scaling")


class MTPLayout(ServedLayout):
    """A target's checkpoint with an MTP module in it; vLLM serves Qwen2's by its class for MiMo."""

    kind = family = method = "mtp"
    title = "an MTP module in its target, named as MiMo's or Qwen3-Next's"
    sglang = "NEXTN"
    within_target = True
    held = tuple(HELD.values())
    architectures = ("MiMoForCausalLM",)

    def recognises(self, files: Files) -> Sign | None:
        return tensor_sign(files, *SIGNS.values())

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        """Return the reading of the module; the target's own tensors are not read."""
        variant = MIMO if SIGNS[MIMO] in files.names else QWEN
        held = files.tensors(HELD[variant])
        prefix = SPELLED[variant][OWN]
        if complaints := _of_another_kind(held, prefix):
            raise Unfit(complaints)
        settings = _layer_of(files.config, files.names, prefix)
        settings["attention_bias"] = f"{prefix}self_attn.q_proj.bias" in held
        raw = Values(files.config)
        vocab = raw.integer("vocab_size", MAX_VOCABULARY)
        hidden = raw.integer("hidden_size", MAX_WIDTH)
        own = {theirs: mine for mine, theirs in SPELLED[variant].items()}
        tensors = _swapped(renamed(held, own), variant)
        return Reading(
            replace(base, **settings, variant=variant, own_embedding=False),
            replace(spec, vocab_size=vocab, hidden_size=hidden),
            *(tensors, dict(SPELLED[variant]), misfits(spec, vocab, hidden)),
        )

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        hidden, head = config["hidden_size"], config["head_dim"]
        table = layer_tensors(config, OWN.removesuffix("."), hidden)
        norms = ("input", "hidden", "token", "final")
        table |= {f"{OWN}{name}_layernorm.weight": Expected((hidden,)) for name in norms}
        table[f"{OWN}input_proj.weight"] = Expected((hidden, 2 * hidden))
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}
        for letter, key in heads.items() if config["attention_bias"] else ():
            table[f"{OWN}self_attn.{letter}_proj.bias"] = Expected((config[key] * head,))
        for letter in "qk" if config["qk_norm"] else "":
            table[f"{OWN}self_attn.{letter}_norm.weight"] = Expected((head,))
        if config["attention_output_bias"]:
            table[f"{OWN}self_attn.o_proj.bias"] = Expected((hidden,))
        return renamed(table, SPELLED[config["variant"]])

    def required_keys(self, config: Config, spec: TargetSpec) -> Config:
        """Return the target's sizes: engines build the module by the target's config.json."""
        keys: Config = {"vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size}
        keys |= {key: getattr(spec, key) for key in SHARED if hasattr(spec, key)}
        if spec.architecture == "qwen2":  # vLLM's class for MiMo reads these, and no others
            keys |= {"variant": MIMO, "attention_bias": True}
            keys |= {"attention_output_bias": False, "qk_norm": False}
        return keys

    def within(self, config: Config, target: Config) -> Config:
        """Return the target's config.json with the module in it."""
        theirs = _layer_of(target, frozenset(), "")
        if differing := [
            f"drafter.{key} must be {theirs[key]}, the target's, by which engines build the module,"
            f" got {config.get(key)}"
            for key in SHARED
            if config.get(key) != theirs[key]
        ]:
            raise Unfit(differing)
        count = {"num_nextn_predict_layers": config["num_nextn_predict_layers"]}
        served = {"architectures": list(self.architectures)}
        return target | count | (served if target["model_type"] == "qwen2" else {})

    def vllm_refuses(self, spec: TargetSpec) -> str:
        if spec.architecture == "qwen2":
            return ""
        return f"{VLLM} has no class for an MTP module in {spec.architecture} targets"

    def sglang_refuses(self, config: Config, own_embedding: bool, spec: TargetSpec) -> str:
        return f"{SGLANG} was not tried with MTP modules that were added to a target"


def renamed(table: Mapping[str, Value], prefixes: Mapping[str, str]) -> dict[str, Value]:
    """Return the table with the first of these prefixes that a name has replaced."""

    def name_of(name: str) -> str:
        found = next((old for old in prefixes if name.startswith(old)), None)
        return name if found is None else prefixes[found] + name.removeprefix(found)

    return {name_of(name): value for name, value in table.items()}


def in_file(own: Tensors, variant: str) -> dict[str, Tensor]:
    """Return a drafter's tensors as a variant's files have them."""
    return renamed(_swapped(own, variant), SPELLED[variant])


def _swapped(own: Tensors, variant: str) -> dict[str, Tensor]:
    """Return the tensors with input_proj's halves in the other order, if files have it.

    A drafter's reads [hidden; embedding] as the paper's, Qwen3-Next's [embedding; hidden].
    """
    name = f"{OWN}input_proj.weight"
    weight = own.get(name)
    if variant == MIMO or weight is None or weight.dim() != 2:
        return dict(own)
    return {**own, name: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)}


def _layer_of(config: Config, names: frozenset[str], prefix: str) -> dict[str, Any]:
    """Return the settings of a decoder layer of a target; MiMo's is Qwen2's."""
    kind = config.get("model_type")
    raw = Values({**config, "model_type": "qwen2" if kind == "mimo" else kind})
    depth = raw.integer("num_hidden_layers", MAX_TARGET_LAYERS)
    settings, window = decoder_layer(raw, names, prefix, qwen3_norms=False, num_layers=depth)
    if window is not None:  # the module's layer is as the target's
        raise Unfit(["config.json must state no sliding windows: use_sliding_window, layer_types"])
    return settings


def _of_another_kind(held: Tensors, prefix: str) -> list[str]:
    """Return why the module's layer is not one that this package has."""
    parts = prefix.split(".")
    stack, at = f"{'.'.join(parts[:-2])}.", len(parts) - 2
    modules = {name.split(".")[at] for name in held if name.startswith(stack)}
    complaints = []
    if len(modules) > 1:
        complaints.append(f"it holds {len(modules)} MTP modules, only a single one can be read")
    if expert := next((name for name in held if ".mlp.experts." in name), None):
        complaints.append(f"its MTP layer is a mixture of experts ({shown(expert)})")
    shapes = {name.removeprefix(prefix): tensor.shape for name, tensor in held.items()}
    query, output = (shapes.get(f"self_attn.{letter}_proj.weight", ()) for letter in "qo")
    if len(query) == len(output) == 2 and query[0] == 2 * output[1]:
        complaints.append(f"its MTP layer has gated attention ({prefix}self_attn.q_proj)")
    return complaints
