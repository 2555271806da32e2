"""What a drafter has not read yet of a text that the target goes on decoding."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from drafttrain.core.ops.ragged_cache import padded_rows
from drafttrain.core.transfer import send_numbers
from drafttrain.core.types import TargetFeatures
from drafttrain.drafters.base import Drafter, DraftState

MOST = 1024  # passes whose features are kept for a drafter that does not draft

Part = tuple[Int[Tensor, "batch new"], Sequence[int], TargetFeatures]


class Backlog:
    """Parts of the text for `Drafter.observe`, kept until the drafter drafts."""

    def __init__(self, drafter: Drafter, state: DraftState) -> None:
        self.drafter, self.state = drafter, state
        self.parts: list[Part] = []

    def add(
        self, tokens: Int[Tensor, "batch new"], counts: Sequence[int], features: TargetFeatures
    ) -> None:
        """Keep what one pass decoded; see `Drafter.observe`."""
        self.parts.append((tokens, counts, features))
        if len(self.parts) > MOST:
            self.read()

    def select(self, kept: Sequence[int]) -> None:
        """Keep these rows, here and in the drafter's state."""
        self.drafter.select(self.state, kept)
        self.parts = [
            (
                tokens[send_numbers(kept, tokens.device)],
                [counts[place] for place in kept],
                features.rows(kept),
            )
            for tokens, counts, features in self.parts
        ]

    def read(self) -> None:
        """Have the drafter read all of it, in a single pass."""
        if not self.parts:
            return
        tokens = torch.cat([tokens for tokens, _, _ in self.parts], dim=1)
        features = TargetFeatures.joined([features for _, _, features in self.parts])
        counts, start = self.parts[0][1], 0
        if len(self.parts) > 1:  # rows may have padding between the parts
            places: list[list[int]] = [[] for _ in counts]
            for part, counts, _ in self.parts:
                for row, count in zip(places, counts, strict=True):
                    row += range(start, start + count)
                start += part.shape[1]
            index, counts = padded_rows(places, tokens.device)
            tokens, features = tokens.gather(1, index), features.take(index)
        self.parts = []
        self.drafter.observe(self.state, tokens, counts, features)
