"""Drafters with output heads of their own: one for each depth, or one for all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.core.ops.chunked_losses import OutputHead
from drafttrain.core.ops.layers import LentLinear
from drafttrain.core.placed_batch import Predictions
from drafttrain.core.types import Batch, Losses, TargetFeatures
from drafttrain.drafters.base import Drafter, State
from drafttrain.drafters.shared.text_losses import losses_along_text


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
        predictions: Predictions,
        batch: Batch,
        features: TargetFeatures,
        decay: float,
        scale: float = 1.0,
    ) -> Losses:
        """Return the losses as `losses_along_text` does, by name; correct means equal to the text.

        scale: the factor of logits.
        """
        assert self.vocab is None, "heads are trained over the whole vocabulary"
        config: Any = self.config

        def heads() -> list[OutputHead]:
            matrices = [head.get_parameter("weight") for head in self.lm_heads]
            return [OutputHead(matrix, scale=scale) for matrix in matrices]

        terms = losses_along_text(
            *(config, decay, states, predictions, batch, features),
            heads=heads,
            lent=list(self.lm_heads),
            against_text=True,
        )
        return {
            name: replace(term, uncovered=None)
            for name, term in zip(self.depth_terms, terms, strict=True)
        }
