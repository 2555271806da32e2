"""Prompt lookup: copy what followed the same n-gram before (Saxena, 2023); needs no training."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from drafttrain.drafters.base import (
    Capabilities,
    Drafter,
    DrafterConfig,
    DraftState,
    Expansion,
    TrainingChance,
)
from drafttrain.readout import Readout
from drafttrain.types import Batch, Losses, Nodes, Proposal, TargetFeatures, TargetSpec


@dataclass(frozen=True, kw_only=True)
class NgramConfig(DrafterConfig):
    """The longest and the shortest suffix that is looked up."""

    max_ngram: int
    min_ngram: int

    trainable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                "drafter.min_ngram must be at least 1 and at most drafter.max_ngram "
                f"({self.max_ngram}), got {self.min_ngram}"
            )

    def build(self, spec: TargetSpec) -> "Ngram":
        """Make the lookup drafter."""
        return Ngram(self, spec)


@dataclass
class NgramState(DraftState):
    """The text so far, and for every n-gram where its latest occurrence but the suffix ends."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class Ngram(Drafter):
    """Drafts the continuation of the latest earlier occurrence of the longest matching suffix."""

    captures = ()

    def __init__(self, config: NgramConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config: NgramConfig = config
        self.spec = spec

    @property
    def capabilities(self) -> Capabilities:
        """Nothing to train; proposals are chains as long as the text allows."""
        return Capabilities(trainable=False, branches=False, max_depth=None, unroll=0)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Refuse: there is nothing to train."""
        raise ValueError("drafter=ngram has no weights and cannot be trained; evaluate it as it is")

    def begin(
        self, access: Readout, first_tokens: Int[Tensor, " batch"], capacity: int
    ) -> NgramState:
        """Start from the first token of the only row."""
        assert len(first_tokens) == 1, "prompt lookup decodes one row at a time"
        return NgramState(access, first_tokens.tolist())

    def observe(
        self,
        state: NgramState,
        tokens: Int[Tensor, "batch new"],
        features: TargetFeatures,
        path: Int[Tensor, "batch depth"] | None,
    ) -> None:
        """Index the n-grams that got a continuation; the suffix itself has none yet."""
        for token in tokens[0].tolist():
            end = len(state.tokens)
            for size in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                state.ends[tuple(state.tokens[end - size :])] = end
            state.tokens.append(token)

    def expand(self, state: NgramState, nodes: Nodes | None) -> Expansion:
        """Never asked: the whole proposal is looked up at once."""
        raise AssertionError("prompt lookup proposes whole chains")

    def propose(self, state: NgramState, depth: int) -> Proposal:
        """Look up the longest suffix; an empty proposal where nothing matches."""
        found: list[int] = []
        longest = min(self.config.max_ngram, len(state.tokens) - 1)
        for size in range(longest, self.config.min_ngram - 1, -1):
            end = state.ends.get(tuple(state.tokens[-size:]))
            if end is not None:
                found = state.tokens[end : end + depth]
                break
        tokens = torch.tensor([found], dtype=torch.long, device=state.access.embedding.device)
        parents = torch.arange(-1, len(found) - 1, device=tokens.device)[None]
        return Proposal(tokens, parents, torch.tensor([len(found)]), None)
