"""Drafters with output heads of their own: one for each depth, or one for all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core.ops.chunked_losses import (
    OutputHead,
    Sums,
    TargetProbs,
    chunked_losses,
    loss_terms,
)
from drafttrain.core.ops.first_miss import FirstMiss
from drafttrain.core.ops.layers import LentLinear, within_calls
from drafttrain.core.types import Batch, Losses, TargetFeatures
from drafttrain.drafters.base import Drafter, State


def own_heads(width: int, vocab_size: int, count: int, **place: Any) -> nn.ModuleList:
    """Return output heads over a vocabulary."""
    return nn.ModuleList(LentLinear(width, vocab_size, bias=False, **place) for _ in range(count))


def of_depth(modules: nn.ModuleList, depth: int) -> Any:
    """Return the module of a depth; the last one serves all that have none of their own."""
    return modules[min(depth, len(modules) - 1)]


class HeadDrafter(Drafter[State]):
    """A drafter whose `config` is a DepthLossConfig too, and which sets `lm_heads`."""

    lm_heads: nn.ModuleList

    def compare(
        self,
        states: Sequence[Float[Tensor, "_ width"]],
        places: Int[Tensor, "depth position"],
        rows: Int[Tensor, " position"],
        ahead: Int[Tensor, " position"],
        batch: Batch,
        features: TargetFeatures,
        decay: float,
        scale: float = 1.0,
    ) -> Losses:
        """Return the losses of every depth on the tokens at (rows, ahead), times decay**depth.

        states: by depth. places: the row of states[depth] that predicts a token, -1: none does.
        scale: the factor of logits. Distributions are compared at the position before the token;
        correct means equal to the text.
        """
        assert self.vocab is None, "heads are trained over the whole vocabulary"
        config: Any = self.config
        target_probs = None
        if config.needs_target_probs:
            flat = rows * batch.tokens.shape[1] + ahead - 1
            final = features.final_hidden.flatten(0, 1)
            target_probs = TargetProbs(features.readout, final, flat, None)
        weights = [decay**depth for depth in range(len(states))]
        chains = FirstMiss.along_text(config, rows, ahead, len(states))

        def compare(states: list[Tensor]) -> Sums:
            matrices = [head.get_parameter("weight") for head in self.lm_heads]
            heads = [OutputHead(matrix, scale=scale) for matrix in matrices]
            return chunked_losses(
                *(config, weights, heads, states, places, batch.tokens[rows, ahead], target_probs),
                against_text=True,
                first_miss=chains,
            )

        terms = loss_terms(weights, within_calls(list(self.lm_heads), list(states), compare))
        return {
            name: replace(term, uncovered=None)
            for name, term in zip(self.depth_terms, terms, strict=True)
        }
