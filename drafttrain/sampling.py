"""Logits to probabilities: the only place, for target, drafter and residual alike.

Temperature 0 is a one-hot distribution, not a branch of the decode loop, so that every exact rule
stays exact there.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from drafttrain.types import Sampling


def probabilities(
    logits: Float[Tensor, "*shape vocab"], sampling: Sampling
) -> Float[Tensor, "*shape vocab"]:
    """Return the law that tokens are drawn from: temperature, then top-k, then top-p.

    Computed in float32, or in float64 where the logits are. Ties at temperature 0 go to the lowest
    id, as argmax does on CPU. top-p keeps the smallest set of most likely tokens whose mass reaches
    top_p, always at least one (the convention of Transformers and vLLM).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kept = logits.topk(sampling.top_k, dim=-1).indices  # by index: ties cannot admit k + 1
        mask = torch.ones_like(logits, dtype=torch.bool).scatter_(-1, kept, False)
        logits = logits.masked_fill(mask, -torch.inf)
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(stable=True, dim=-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.masked_fill(dropped.gather(-1, order.argsort(-1)), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs
