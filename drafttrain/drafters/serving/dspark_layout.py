"""DSpark's files: DeepSpec's layout, which engines load, and the speculators format."""

from dataclasses import replace
from typing import Any, ClassVar

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.dflash_layout import DFlashLayout, DFlashSpeculators
from drafttrain.drafters.serving.engines import VLLM
from drafttrain.drafters.serving.layout import V2, Config, Expected, Files, Reading, Tensors, Unfit
from drafttrain.drafters.serving.values import MAX_WIDTH, Values
from drafttrain.runtime.untrusted_input import shown

MARKOV_TYPES = {"plain": "vanilla", "gated": "gated"}  # our names, and those in files
HEAD_KEYS = ("enable_confidence_head", "confidence_head_with_markov")


class DSparkSpeculators(DFlashSpeculators):
    """DSpark in the speculators format."""

    kind = "speculators_dspark"
    family = method = speculators_type = "dspark"
    title = "DSpark in the speculators format"
    loaded_by = "DSparkDraftModel"

    def native(self) -> DFlashLayout:
        return DSparkLayout()

    def read_otherwise(self, native: Config) -> list[str]:
        if native["sample_from_anchor"] is not None:
            return []
        return [
            "sample_from_anchor is absent and taken as true, as speculators does; "
            f"{VLLM} takes false: write true there, or export it again"
        ]

    def native_keys(self, config: Config) -> Config:
        keys = super().native_keys(config)
        heads = ("markov_rank", "markov_head_type", *HEAD_KEYS)
        return keys | keys.pop("dflash_config") | {k: config[k] for k in heads if k in config}

    def own_keys(self, native: Config) -> Config:
        heads = ("markov_rank", "markov_head_type", "sample_from_anchor", *HEAD_KEYS)
        keys = super().own_keys({**native, "dflash_config": native})
        return keys | {key: native[key] for key in heads}


class DSparkLayout(DFlashLayout):
    """`Qwen3DSparkModel`: DFlash's tensors, a Markov head's and a confidence head's."""

    kind = family = method = "dspark"
    name = "DSpark"
    title = "DSpark in DeepSpec's layout"
    sglang = "DSPARK"
    llama_cpp = "draft-dspark"
    architectures = ("Qwen3DSparkModel",)
    derived: ClassVar = {"speculators": DSparkSpeculators()}
    place = None
    from_anchor = True
    corrects_logits = True
    vllm_runners = (V2,)

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        raw = Values(files.config)
        rank = raw.integer("markov_rank", MAX_WIDTH)
        kind = raw.raw.get("markov_head_type", "vanilla")
        known = {theirs: ours for ours, theirs in MARKOV_TYPES.items()}
        if not isinstance(kind, str) or kind not in known:
            raw.complaints.append(
                f"config.json's markov_head_type must be one of {', '.join(known)}, "
                f"got {shown(repr(kind))}"
            )
        for key in HEAD_KEYS:
            if raw.raw.get(key) is not True:  # absent, engines differ
                raw.complaints.append(
                    f"config.json's {key} must be True, got {shown(repr(raw.raw.get(key)))}"
                )
        try:
            reading = super().read(files, base, spec, layers)
        except Unfit as error:
            raise Unfit([*error.complaints, *raw.complaints]) from None
        if raw.complaints:
            raise Unfit(raw.complaints)
        reading.config = replace(reading.config, markov=known[kind], markov_rank=rank)
        return reading

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        hidden, rank, vocab = config["hidden_size"], config["markov_rank"], config["vocab_size"]
        gate = config.get("markov_head_type") == MARKOV_TYPES["gated"]
        heads = {
            "markov_head.markov_w1.weight": Expected((vocab, rank)),
            "markov_head.markov_w2.weight": Expected((vocab, rank)),
            "confidence_head.proj.weight": Expected((1, hidden + rank)),
            "confidence_head.proj.bias": Expected((1,)),
        }
        if gate:
            heads["markov_head.gate_proj.weight"] = Expected((rank, hidden + rank))
            heads["markov_head.gate_proj.bias"] = Expected((rank,))
        return super().expected_tensors(config) | heads

    def required_keys(self, config: Config, spec: TargetSpec) -> Config:
        return super().required_keys(config, spec) | {
            "sample_from_anchor": True,
            "enable_confidence_head": True,  # absent, vLLM drops the head
            "confidence_head_with_markov": True,  # absent, vLLM and SGLang differ
        }

    def misread(
        self, config: Config, tensors: Tensors, spec: TargetSpec, captures: tuple[int, ...]
    ) -> list[str]:
        complaints = super().misread(config, tensors, spec, captures)
        if config.get("markov_head_type") != MARKOV_TYPES["plain"]:
            complaints.append(
                f"{VLLM} would leave out the gate of its Markov head; train with "
                "drafter.markov=plain to serve it, or decode with it from its run folder"
            )
        return complaints

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        size = config["block_size"]
        return (
            f"Trained on blocks of {size}: engines draft blocks of num_speculative_tokens, as "
            f"measured here only if that is {size}.",
            f"{VLLM}'s DSpark was read, not tried: it needs a GPU.",
        )
