"""Prompt lookup: copy what followed the same n-gram before (Saxena, 2023); needs no training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, takewhile
from typing import ClassVar

from torch import Tensor

from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Counters, Losses, Proposal, TargetFeatures, TargetSpec
from drafttrain.drafters.base import Drafter, DrafterConfig, DraftState, TrainingChance
from drafttrain.drafters.shared.merge import merged, proposal_of
from drafttrain.runtime import limits


@dataclass(frozen=True, kw_only=True)
class NgramConfig(DrafterConfig):
    """The longest and the shortest suffix that is looked up."""

    max_ngram: limits.PositiveInt
    min_ngram: limits.PositiveInt

    trainable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most = f"be at most drafter.max_ngram ({self.max_ngram})"
        self.require("min_ngram", self.min_ngram <= self.max_ngram, most)

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
            self._read(text, row[:count])

    def _read(self, text: Text, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(text.tokens)
            for size in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                text.ends.setdefault(tuple(text.tokens[end - size :]), []).append(end)
            text.tokens.append(token)

    def replay(self, prompt: Sequence[int], answer: Sequence[int], depth: int) -> Counters:
        """Return the counts of chains along a greedy answer, which is the same whoever drafts."""
        text, counters, left = Text([]), Counters(), list(answer[1:])
        self._read(text, [*prompt, *answer[:1]])  # the first token comes with the prefill
        while left:
            end = next(self._ends(text, 1), len(text.tokens))
            drafted = text.tokens[end : end + depth]
            right = takewhile(lambda pair: pair[0] == pair[1], zip(drafted, left, strict=False))
            accepted = len([*right])
            cut = accepted == len(left)  # the answer ends before the bonus token
            if drafted:
                counters.add(accepted if cut else len(drafted), accepted, cut=cut)
            self._read(text, left[: accepted + 1])
            del left[: accepted + 1]
        return counters

    def expand(
        self, state: NgramState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        raise AssertionError("prompt lookup proposes everything at once")

    def propose(
        self, state: NgramState, depth: int, width: int = 1, num_nodes: int = 0
    ) -> Proposal:
        """Return what followed each row's longest matching suffix; no node if nothing matches."""
        trees = []
        for text in state.texts:
            found = (tuple(text.tokens[end : end + depth]) for end in self._ends(text, width))
            paths = [*dict.fromkeys(found)][:width]
            nodes = [path[:end] for path in paths for end in range(1, len(path) + 1)]
            trees.append(merged([nodes], width, num_nodes or depth))
        return proposal_of(trees, depth, width, state.readout.embedding.device)

    def match(self, text: Text, depth: int, longest: int) -> tuple[list[int], int]:
        """Return `depth` tokens that followed the match before, and the match's length.

        The length counts beyond drafter.max_ngram, up to `longest`. Where the text ends before the
        copy does, it goes on from its own beginning, as a text that repeats itself does. Nothing,
        and 0, without a match.
        """
        tokens = text.tokens
        for end in self._ends(text, 1):
            length = 1
            while length < min(end, longest) and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            return list(islice(cycle(tokens[end : end + depth]), depth)), length
        return [], 0

    def _ends(self, text: Text, most: int) -> Iterator[int]:
        """Yield where suffixes ended before: the longest first, `most` of each, latest first."""
        longest = min(self.config.max_ngram, len(text.tokens) - 1)
        for size in range(longest, self.config.min_ngram - 1, -1):
            yield from text.ends.get(tuple(text.tokens[-size:]), [])[: -1 - most : -1]
