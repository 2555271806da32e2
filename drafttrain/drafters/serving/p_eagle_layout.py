"""P-EAGLE's files: EAGLE-3's layouts with further layers and a mask."""

from dataclasses import replace
from typing import Any, ClassVar

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.eagle3_layouts import Eagle3Layout, Eagle3Speculators, read_eagle3
from drafttrain.drafters.serving.eagle_layout import layer_tensors
from drafttrain.drafters.serving.engines import VLLM
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
from drafttrain.drafters.serving.speculators_layout import proposed_tokens
from drafttrain.drafters.serving.values import MAX_LAYERS, Values
from drafttrain.runtime.untrusted_input import shown

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in vLLM's order


class PEagleSpeculators(Eagle3Speculators):
    """P-EAGLE in the speculators format, which vLLM serves as EAGLE-3 that drafts in parallel.

    vLLM keeps neither `fc_norm` nor `norm_output` of such a config.json; no pass follows the one
    that drafts, so the second changes nothing.
    """

    kind = "speculators_p_eagle"
    family = "p_eagle"
    parallel = True
    speculators_type = "peagle"
    title = "P-EAGLE in the speculators format"
    loaded_by = "PEagleDraftModel"

    def native(self) -> Eagle3Layout:
        return PEagleLayout()

    def read_otherwise(self, native: Config) -> list[str]:
        if not native.get("fc_norm"):
            return []
        return [
            f"{VLLM} would not load it: it drops fc_norm of P-EAGLE in this format, and knows "
            "no place for these tensors; export=vllm writes what it loads"
        ]

    def native_keys(self, config: Config) -> Config:
        return {
            "norm_before_residual": False,  # where it is absent; of EAGLE-3 it would be true
            **super().native_keys(config),
            "mask_token_id": config.get("mask_token_id"),
            "n_predict": config.get("n_predict", proposed_tokens(config)),
        }

    def own_keys(self, native: Config) -> Config:
        return super().own_keys(native) | {
            "mask_token_id": native["ptd_token_id"],
            "n_predict": native["n_predict"],  # read here alone: a command may ask for fewer
            "embed_requires_grad": True,  # the package's default for P-EAGLE
        }

    def refuses(self, native: Config, spec: TargetSpec) -> str:
        if native.get("fc_norm"):
            return f"{VLLM} drops its fc_norm there"
        return super().refuses(native, spec)


class PEagleLayout(Eagle3Layout):
    """`LlamaForCausalLMEagle3` with `mask_hidden`; vLLM is told that it drafts in parallel."""

    kind = family = "p_eagle"
    method = "eagle3"
    parallel = True
    title = "P-EAGLE in the native layout"
    sglang = llama_cpp = None
    derived: ClassVar = {"speculators": PEagleSpeculators()}
    vllm_runners = (V1,)

    def recognises(self, files: Files) -> Sign | None:
        """Return the sign of it: EAGLE-3's files never hold a mask."""
        if "mask_hidden" not in files.names or "speculators_model_type" in files.config:
            return None
        return Sign(DECLARED, "the tensor mask_hidden")

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        top = Values(files.config)
        num_layers = top.integer("num_hidden_layers", MAX_LAYERS, 1)
        mask = mask_of(files.config, spec)
        unroll = top.integer("n_predict", MAX_LAYERS, base.unroll)
        if top.complaints:
            raise Unfit(top.complaints)
        reading = read_eagle3(files, base, spec, layers, num_layers, by_v1=True)
        own = {"num_layers": num_layers, "mask_token_id": mask, "unroll": unroll}
        reading.config = replace(reading.config, **own)
        if (served := reading.tensors.pop("mask_hidden", None)) is not None:
            reading.tensors["mask_hidden.weight"] = served.reshape(1, -1)  # a row of an embedding
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


def mask_of(config: Config, spec: TargetSpec) -> int:
    """Return the mask that config.json names; Unfit if it names none of the target's ids."""
    named = [config[key] for key in MASK_KEYS if config.get(key) is not None]
    mask = named[0] if named else None
    if type(mask) is not int or not 0 <= mask < spec.vocab_size:
        need = f"config.json must hold one of {spec.vocab_size:,} ids as {' or '.join(MASK_KEYS)}"
        raise Unfit([f"{need}, got {shown(repr(mask))}"])
    return mask
