"""The only source of randomness in decoding: every answer is keyed, none depends on call order.

A key is (row, start, draw): the row's own name, the number of tokens it had committed when the
cycle began, and which choice of the cycle this is. A batch therefore equals its rows decoded alone,
and a test can put its own `Chance` in place and replay the loop over all answers.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Purpose(IntEnum):
    """What a choice is for; `draw = depth * len(Purpose) + purpose` keeps choices apart."""

    DRAFT = 0  # the drafter chooses a token
    ACCEPT = 1  # verification accepts or rejects it
    EMIT = 2  # the target chooses: first token, corrected token, bonus


def draw_of(depth: int, purpose: Purpose) -> int:
    """Return the number of a choice within its cycle."""
    return depth * len(Purpose) + purpose


@runtime_checkable
class Chance(Protocol):
    """Answers choices; every argument is per row."""

    def accept(
        self,
        probability: Float[Tensor, " batch"],
        rows: Sequence[int],
        starts: Sequence[int],
        draw: int,
    ) -> Bool[Tensor, " batch"]:
        """Say yes with the given probability: never at 0, always at 1."""
        ...

    def choose(
        self,
        probs: Float[Tensor, "batch vocab"],
        rows: Sequence[int],
        starts: Sequence[int],
        draw: int,
    ) -> Int[Tensor, " batch"]:
        """Choose an id by the given law; an id of probability 0 is never chosen."""
        ...


class SeededChance:
    """Counter-based randomness (Philox, Salmon et al. 2011): the same key gives the same answer."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def uniforms(self, rows: Sequence[int], starts: Sequence[int], draw: int) -> np.ndarray:
        """Return one float64 in [0, 1) for each row's key."""
        mask = 2**64 - 1
        return np.array(
            [
                np.random.Generator(
                    np.random.Philox(
                        key=[self.seed & mask, row & mask], counter=[0, 0, start, draw]
                    )
                ).random()
                for row, start in zip(rows, starts, strict=True)
            ]
        )

    def accept(
        self,
        probability: Float[Tensor, " batch"],
        rows: Sequence[int],
        starts: Sequence[int],
        draw: int,
    ) -> Bool[Tensor, " batch"]:
        """Say yes with the given probability (strictly: u < p, so p = 0 is never accepted)."""
        uniforms = torch.from_numpy(self.uniforms(rows, starts, draw))
        return (uniforms < probability.double().cpu()).to(probability.device)

    def choose(
        self,
        probs: Float[Tensor, "batch vocab"],
        rows: Sequence[int],
        starts: Sequence[int],
        draw: int,
    ) -> Int[Tensor, " batch"]:
        """Choose by the inverse of the distribution function, in float64."""
        uniforms = torch.from_numpy(self.uniforms(rows, starts, draw)).to(probs.device)
        cumulative = probs.double().cumsum(-1)
        total = cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True).squeeze(-1)
        # Rounding can point past the last id with mass; the last one with mass is the answer then.
        last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
        return torch.minimum(ids, last)
