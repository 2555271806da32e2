"""DFlash's files: z-lab's layout, which engines load, and the speculators format."""

from dataclasses import replace
from typing import Any, ClassVar

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.eagle_layout import OneLayer, decoder_layer, layer_tensors
from drafttrain.drafters.serving.engines import (
    LLAMA_CPP,
    SCALED,
    SGLANG,
    VLLM,
    VLLM_EAGLE3,
    VLLM_TRANSFORMERS,
)
from drafttrain.drafters.serving.layer_ids import read_by_v2, runners_differ
from drafttrain.drafters.serving.layout import (
    DECLARED,
    V1,
    Config,
    Expected,
    Files,
    Reading,
    Sign,
    Tensors,
    Unfit,
    architectures_of,
    misfits,
)
from drafttrain.drafters.serving.speculators_layout import SpeculatorsLayout
from drafttrain.drafters.serving.values import MAX_LAYERS, MAX_WIDTH, Values
from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, shown


class DFlashSpeculators(SpeculatorsLayout):
    """DFlash in the speculators format; a layer is named by its input."""

    kind = "speculators_dflash"
    family = method = speculators_type = "dflash"
    title = "DFlash in the speculators format"
    loaded_by = "DFlashDraftModel"
    names_layers = True

    def native(self) -> "DFlashLayout":
        return DFlashLayout()

    def read_otherwise(self, native: Config) -> list[str]:
        if native["sliding_window_non_causal"] is not False:
            return []
        return [
            f"{VLLM} would draft causally, by sliding_window_non_causal=false, which it "
            "applies to full attention too: write true there, or export it again"
        ]

    def native_keys(self, config: Config) -> Config:
        ids = config.get("aux_hidden_state_layer_ids")
        if isinstance(ids, list) and all(type(layer) is int for layer in ids):
            ids = [layer - 1 for layer in ids]
        return {
            "block_size": config.get("block_size"),
            "draft_vocab_size": config.get("draft_vocab_size"),
            "dflash_config": {
                "mask_token_id": config.get("mask_token_id"),
                "target_layer_ids": ids,
                "sample_from_anchor": config.get("sample_from_anchor"),
            },
            "sliding_window_non_causal": config.get("sliding_window_non_causal"),
        }

    def own_keys(self, native: Config) -> Config:
        own = native["dflash_config"]
        return {
            "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
            "block_size": native["block_size"],
            "draft_vocab_size": native["vocab_size"],
            "mask_token_id": own["mask_token_id"],
            "sample_from_anchor": False,
            # False, the package's default, makes all of vLLM's layers causal.
            "sliding_window_non_causal": True,
        }


