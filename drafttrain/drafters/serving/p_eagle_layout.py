"""P-EAGLE's files: EAGLE-3's native layout with further layers and a mask."""

from typing import Any, ClassVar

from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.eagle3_layouts import Eagle3Layout, read_eagle3
from drafttrain.drafters.serving.eagle_layout import layer_tensors
from drafttrain.drafters.serving.layout import (
    DECLARED,
    V1,
    Config,
    Expected,
    Files,
    Reading,
    Sign,
    Unfit,
)
from drafttrain.drafters.serving.values import MAX_LAYERS, Values
from drafttrain.runtime.untrusted_input import shown

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in vLLM's order


class PEagleLayout(Eagle3Layout):
    """`LlamaForCausalLMEagle3` with `mask_hidden`; vLLM is told that it drafts in parallel."""

    kind = family = "p_eagle"
    method = "eagle3"
    parallel = True
    title = "P-EAGLE in the native layout"
    sglang = None
    derived: ClassVar = {}
    vllm_runners = (V1,)

    def recognises(self, files: Files) -> Sign | None:
        """Return the sign of it: EAGLE-3's files never hold a mask."""
        if "mask_hidden" not in files.names or "speculators_model_type" in files.config:
            return None
        return Sign(DECLARED, "the tensor mask_hidden")

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        top = Values(files.config)
        num_layers = top.integer("num_hidden_layers", MAX_LAYERS, 1)
        more = {
            "num_layers": num_layers,
            "mask_token_id": mask_of(files.config, spec),
            "unroll": top.integer("n_predict", MAX_LAYERS, base.unroll),
        }
        if top.complaints:
            raise Unfit(top.complaints)
        reading = read_eagle3(files, base, spec, layers, False, num_layers, more)
        reading.tensors = with_own_mask(reading.tensors)
        reading.spelled["mask_hidden.weight"] = "mask_hidden"
        return reading

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        table, hidden = super().expected_tensors(config), config["hidden_size"]
        table["mask_hidden"] = Expected((1, 1, table["fc.weight"].shape[1]))
        for prefix in (f"layers.{number}" for number in range(1, config["num_hidden_layers"])):
            table |= layer_tensors(config, prefix, hidden)
            table[f"{prefix}.input_layernorm.weight"] = Expected((hidden,))
        return table

    def required_keys(self, config: Config, spec: TargetSpec) -> Config:
        keys = super().required_keys(config, spec)
        return {key: value for key, value in keys.items() if key != "num_hidden_layers"}

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        deepest = config["n_predict"]
        return (
            *super().notes(config, spec, served),
            f"Trained to draft {deepest} tokens in a pass.",
        )


def with_own_mask(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return served tensors with the mask as the drafter has it: a row of an embedding."""
    kept = {name: tensor for name, tensor in tensors.items() if name != "mask_hidden"}
    mask = tensors.get("mask_hidden")
    return kept if mask is None else kept | {"mask_hidden.weight": mask.reshape(1, -1)}


def mask_of(config: Config, spec: TargetSpec) -> int:
    """Return the mask that config.json names; Unfit if it names none of the target's ids."""
    named = [config[key] for key in MASK_KEYS if config.get(key) is not None]
    mask = named[0] if named else None
    if type(mask) is not int or not 0 <= mask < spec.vocab_size:
        need = f"config.json must hold one of {spec.vocab_size:,} ids as {' or '.join(MASK_KEYS)}"
        raise Unfit([f"{need}, got {shown(repr(mask))}"])
    return mask
