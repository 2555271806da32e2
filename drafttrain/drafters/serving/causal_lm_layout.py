"""A whole causal language model, as Transformers writes it."""

from typing import Any

import torch
import transformers

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.engines import LLAMA_CPP, LLAMA_CPP_TARGETS
from drafttrain.drafters.serving.layout import (
    GENERAL,
    Config,
    Expected,
    Files,
    Reading,
    ServedLayout,
    Sign,
    architectures_of,
)

NO_SHAPE = ("architectures", "torch_dtype")  # keys of config.json that do not affect the shape


class CausalLMLayout(ServedLayout):
    """Any model that Transformers itself would load; a tied head is left out, as it does."""

    kind = "causal_lm"
    family = "two_model"
    method = "draft_model"
    title = "a causal language model of Transformers"
    sglang = "STANDALONE"
    llama_cpp = "draft-simple"
    whole_model = True
    trained_as = "small_lm"

    def recognises(self, files: Files) -> Sign | None:
        architectures = architectures_of(files.config)
        if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
            return Sign(GENERAL, f"architectures={architectures}")
        return None

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        """Never called: a whole model is loaded as such, and its tokenizer is compared."""
        raise AssertionError("a whole model is no drafter of this target's before it is loaded")

    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        shape = {key: value for key, value in config.items() if key not in NO_SHAPE}
        settings = transformers.AutoConfig.for_model(**shape)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
        table = {name: Expected(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
        if settings.tie_word_embeddings:
            del table["lm_head.weight"]
        return table

    def required_keys(self, config: Config, spec: TargetSpec) -> Config:
        return {"vocab_size": spec.vocab_size}

    def llama_cpp_refuses(self, config: Config, spec: TargetSpec) -> str:
        kind = config["model_type"]
        rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
        # The converter writes llama3's factors for Llama alone, and says nothing of others.
        tried = ("default", "llama3") if kind == "llama" else ("default",)
        if kind not in LLAMA_CPP_TARGETS:
            return f"{LLAMA_CPP} was not tried with {kind} models as drafters"
        if rope not in tried:
            return f"{LLAMA_CPP} was not tried with rotary scaling of kind {rope} in {kind} models"
        return ""

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        return (
            "A plain model directory: Transformers drafts with it too, as `assistant_model` of "
            "`generate`.",
        )
