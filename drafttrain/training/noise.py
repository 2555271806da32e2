"""Uniform numbers by key, computed where they are needed: the same on every device."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Two multipliers and three shifts with the least known bias for a hash of 32 bits (Wellons, "Hash
# Prospector", 2018). Integers of 32 bits wrap around, on every device alike.
FIRST, SECOND = 0x21F0AAAD, 0x735A2D97


def uniforms(
    seed: int, document: Int[Tensor, "batch seq"], width: int
) -> Float[Tensor, "batch seq width"]:
    """Return uniforms in [0, 1), keyed by seed, conversation and place in it; zeros at padding."""
    places = torch.arange(document.shape[1], device=document.device)
    begins = document != document.roll(1, dims=1)
    begins[:, 0] = True
    first = torch.where(begins, places, 0).cummax(dim=1).values
    tokens = _hashed(_hashed(document.int() ^ (seed & 0x7FFFFFFF)) + (places - first).int())
    channels = _hashed(torch.arange(width, dtype=torch.int32, device=document.device))
    bits = _hashed(tokens[..., None] ^ channels) >> 8
    drawn = bits.float().mul_(2.0**-24).add_(0.5)
    return drawn.mul_((document >= 0)[..., None])


def _hashed(values: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    mixed = _folded(values, 16).mul_(FIRST)
    mixed = _folded(mixed, 15).mul_(SECOND)
    return _folded(mixed, 15)


def _folded(values: Tensor, shift: int) -> Tensor:
    # A shift to the right repeats the sign; the mask makes it a shift of plain bits.
    shifted = (values >> shift).bitwise_and_((1 << (32 - shift)) - 1)
    return shifted.bitwise_xor_(values)
