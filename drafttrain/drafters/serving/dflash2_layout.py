"""DFlash-2's files: z-lab's layout, which engines load, and the speculators format."""

from dataclasses import replace
from typing import Any, ClassVar

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.dflash_layout import DFlashLayout, DFlashSpeculators
from drafttrain.drafters.serving.engines import VLLM
from drafttrain.drafters.serving.layout import V2, Config, Expected, Files, Reading, Unfit
from drafttrain.drafters.serving.values import MAX_LAYERS, MAX_WIDTH, Values
from drafttrain.runtime.untrusted_input import MAX_VOCABULARY

SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class DFlash2Speculators(DFlashSpeculators):
    """DFlash-2 in the speculators format."""

    kind = "speculators_dflash2"
    family = speculators_type = "dflash2"
    title = "DFlash-2 in the speculators format"
    loaded_by = "DFlash2DraftModel"

    def native(self) -> DFlashLayout:
        return DFlash2Layout()

    def native_keys(self, config: Config) -> Config:
        keys = super().native_keys(config)
        keys["dflash_config"] |= {key: config[key] for key in SIZES if key in config}
        return keys

    def own_keys(self, native: Config) -> Config:
        own = native["dflash_config"]
        return super().own_keys(native) | {key: own[key] for key in SIZES}


class DFlash2Layout(DFlashLayout):
    """`DFlash2DraftModel`: DFlash's tensors, convolutions in each layer, and a selector."""

    kind = family = "dflash2"
    name = "DFlash-2"
    title = "DFlash-2 in z-lab's layout"
    sglang = None
    architectures = ("DFlash2DraftModel",)
    derived: ClassVar = {"speculators": DFlash2Speculators()}
    corrects_logits = True
    vllm_runners = (V2,)

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        own = Values(Values(files.config).mapping("dflash_config"))
        sizes = {
            "conv_kernel_size": own.integer("conv_kernel_size", MAX_LAYERS),
            "conv_group_size": own.integer("conv_group_size", MAX_WIDTH),
            "selector_rank": own.integer("selector_rank", MAX_WIDTH),
            "selector_top_k": own.integer("selector_top_k", MAX_VOCABULARY),
        }
        own.exactly("input_embedding_scale", 1)
        own.exactly("output_multiplier", 1)
        own.exactly("final_logit_softcapping", 0)
        try:
            reading = super().read(files, base, spec, layers)
        except Unfit as error:
            raise Unfit([*error.complaints, *own.complaints]) from None
        most = {
            "conv_kernel_size": reading.config.block_size,
            "selector_top_k": reading.declared.vocab_size,
        }
        own.complaints += [
            f"config.json's {key} must be at most {limit:,}, got {sizes[key]:,}"
            for key, limit in most.items()
            if sizes[key] > limit
        ]
        width, group = reading.declared.hidden_size, sizes["conv_group_size"]
        if width % group:
            own.complaints.append(
                f"config.json's conv_group_size must divide {width:,}, got {group:,}"
            )
        if own.complaints:
            raise Unfit(own.complaints)
        reading.config = replace(reading.config, **sizes)
        return reading

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        own, hidden = self.own(config), config["hidden_size"]
        taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
        codes = Expected((config["vocab_size"], own["selector_rank"]))
        table = super().expected_tensors(config) | {
            "candidate_selector.predecessor_codebook": codes,
            "candidate_selector.successor_codebook": codes,
            "candidate_selector.hidden_projection.weight": Expected((own["selector_rank"], hidden)),
        }
        for number in range(config["num_hidden_layers"]):
            for conv in (f"layers.{number}.attention_conv.", f"layers.{number}.mlp_conv."):
                table[f"{conv}base_kernel"] = Expected((2, taps, hidden))
                table[f"{conv}kernel_projection.weight"] = Expected((2 * taps * groups, hidden))
        return table

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        tried = (
            f"{VLLM} serves {self.name} on GPUs alone. Its model was tried on a CPU; its kernel "
            "that walks over candidates was read, not tried."
        )
        return (*super().notes(config, spec, served), tried)
