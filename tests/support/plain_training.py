"""The training forwards and the unrolled attention as they are defined: whole logits, whole scores.

What drafttrain computes in chunks and by kernels is compared with these, in tests and benchmarks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from drafttrain.core import losses
from drafttrain.core.ops.layer_calls import dtype_of
from drafttrain.core.ops.layers import document_mask
from drafttrain.core.placed_batch import positions_to_predict
from drafttrain.core.types import Batch, Losses, LossTerm, TargetFeatures
from drafttrain.drafters.base import Drafter


def count_correct(logits: Tensor, choices: Tensor) -> Tensor:
    """Count positions whose most likely token is the given one (ties count)."""
    return (logits.gather(-1, choices[:, None]).squeeze(-1) >= logits.amax(-1)).sum()


def wide(values: Tensor) -> Tensor:
    """Float32, or float64 where it is that."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def attention(queries: Tensor, past: list[tuple[Tensor, Tensor]], mask: Tensor | None) -> Tensor:
    """Scores against all first keys and one of each later depth, one softmax over them."""
    group = queries.shape[1] // past[0][0].shape[1]
    spread = lambda heads: heads.repeat_interleave(group, dim=1)  # noqa: E731
    queries = queries * queries.shape[-1] ** -0.5
    first = queries @ spread(past[0][0]).transpose(-1, -2)
    seq = queries.shape[2]
    if mask is None:
        mask = torch.ones(seq, seq, dtype=torch.bool, device=queries.device).tril()
    first = first.masked_fill(~mask, -torch.inf)
    diagonals = [(queries * spread(k)).sum(-1, keepdim=True) for k, _ in past[1:]]
    weights = wide(torch.cat([first, *diagonals], dim=-1)).softmax(-1).to(queries.dtype)
    mixed = weights[..., :seq] @ spread(past[0][1])
    for depth, (_, v) in enumerate(past[1:]):
        mixed = mixed + weights[..., seq + depth, None] * spread(v)
    return mixed


