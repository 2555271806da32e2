"""Losses of a drafted token that count only as long as its chain was right (Spec-AUF)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from drafttrain.core.losses import DepthLossConfig


@dataclass(frozen=True)
class FirstMiss:
    """Which positions count: those whose chain drafted no wrong token before (arXiv:2607.01893).

    counted: whether a position counts at the first depth. before: the position that the same chain
    drafts one depth before; -1: none that is trained, so it counts. right: of each depth, where a
    position counts and its token is right; `chunked_losses` writes it.
    """

    counted: Bool[Tensor, " position"]
    before: Int[Tensor, " position"]
    right: Bool[Tensor, "depth position"]

    @classmethod
    def begin(cls, counted: Bool[Tensor, " position"], before: Tensor, depths: int) -> "FirstMiss":
        """Return chains of which nothing is known yet."""
        return cls(counted, before, counted.new_zeros(depths, len(counted)))

    @classmethod
    def along_text(
        cls,
        config: DepthLossConfig,
        rows: Int[Tensor, " position"],
        columns: Int[Tensor, " position"],
        depths: int,
    ) -> "FirstMiss | None":
        """Return the chains over positions in text order; None if the losses do not ask for them.

        A chain that drafts a token at a depth drafts the token before it at the depth before. One
        whose prediction is not trained (another turn) ends no chain: nothing is drafted there.
        """
        if not config.stops_at_miss:
            return None
        last_row, last_column = (
            functional.pad(at, (1, 0), value=-2)[:-1] for at in (rows, columns)
        )
        follows = (rows == last_row) & (columns == last_column + 1)
        before = (torch.arange(len(rows), device=rows.device) - 1).where(follows, -1)
        return cls.begin(torch.ones_like(follows), before, depths)

    def counts(self, depth: int, at: Int[Tensor, " chosen"]) -> Bool[Tensor, " chosen"]:
        """Return which of these positions count at a depth; smaller depths are written."""
        if depth == 0:
            return self.counted[at]
        before = self.before[at]
        return (before < 0) | self.right[depth - 1, before.clamp(min=0)]
