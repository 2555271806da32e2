"""The only source of randomness in decoding: every choice has a key, none depends on call order.

A key is (row, start, draw): the row's name, the number of tokens it had committed when the cycle
began, and the number of the choice within the cycle. A batch therefore equals its rows decoded
alone (but under an adaptive policy, where rows decide together how far a cycle drafts), and a test
can use its own `Chance` to replay the loop over all outcomes.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from drafttrain.core.transfer import send

Draw = int | Sequence[int]  # the number of a choice within its cycle, of all rows or of each
PerRow = Float[Tensor, " batch"]
Probs = Float[Tensor, "batch vocab"]


class Purpose(IntEnum):
    """The purpose of a choice; `number * len(Purpose) + purpose` makes draws distinct."""

    DRAFT = 0  # the drafter chooses a token
    ACCEPT = 1  # verification accepts or rejects it
    EMIT = 2  # the target chooses: first token, corrected token, bonus


def draw_of(number: int, purpose: Purpose) -> int:
    """Return the number of a choice within its cycle; `number` counts those of its purpose."""
    return number * len(Purpose) + purpose


@runtime_checkable
class Chance(Protocol):
    """Makes random choices; every argument is per row."""

    def accept(
        self, probability: PerRow, rows: Sequence[int], starts: Sequence[int], draw: Draw
    ) -> Bool[Tensor, " batch"]:
        """Return True with the given probability: never at 0, always at 1."""

    def choose(
        self, probs: Probs, rows: Sequence[int], starts: Sequence[int], draw: Draw
    ) -> Int[Tensor, " batch"]:
        """Return an id drawn from the given distribution, never one of probability 0."""


class SeededChance:
    """Counter-based randomness (Philox, Salmon et al. 2011): the same key gives the same choice.

    Uniforms are made on the host, which knows every key, and sent without a wait: on a GPU the ten
    rounds of 64-bit products would be hundreds of kernels for a handful of numbers.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def uniforms(self, rows: Sequence[int], starts: Sequence[int], draw: Draw) -> np.ndarray:
        """Return one float64 in [0, 1) for each row's key."""
        mask = 2**64 - 1
        draws = [draw] * len(rows) if isinstance(draw, int) else draw
        if len(rows) >= MANY_ROWS:
            return philox(self.seed & mask, [row & mask for row in rows], starts, draws)
        keys = [np.array([self.seed & mask, row & mask], dtype=np.uint64) for row in rows]
        return np.array(
            [
                np.random.Generator(np.random.Philox(key=key, counter=[0, 0, start, draw])).random()
                for key, start, draw in zip(keys, starts, draws, strict=True)
            ]
        )

    def accept(
        self, probability: PerRow, rows: Sequence[int], starts: Sequence[int], draw: Draw
    ) -> Bool[Tensor, " batch"]:
        """Return True with the given probability (strictly: u < p, so p = 0 is never accepted)."""
        return self._sent(rows, starts, draw, probability.device) < probability.double()

    def choose(
        self, probs: Probs, rows: Sequence[int], starts: Sequence[int], draw: Draw
    ) -> Int[Tensor, " batch"]:
        """Return ids drawn by inverting the cumulative distribution, in float64."""
        uniforms = self._sent(rows, starts, draw, probs.device)
        cumulative = probs.double().cumsum(-1)
        if probs.device.type != "cpu":
            # Sums of blocks, added in another order, may rise or fall where an id has no mass.
            cumulative = torch.where(probs > 0, cumulative, 0.0).cummax(-1).values
        total = cumulative[:, -1:].contiguous()
        ids = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
        # Rounding may point past the last id with mass, at which the sum reaches the total.
        ids = torch.minimum(ids, torch.searchsorted(cumulative, total)).squeeze(-1)
        return ids.clamp_(max=probs.shape[-1] - 1)  # NaN is beyond every id

    def _sent(
        self, rows: Sequence[int], starts: Sequence[int], draw: Draw, device: torch.device
    ) -> Float[Tensor, " batch"]:
        return send(torch.from_numpy(self.uniforms(rows, starts, draw)), device)


MANY_ROWS = 32  # from here on one vectorised Philox is faster than numpy's row by row


def philox(
    seed: int, rows: Sequence[int], starts: Sequence[int], draws: Sequence[int]
) -> np.ndarray:
    """Return the first output of numpy's Philox4x64-10 for each key (seed, row), as a uniform.

    The same numbers as `numpy.random.Philox(key=[seed, row], counter=[0, 0, start, draw])`, which
    counts up before its first block.
    """
    count = len(rows)
    even = np.empty((2, count), dtype=np.uint64)  # words 0 and 2 of the counter: multiplied
    odd = np.empty((2, count), dtype=np.uint64)  # words 1 and 3: mixed in
    even[0], even[1] = 1, np.array(starts, dtype=np.uint64)
    odd[0], odd[1] = 0, np.array(draws, dtype=np.uint64)
    keys = np.empty((2, count), dtype=np.uint64)
    keys[0], keys[1] = seed, np.array(rows, dtype=np.uint64)
    for _ in range(10):
        high, low = _times_constants(even)
        even, odd = high[::-1] ^ odd ^ keys, low[::-1]
        keys = keys + KEY_STEPS
    return (even[0] >> np.uint64(11)) * 2.0**-53


HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
MULTIPLIERS_HIGH, MULTIPLIERS_LOW = MULTIPLIERS >> HALF, MULTIPLIERS & LOW


def _times_constants(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and low 64 bits of each word times its row's multiplier."""
    high, low = words >> HALF, words & LOW
    middle = MULTIPLIERS_HIGH * low + (MULTIPLIERS_LOW * low >> HALF)
    carry = MULTIPLIERS_LOW * high + (middle & LOW)
    return MULTIPLIERS_HIGH * high + (middle >> HALF) + (carry >> HALF), MULTIPLIERS * words