def unrolled(layer: Any, values: Tensor, turn: Any, mask: Any, past: list[Any]) -> Tensor:
    """The values that attention mixes, by head; depth 0 is any causal attention."""
    queries, keys, own = layer.project(values, turn)
    past.append((keys, own))
    if len(past) > 1:
        return attention(queries, past, mask)
    return functional.scaled_dot_product_attention(
        queries, keys, own, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


def eagle3(drafter: Any, batch: Batch, features: TargetFeatures) -> Losses:
    """EAGLE-3: depth after depth, each with its own logits; the distribution made once."""
    config, vocab = drafter.config, drafter.vocab
    steps, length = config.unroll, batch.tokens.shape[1] - 1
    hidden = drafter.read(features)[:, :-1]
    tokens = functional.pad(batch.tokens[:, 1:], (0, steps - 1))
    embedded = drafter.embed(features.readout, tokens)
    mask = document_mask(batch.document[:, :-1])
    rows, ahead = positions_to_predict(batch, 2)
    allowed = batch.positions[rows, ahead] - 2
    with torch.no_grad():
        target_probs = wide(features.readout.logits(features.final_hidden[rows, ahead - 1]))
        choices, covered = target_probs.argmax(-1), torch.ones_like(rows, dtype=torch.bool)
        if vocab is not None:
            choices = vocab.draft_ids[choices]
            covered = (choices >= 0) | target_probs.isnan().any(-1)
            target_probs, choices = target_probs[:, vocab.target_ids], choices.clamp(min=0)
        target_probs = target_probs.softmax(-1)
    labels = batch.tokens[rows, ahead]
    if vocab is not None:
        labels = vocab.draft_ids[labels]
    past: list[tuple[Tensor, Tensor]] = []
    terms: Losses = {}
    for depth in range(steps):
        turn = drafter.shape.rotation(batch.positions[:, :-1] + depth, hidden.dtype)
        inputs, residual = drafter.midlayer.inputs(embedded[:, depth : depth + length], hidden)
        layer = drafter.midlayer
        mixed = layer.self_attn.merge(unrolled(layer.self_attn, inputs, turn, mask, past))
        hidden = drafter._leave(layer.finish(residual, mixed))
        known = allowed >= depth
        used = known & covered
        logits = drafter.logits(features.readout, hidden[rows[used], ahead[used] - 2 - depth])
        loss = config.token_loss(logits, target_probs[used], labels[used])
        terms[f"depth_{depth + 1}"] = LossTerm(
            config.depth_decay**depth,
            loss.sum(),
            known.sum(),
            count_correct(logits.detach(), choices[used]),
            (known & ~covered).sum(),
        )
    return terms


def eagle(drafter: Any, batch: Batch, features: TargetFeatures) -> Losses:
    """EAGLE-1 without its feature noise; deeper, on its own features (HASS)."""
    config, length = drafter.config, batch.tokens.shape[1] - 1
    hidden = features.final_hidden.to(dtype_of(drafter))[:, :-1]
    tokens = functional.pad(batch.tokens[:, 1:], (0, config.unroll - 1))
    mask = document_mask(batch.document[:, :-1])
    rows, ahead = positions_to_predict(batch, 2)
    allowed, truth = batch.positions[rows, ahead] - 2, features.final_hidden[rows, ahead - 1]
    with torch.no_grad():
        target_probs = wide(features.readout.logits(truth)).softmax(-1)
    past: list[tuple[Tensor, Tensor]] = []
    terms: Losses = {}
    regression, counts = [], []
    (layer,) = drafter.layers
    for depth in range(config.unroll):
        pairs = drafter._pairs(features.readout, tokens[:, depth : depth + length], hidden)
        turn = drafter.shape.rotation(batch.positions[:, :-1] + depth, pairs.dtype)
        states = layer.finish(pairs, unrolled(layer.self_attn, pairs, turn, mask, past))
        hidden = states.detach()
        known = allowed >= depth
        predicted = states[rows[known], ahead[known] - 2 - depth]
        logits = features.readout.logits(predicted.to(features.readout.head.dtype))
        loss = config.token_loss(logits, target_probs[known], batch.tokens[rows, ahead][known])
        correct = count_correct(logits.detach(), target_probs[known].argmax(-1))
        terms[f"depth_{depth + 1}"] = LossTerm(
            config.token_weight, loss.sum(), known.sum(), correct
        )
        regression.append(losses.feature_regression(predicted, truth[known]).sum())
        counts.append(known.sum())
    feature = LossTerm(
        config.feature_weight, torch.stack(regression).sum(), torch.stack(counts).sum()
    )
    return {"feature": feature, **terms}


def medusa(drafter: Any, batch: Batch, features: TargetFeatures) -> Losses:
    """Medusa: each head's logits whole."""
    config = drafter.config
    hidden = features.final_hidden.to(dtype_of(drafter))
    all_rows, all_ahead = positions_to_predict(batch, 2)
    target_probs = None
    if config.needs_target_probs:
        with torch.no_grad():
            truth = features.final_hidden[all_rows, all_ahead - 1]
            target_probs = wide(features.readout.logits(truth)).softmax(-1)
    terms: Losses = {}
    for k in range(config.num_heads):
        known = batch.positions[all_rows, all_ahead] >= 2 + k
        rows, ahead = all_rows[known], all_ahead[known]
        labels = batch.tokens[rows, ahead]
        logits = drafter._predict(k, hidden[rows, ahead - 2 - k])
        loss = config.token_loss(
            logits, None if target_probs is None else target_probs[known], labels
        )
        terms[f"head_{k + 1}"] = LossTerm(
            config.head_decay**k,
            loss.sum(),
            torch.tensor(len(rows)),
            count_correct(logits.detach(), labels),
        )
    return terms


def small_lm(drafter: Any, batch: Batch, features: TargetFeatures) -> Losses:
    """A small language model, its logits whole."""
    rows, ahead = positions_to_predict(batch, 1)
    logits = drafter.shared_logits(drafter.head(drafter._hidden(batch)[rows, ahead - 1]))
    with torch.no_grad():
        target_probs = wide(
            features.readout.logits(features.final_hidden[rows, ahead - 1])
        ).softmax(-1)
    loss = drafter.config.token_loss(logits, target_probs, batch.tokens[rows, ahead])
    correct = count_correct(logits.detach(), target_probs.argmax(-1))
    return {"depth_1": LossTerm(1.0, loss.sum(), torch.tensor(len(rows)), correct)}


PLAIN = {"eagle": eagle, "hass": eagle, "eagle3": eagle3, "medusa": medusa, "small_lm": small_lm}


def plain_losses(drafter: Drafter, batch: Batch, features: TargetFeatures) -> Losses:
    """Return the losses of a drafter's training forward, by its definition."""
    return PLAIN[drafter.config.name](drafter, batch, features)
