"""Reduced draft vocabularies: which target ids a drafter can draft, and the maps both ways."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class DraftVocab:
    """The kept target ids, ascending: draft id i is target id `target_ids[i]`.

    On disk engines expect `d2t` as an *offset*, target id = i + d2t[i], and `t2d` as a mask.
    """

    target_ids: Int[Tensor, " draft_vocab"]
    draft_ids: Int[Tensor, " vocab"]  # -1 where the drafter cannot draft the token

    @classmethod
    def of(cls, target_ids: Int[Tensor, " draft_vocab"], vocab_size: int) -> "DraftVocab":
        """Return the maps for the kept ids; ValueError unless they are ascending and distinct."""
        if target_ids.dim() != 1 or target_ids.dtype != torch.long or not len(target_ids):
            raise ValueError(
                f"d2t must name target ids, one integer each, got {list(target_ids.shape)} of "
                f"{target_ids.dtype}"
            )
        if not bool((target_ids[1:] > target_ids[:-1]).all()):
            raise ValueError("d2t must name target ids in ascending order, each once")
        if not (0 <= int(target_ids[0]) and int(target_ids[-1]) < vocab_size):
            raise ValueError(f"d2t must name ids below the target's vocabulary of {vocab_size}")
        draft_ids = torch.full((vocab_size,), -1, dtype=torch.long, device=target_ids.device)
        draft_ids[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        return cls(target_ids, draft_ids)

    @classmethod
    def most_frequent(
        cls, token_counts: Int[Tensor, " vocab"], size: int, coverage: float | None
    ) -> "DraftVocab | None":
        """Return a vocabulary of the `size` most frequent ids, or of fewer that have `coverage`.

        coverage: the share of the tokens that is enough; their number is rounded up to a multiple
        of 64 for the hardware. Ties go to the lower id. None if no id is left out.
        """
        vocab_size, kept = len(token_counts), size
        order = token_counts.argsort(descending=True, stable=True)
        if coverage is not None:
            cumulative = token_counts[order].cumsum(0).double()
            needed = int((cumulative < coverage * cumulative[-1]).sum()) + 1
            kept = min(size, -(-needed // 64) * 64)
        if kept >= vocab_size:
            return None
        return cls.of(order[:kept].sort().values, vocab_size)

    @property
    def size(self) -> int:
        """The number of tokens that the drafter can draft."""
        return len(self.target_ids)

    @property
    def d2t(self) -> Int[Tensor, " draft_vocab"]:
        """Offsets as engines load them: target id = i + d2t[i]."""
        return self.target_ids - torch.arange(self.size, device=self.target_ids.device)

    @property
    def t2d(self) -> Bool[Tensor, " vocab"]:
        """Mask over target ids: true where the drafter can draft the token."""
        return self.draft_ids >= 0

    def scatter(self, probs: Float[Tensor, "*shape draft_vocab"]) -> Float[Tensor, "*shape vocab"]:
        """Return probabilities over target ids from those over draft ids, zero elsewhere."""
        spread = probs.new_zeros(*probs.shape[:-1], len(self.draft_ids))
        spread[..., self.target_ids] = probs
        return spread
