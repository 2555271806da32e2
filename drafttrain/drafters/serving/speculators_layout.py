"""The format of vLLM's speculators, which names the target: `vllm serve DIR` is the whole command.

Written for speculators 0.9.0 and vLLM 0.32, which translates it into its native keys
(transformers_utils/configs/speculators/algos.py). A family that the format holds has a subclass in
the file of its own layout.
"""

import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.layout import (
    DECLARED,
    Config,
    DerivedLayout,
    Files,
    Layout,
    Reading,
    ServedLayout,
    Sign,
    Tensors,
    Unfit,
    UnknownKind,
)
from drafttrain.runtime.untrusted_input import shown

VERSION = "0.9.0"  # of the package that exports are written for
TYPE = "speculators_model_type"
FROM_VERIFIER = "verifier_"  # tensors that are copies of the target's
LAYER_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("max_position_embeddings", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id"),
)  # of the native config.json, which describe the decoder layers


@dataclass(frozen=True)
class NativeView:
    """Files in the speculators format with the config.json that they would have natively."""

    files: Files
    config: Config

    @property
    def names(self) -> frozenset[str]:
        """The names of the drafter's own tensors."""
        return frozenset(n for n in self.files.names if not n.startswith(FROM_VERIFIER))

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the drafter's own tensors whose names begin so."""
        found = self.files.tensors(prefix)
        return {n: t for n, t in found.items() if not n.startswith(FROM_VERIFIER)}


class SpeculatorsLayout(DerivedLayout):
    """One family's drafters in the speculators format."""

    speculators_type: ClassVar[str]  # the value of speculators_model_type
    loaded_by: ClassVar[str]  # the package's class

    def recognises(self, files: Files) -> Sign | None:
        kind = files.config.get(TYPE)
        return Sign(DECLARED, f"{TYPE}={kind}") if kind == self.speculators_type else None

    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        layer = files.config.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise Unfit(["config.json's transformer_layer_config must be an object"])
        view = NativeView(files, {**layer, **self.native_keys(files.config)})
        reading = self.native().read(view, base, spec, layers)
        reading.notes += self.read_otherwise(view.config)
        return reading

    @abstractmethod
    def native(self) -> ServedLayout:
        """Return the family's native layout, whose keys `native_keys` gives."""

    def read_otherwise(self, native: Config) -> list[str]:
        """Return notes on what engines, or the package, read otherwise in such files."""
        return []

    @abstractmethod
    def native_keys(self, config: Config) -> Config:
        """Return the family's native keys, besides those of its decoder layers."""

    @abstractmethod
    def own_keys(self, native: Config) -> Config:
        """Return the family's keys in this format, from the native config.json."""

    def renamed(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return the tensors by their names in this format."""
        return dict(tensors)

    def write(
        self, native: Config, tensors: Tensors, spec: TargetSpec, target: str, depth: int
    ) -> tuple[Config, dict[str, Tensor]]:
        rotary = {"rope_type": "default", **native.get("rope_scaling", {})}
        class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(spec.architecture)
        proposal = {"proposal_type": "greedy", "speculative_tokens": depth}
        config = {
            "architectures": [self.loaded_by],
            TYPE: self.speculators_type,
            "speculators_version": VERSION,
            **self.own_keys(native),
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": self.speculators_type,
                "default_proposal_method": "greedy",
                "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "verifier": {
                    "name_or_path": target,
                    "architectures": [class_name] if class_name else [],
                },
            },
            "transformer_layer_config": {
                **{key: native[key] for key in LAYER_KEYS},
                "rope_parameters": {**rotary, "rope_theta": native["rope_theta"]},
            },
        }
        return config, self.renamed(tensors)

    def commands(
        self, target: str, model: str, depth: int, draft_sample_method: str | None
    ) -> dict[str, str]:
        """Return vLLM's command, which takes target, method and depth from config.json."""
        words = ["vllm", "serve", model]
        if draft_sample_method is not None:
            words += ["--speculative-config", f'{{"draft_sample_method": "{draft_sample_method}"}}']
        return {"vLLM": shlex.join(words)}

    def notes(self, target: str, refused: Mapping[str, str]) -> list[str]:
        """Return where the target's name stands, and that one engine reads the format."""
        notes = ["config.json names the target, speculators_config.verifier.name_or_path"]
        if Path(target).is_absolute():
            notes[0] += ", by its directory here: on another machine write its place there"
        notes[0] += "."
        if "SGLang" not in refused:
            notes.append(
                "No SGLang command: it does not read this format, but that of export=vllm."
            )
        return notes


def proposed_tokens(config: Config) -> Any:
    """Return how many tokens the files' first way to draft takes; None if they do not name it."""
    told = config.get("speculators_config")
    methods = told.get("proposal_methods") if isinstance(told, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def refuse_other_types(files: Files, layouts: Sequence[Layout]) -> None:
    """Raise UnknownKind for files of the format whose family none of the layouts has."""
    kind = files.config.get(TYPE)
    known = [one.speculators_type for one in layouts if isinstance(one, SpeculatorsLayout)]
    if kind is not None and kind not in known:
        raise UnknownKind(f"{TYPE}={shown(kind)}, of which {', '.join(known)} can be read")
