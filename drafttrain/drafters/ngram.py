"""Prompt lookup: copy what followed the same n-gram before (Saxena, 2023); needs no training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from drafttrain.core.ops.ragged_cache import padded_rows
from drafttrain.core.readout import Readout
from drafttrain.core.transfer import send
from drafttrain.core.tree import Tree
from drafttrain.core.types import Batch, Losses, Proposal, TargetFeatures, TargetSpec
from drafttrain.drafters.base import Drafter, DrafterConfig, DraftState, TrainingChance


@dataclass(frozen=True, kw_only=True)
class NgramConfig(DrafterConfig):
    """The longest and the shortest suffix that is looked up."""

    max_ngram: int
    min_ngram: int

    trainable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        least = f"be at least 1 and at most drafter.max_ngram ({self.max_ngram})"
        self.require("min_ngram", 1 <= self.min_ngram <= self.max_ngram, least)

    def build(self, spec: TargetSpec) -> "Ngram":
        return Ngram(self, spec)


@dataclass
class Text:
    """A row's text, and the ends of the occurrences of each n-gram, its suffix excluded."""

    tokens: list[int]
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


@dataclass
class NgramState(DraftState):
    """The text of every row."""

    texts: list[Text] = field(default_factory=list)


class Ngram(Drafter[NgramState]):
    """Drafts the continuation of the latest earlier occurrence of the longest matching suffix.

    A tree adds those of earlier occurrences, then those of shorter suffixes.
    """

    captures = ()
    branches = True

    def __init__(self, config: NgramConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config: NgramConfig = config
        self.spec = spec
        self.lookup = config.min_ngram, config.max_ngram

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        raise ValueError("drafter=ngram has no weights and cannot be trained; evaluate it as it is")

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> NgramState:
        return NgramState(readout, [Text([token]) for token in first_tokens.tolist()])

    def observe(
        self, state: NgramState, tokens: Tensor, counts: Sequence[int], features: TargetFeatures
    ) -> None:
        """Index the n-grams that got a continuation; the suffix itself has none yet."""
        for text, row, count in zip(state.texts, tokens.tolist(), counts, strict=True):
            for token in row[:count]:
                end = len(text.tokens)
                for size in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                    text.ends.setdefault(tuple(text.tokens[end - size :]), []).append(end)
                text.tokens.append(token)

    def expand(
        self, state: NgramState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        raise AssertionError("prompt lookup proposes everything at once")

    def select(self, state: NgramState, rows: Sequence[int]) -> None:
        state.texts = [state.texts[row] for row in rows]

    def propose(
        self, state: NgramState, depth: int, width: int = 1, num_nodes: int = 0
    ) -> Proposal:
        """Return what followed each row's longest matching suffix; no node if nothing matches."""
        device = state.readout.embedding.device
        found = [self._continuations(text, depth, width) for text in state.texts]
        if max(map(len, found)) < 2:
            tokens, counts = padded_rows([paths[0] if paths else [] for paths in found], device)
            return Proposal(tokens, torch.tensor(counts), None)
        trees = [merged(paths, width, num_nodes) for paths in found]
        tokens, counts = padded_rows([tokens for tokens, _ in trees], device)
        above = [parents + [-1] * (tokens.shape[1] - len(parents)) for _, parents in trees]
        tree = Tree.of(send(torch.tensor(above), device), depth, width)
        return Proposal(tokens, torch.tensor(counts), None, tree)

    def _continuations(self, text: Text, depth: int, most: int) -> list[list[int]]:
        """Return up to `most` texts that followed a suffix: longest suffix first, then latest."""
        found: list[list[int]] = []
        longest = min(self.config.max_ngram, len(text.tokens) - 1)
        for size in range(longest, self.config.min_ngram - 1, -1):
            ends = text.ends.get(tuple(text.tokens[-size:]), [])
            for end in ends[: -1 - most : -1]:
                path = text.tokens[end : end + depth]
                if path not in found:
                    found.append(path)
                if len(found) == most:
                    return found
        return found


def merged(paths: Sequence[Sequence[int]], width: int, most: int) -> tuple[list[int], list[int]]:
    """Return the tokens and parents of the tree of these paths, cut at `most` nodes.

    The first path is whole; a node has at most `width` children, all different.
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}  # by parent and token
    for path in paths:
        place = -1
        for token in path:
            if (place, token) not in nodes:
                if len(tokens) == most or parents.count(place) == width:
                    break
                nodes[place, token] = len(tokens)
                tokens.append(token)
                parents.append(place)
            place = nodes[place, token]
    return tokens, parents
