"""Loss terms per position; callers sum and divide by the step's denominator, once.

Logits of a position are compared in float32 (float64 where they are), whatever the compute dtype.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def soft_cross_entropy(
    logits: Float[Tensor, "position vocab"], target_probs: Float[Tensor, "position vocab"]
) -> Float[Tensor, " position"]:
    """Return -sum target_probs * log softmax(logits): forward KL plus the target's entropy."""
    return -(target_probs * _wide(logits).log_softmax(-1)).sum(-1)


def hard_cross_entropy(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"]
) -> Float[Tensor, " position"]:
    """Return the negative log-likelihood of the given tokens."""
    return functional.cross_entropy(_wide(logits), tokens, reduction="none")


def feature_regression(
    predicted: Float[Tensor, "position hidden"], features: Float[Tensor, "position hidden"]
) -> Float[Tensor, " position"]:
    """Return the smooth-L1 distance, averaged over the hidden width (EAGLE, section 3.2)."""
    return functional.smooth_l1_loss(_wide(predicted), _wide(features), reduction="none").mean(-1)
