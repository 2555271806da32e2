"""Token losses along the text of a batch, beside the target's distributions."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.core.losses import DepthLossConfig, FirstMiss, TokenLossConfig
from drafttrain.core.ops.chunked_losses import (
    OutputHead,
    Sums,
    TargetProbs,
    chunked_losses,
    loss_terms,
)
from drafttrain.core.ops.layers import within_calls
from drafttrain.core.placed_batch import Predictions, positions_to_predict
from drafttrain.core.types import Batch, LossTerm, TargetFeatures
from drafttrain.core.vocab import DraftVocab


def losses_along_text(
    config: TokenLossConfig,
    decay: float,
    states: Sequence[Float[Tensor, "_ width"]],
    predictions: Predictions,
    batch: Batch,
    features: TargetFeatures,
    heads: Callable[[], Sequence[OutputHead]] | None = None,
    lent: Sequence[nn.Module] = (),
    vocab: DraftVocab | None = None,
    against_text: bool = False,
) -> list[LossTerm]:
    """Return the losses of every depth on the tokens that its states predict, times decay**depth.

    Each is compared with the target's distribution at the position before the token. heads: returns
    one for each depth, or one for all, within calls of the modules `lent` (`within_calls`); None:
    all have the target's. vocab: that of the heads; None: the target's. against_text: see
    `chunked_losses`.
    """
    rows, columns = predictions.rows, predictions.columns
    labels = batch.tokens[rows, columns]
    if vocab is not None:
        labels = vocab.draft_ids[labels]
    target_probs = first_miss = None
    if config.needs_target_probs or not against_text:
        predicting = rows * batch.tokens.shape[1] + columns - 1
        final = features.final_hidden.flatten(0, 1)
        target_probs = TargetProbs(features.readout, final, predicting, vocab)
    if isinstance(config, DepthLossConfig):
        first_miss = FirstMiss.along_text(config, rows, columns, len(states))
    weights = [decay**depth for depth in range(len(states))]

    def compare(states: list[Tensor]) -> Sums:
        own = [OutputHead.of(features.readout)] if heads is None else heads()
        return chunked_losses(
            *(config, weights, own, states, predictions.places, labels, target_probs),
            against_text=against_text,
            first_miss=first_miss,
        )

    return loss_terms(weights, within_calls(lent, list(states), compare))


def next_token_loss(
    config: TokenLossConfig,
    states: Float[Tensor, "batch seq width"],
    batch: Batch,
    features: TargetFeatures,
    heads: Callable[[], Sequence[OutputHead]] | None = None,
    lent: Sequence[nn.Module] = (),
) -> LossTerm:
    """Return the loss of every trained token, predicted by the state at the position before it."""
    rows, columns = positions_to_predict(batch, 1)
    before = (rows * batch.tokens.shape[1] + columns - 1)[None]
    read = [states.flatten(0, 1)], Predictions(rows, columns, before)
    (term,) = losses_along_text(config, 1.0, *read, batch, features, heads, lent)
    return replace(term, uncovered=None)
