"""Prompt lookup: copy what followed the same n-gram before (Saxena, 2023); needs no training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, Nodes, Proposal, TargetFeatures, TargetSpec
from drafttrain.drafters.base import (
    Capabilities,
    Drafter,
    DrafterConfig,
    DraftState,
    Expansion,
    TrainingChance,
)


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
class Text:
    """The text of a row, and for every n-gram where its latest occurrence but the suffix ends."""

    tokens: list[int]
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class NgramState(DraftState):
    """The text of every row."""

    texts: list[Text] = field(default_factory=list)


class Ngram(Drafter[NgramState]):
    """Drafts the continuation of the latest earlier occurrence of the longest matching suffix."""

    captures = ()

    def __init__(self, config: NgramConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config: NgramConfig = config
        self.spec = spec
        self.lookup = config.min_ngram, config.max_ngram

    @property
    def capabilities(self) -> Capabilities:
        """Nothing to train; proposals are chains as long as the text allows."""
        return Capabilities(trainable=False, branches=False, max_depth=None, unroll=0)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Refuse: there is nothing to train."""
        raise ValueError("drafter=ngram has no weights and cannot be trained; evaluate it as it is")

    def begin(
        self, readout: Readout, first_tokens: Int[Tensor, " batch"], capacity: int
    ) -> NgramState:
        """Start from the first token of each row."""
        return NgramState(readout, [Text([token]) for token in first_tokens.tolist()])

    def observe(
        self,
        state: NgramState,
        tokens: Int[Tensor, "batch new"],
        counts: Sequence[int],
        features: TargetFeatures,
    ) -> None:
        """Index the n-grams that got a continuation; the suffix itself has none yet."""
        for text, row, count in zip(state.texts, tokens.tolist(), counts, strict=True):
            for token in row[:count]:
                end = len(text.tokens)
                for size in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                    text.ends[tuple(text.tokens[end - size :])] = end
                text.tokens.append(token)

    def expand(self, state: NgramState, nodes: Nodes | None) -> Expansion:
        """Never asked: the whole proposal is looked up at once."""
        raise AssertionError("prompt lookup proposes whole chains")

    def select(self, state: NgramState, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        state.texts = [state.texts[row] for row in rows]

    def propose(self, state: NgramState, depth: int) -> Proposal:
        """Look up the longest suffix of each row; no node where nothing matches."""
        device = state.readout.embedding.device
        found = [self._look_up(text, depth) for text in state.texts]
        num_nodes = [len(chain) for chain in found]
        longest = max(num_nodes)
        padded = [chain + [0] * (longest - len(chain)) for chain in found]
        tokens = torch.tensor(padded, dtype=torch.long, device=device)
        parents = torch.arange(-1, longest - 1, device=device).expand(len(found), longest)
        return Proposal(tokens, parents, torch.tensor(num_nodes), None)

    def _look_up(self, text: Text, depth: int) -> list[int]:
        longest = min(self.config.max_ngram, len(text.tokens) - 1)
        for size in range(longest, self.config.min_ngram - 1, -1):
            end = text.ends.get(tuple(text.tokens[-size:]))
            if end is not None:
                return text.tokens[end : end + depth]
        return []