class DFlashLayout(OneLayer):
    """`DFlashDraftModel`: Qwen3's decoder layers; a layer is named by its output."""

    kind = family = method = "dflash"
    name: ClassVar[str] = "DFlash"
    title = "DFlash in z-lab's layout"
    sglang: ClassVar[str | None] = "DFLASH"
    llama_cpp = "draft-dflash"
    architectures = ("DFlashDraftModel",)
    derived: ClassVar = {"speculators": DFlashSpeculators()}
    names_layers = True
    place: ClassVar[str | None] = "dflash_config"  # of its own keys; None: among the others
    from_anchor: ClassVar[bool] = False  # whether the anchor's own place drafts
    corrects_logits: ClassVar[bool] = False  # what it adds to them was trained at their scale

    def own(self, config: Config) -> Config:
        """Return the object of config.json that has the family's own keys."""
        return config if self.place is None else config.get(self.place) or {}

    def recognises(self, files: Files) -> Sign | None:
        architectures = architectures_of(files.config)
        if {*architectures} & {*self.architectures}:
            return Sign(DECLARED, f"architectures={architectures}")
        return None

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        top = Values(files.config)
        own = top
        if self.place is not None:
            own = Values(top.mapping(self.place), top.complaints)
        num_layers = top.integer("num_hidden_layers", MAX_LAYERS)
        settings, window = decoder_layer(top, files.names, "layers.0.", True, num_layers)
        vocab = top.integer("vocab_size", MAX_VOCABULARY)
        hidden = top.integer("hidden_size", MAX_WIDTH)
        mask = own.raw.get("mask_token_id")
        if type(mask) is not int or not 0 <= mask < vocab:
            own.complaints.append(
                f"config.json's mask_token_id must be one of {vocab:,} ids, got {shown(repr(mask))}"
            )
        ids = read_by_v2(files.config)
        if layers is None and isinstance(ids, list) and all(type(layer) is int for layer in ids):
            layers = sorted(ids)
        if not layers or len({*layers}) < len(layers) or len(layers) > spec.num_layers + 1:
            own.complaints.append(
                "config.json must name distinct layers of the target (target_layer_ids of "
                "dflash_config, or aux_hidden_state_layer_ids, which are one more), got "
                f"{shown(repr(ids))}"
            )
        for key in ("causal", "use_swa", "attention_sink_bias"):
            own.exactly(key, False)
        own.exactly("sample_from_anchor", self.from_anchor)
        top.exactly("is_causal", False)
        top.exactly("draft_vocab_size", vocab)
        size = top.integer("block_size", MAX_LAYERS)
        if window is not None and top.raw.get("sliding_window_non_causal") is not True:
            top.complaints.append(
                "config.json's sliding_window_non_causal must be True where layers have sliding "
                "windows: a block is causal there otherwise, and is not here, got "
                f"{shown(top.raw.get('sliding_window_non_causal'))}"
            )
        if size == 1 and not top.complaints:
            top.complaints.append("config.json's block_size must be at least 2, got 1")
        settings |= {
            "layers": layers,
            "num_layers": num_layers,
            "block_size": size,
            "mask_token_id": mask,
            "own_embedding": "embed_tokens.weight" in files.names,
        }
        if top.complaints:
            raise Unfit(top.complaints)
        assert layers is not None
        declared = replace(
            spec,
            vocab_size=vocab,
            hidden_size=hidden,
            num_layers=max(spec.num_layers, *layers),
        )
        reading = Reading(replace(base, **settings), declared, files.tensors(), {})
        if V1 in self.vllm_runners:
            reading.notes = runners_differ(files.config, spec.num_layers)
        reading.complaints = misfits(spec, vocab, hidden, layers)
        if window is not None:
            # All places of a block are computed, however many of them are drafted.
            reading.longest = max(1, window - size)
        return reading

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        hidden, head = config["hidden_size"], config["head_dim"]
        fused = len(self.own(config)["target_layer_ids"]) * hidden
        table = {
            "fc.weight": Expected((hidden, fused)),
            "hidden_norm.weight": Expected((hidden,)),
            "norm.weight": Expected((hidden,)),
            "embed_tokens.weight": Expected((config["vocab_size"], hidden), required=False),
        }
        for prefix in (f"layers.{number}" for number in range(config["num_hidden_layers"])):
            table |= layer_tensors(config, prefix, hidden)
            table[f"{prefix}.input_layernorm.weight"] = Expected((hidden,))
            for norm in ("q_norm", "k_norm"):
                table[f"{prefix}.self_attn.{norm}.weight"] = Expected((head,))
        return table

    def required_keys(self, config: Config, spec: TargetSpec) -> Config:
        keys = super().required_keys(config, spec) | {"model_type": "qwen3"}
        return {key: value for key, value in keys.items() if key != "num_hidden_layers"}

    def misread(
        self, config: Config, tensors: Tensors, spec: TargetSpec, captures: tuple[int, ...]
    ) -> list[str]:
        ids, complaints = self.own(config)["target_layer_ids"], []
        if [layer + 1 for layer in ids] != list(captures):
            complaints.append(f"engines would read layers {ids} plus one, not {list(captures)}")
        if "fusion" in self.own(config):
            complaints.append(
                "engines read the features in every layer; train with drafter.fusion=every_layer "
                "to serve it, or decode with it from its run folder"
            )
        return complaints

    def block(self, config: Config) -> int:
        size: int = config["block_size"]
        return size if self.from_anchor else size - 1

    def vllm_refuses(self, spec: TargetSpec) -> str:
        kind, reason = spec.architecture, super().vllm_refuses(spec)
        if reason:
            return reason
        if spec.embedding_scale != 1.0:
            return f"{VLLM}'s {self.name} does not scale embeddings as {kind} targets do"
        if kind not in VLLM_EAGLE3 | VLLM_TRANSFORMERS:
            return f"{VLLM} has no {self.name} for {kind} targets"
        if self.corrects_logits and kind in SCALED:
            return f"{VLLM}'s {self.name} does not scale logits as {kind} targets do"
        return ""

    def sglang_refuses(self, config: Config, own_embedding: bool, spec: TargetSpec) -> str:
        return f"{SGLANG}'s {self.name} was not tried"

    def llama_cpp_refuses(self, config: Config, spec: TargetSpec) -> str:
        last = max(self.own(config)["target_layer_ids"]) + 1
        if last >= spec.num_layers:
            return f"{LLAMA_CPP} reads inputs of layers, and {last} is the output of the last one"
        return ""

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        size = config["block_size"]
        return (
            f"Trained on blocks of {size}: engines draft blocks of num_speculative_tokens + 1, as "
            f"measured here only if that is {self.block(config)}.",
        )

    def vllm_notes(self, config: Config) -> tuple[str, ...]:
        if V1 not in self.vllm_runners or config["num_hidden_layers"] == 1:
            return ()
        return (
            f"On a CPU {VLLM} scales the keys of every layer by the first one's k_norm: there it "
            "drafts worse than was measured, and accepts by the same rule.",
        )
