"""Any smaller language model, used as it is, with the same or an overlapping vocabulary.

Leviathan et al., 2023, arXiv:2211.17192; across vocabularies: token-level intersection (TLI),
Timor et al., 2025, arXiv:2502.05202, algorithm 4.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.drafters.base import DrafterConfig, TrainingChance
from drafttrain.drafters.shared.causal import CausalDrafter, CausalState
from drafttrain.drafters.shared.model_source import draft_source, load_draft_model
from drafttrain.drafters.shared.publications import quoted, spec_bench
from drafttrain.drafters.shared.vocabularies import check_same, intersection
from drafttrain.runtime import limits
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.quantize import SCHEMES

VOCABULARIES = ("same", "intersection")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class TwoModelConfig(DrafterConfig):
    """Which model drafts, and how its tokens map to the target's."""

    path: str | None
    revision: str | None
    dtype: Annotated[str, limits.one_of("auto", *DTYPES)]
    vocabulary: Annotated[str, limits.one_of(*VOCABULARIES)]
    quantization: Annotated[str, limits.one_of(*SCHEMES)] | None
    trust_remote_code: bool
    allow_pickle: bool

    trainable: ClassVar[bool] = False

    @property
    def served_from(self) -> Path:
        """The model's own directory, or its repository."""
        return Path(str(self.path)).expanduser()

    @property
    def draft_model(self) -> ModelConfig:
        """The model that drafts; ValueError where drafter.path does not name it."""
        if self.path is None:
            raise ValueError(
                f"drafter.path must say which model drafts for drafter={self.name}: a local "
                "directory or a repository of the Hub; for example "
                "drafter.path=/models/Llama-3.2-1B-Instruct"
            )
        return draft_source(
            self.name,
            self.path,
            self.revision,
            allow_pickle=self.allow_pickle,
            trust_remote_code=self.trust_remote_code,
            quantization=self.quantization,
        )

    def build(self, spec: TargetSpec) -> "TwoModel":
        """Return the drafter with its model; ValueError names what is missing or does not fit."""
        model, tokenizer = load_draft_model(self.draft_model, DTYPES.get(self.dtype))
        return TwoModel(self, spec, model, tokenizer)


class TwoModel(CausalDrafter):
    """A model used as it is. Lossless with any vocabulary: only shared tokens are drafted.

    vocabulary `same`: every id must be the same token in both. `intersection`: only shared tokens
    are drafted, from the model's distribution renormalised over them (TLI); target tokens that it
    lacks are read as its own encoding of their text.
    """

    published = (
        *quoted(
            "arXiv:2211.17192",
            "chain",
            {
                "T5-XXL, drafted by T5-small": (3.4, None),
                "T5-XXL, drafted by T5-base": (2.8, None),
            },
            trained_on="off the shelf",
            prompts="English to German, greedy",
        ),
        *spec_bench({"Vicuna 13B (SpS)": (1.54, 2.19)}, "chain", "off the shelf"),
    )

    def __init__(
        self, config: TwoModelConfig, spec: TargetSpec, model: Any, tokenizer: Any
    ) -> None:
        super().__init__(config, spec, model)
        self.config: TwoModelConfig = config
        self.tokenizer = tokenizer
        self.attached = config.vocabulary == "same"
        # Quantised weights, and those whose dtype was chosen, keep their dtype when moved.
        self.pinned = config.dtype != "auto" or hasattr(model, "hf_quantizer")

    def attach(self, tokenizer: Any) -> None:
        """Compare the vocabularies, or find the shared tokens; ValueError if they do not fit."""
        config = self.config
        who = f"drafter.path={config.path}"
        if config.vocabulary == "same":
            check_same(tokenizer, self.tokenizer, who)
            return
        size = self.spec.vocab_size
        found = intersection(tokenizer, self.tokenizer, size, self.num_ids, who)
        self.share(found.target_ids, found.draft_ids, found.spelled)
        self.attached = True

    def to(self, *args: Any, **kwargs: Any) -> "TwoModel":
        """Move the model; it takes a new dtype only with drafter.dtype=auto and if unquantised."""
        if not self.pinned:
            return super().to(*args, **kwargs)
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if device is None else super().to(device, non_blocking=non_blocking)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        raise ValueError(
            f"drafter={self.config.name} is used as it is; to train this model for the target "
            f"choose drafter=small_lm drafter.path={self.config.path}"
        )

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> CausalState:
        assert self.attached, "attach comes before decoding"
        return super().begin(readout, first_tokens, capacity)
