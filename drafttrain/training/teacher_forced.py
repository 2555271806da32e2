"""Validation without the target's model: the overlap with its distribution, from a store."""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.losses import REJECTION, TokenLossConfig
from drafttrain.core.placed_batch import placed
from drafttrain.core.types import Batch, Sample, TargetFeatures
from drafttrain.data.batches import collate
from drafttrain.drafters.base import Drafter, TrainingChance
from drafttrain.runtime.terminal import Tell, silently
from drafttrain.runtime.tracker import EXPECTED_LENGTH
from drafttrain.target.store.features import StoredTarget
from drafttrain.training.engine.engine import Engine

FROM = 32  # at most this many drafts begin in one conversation, if they are drafted along it


class TeacherForced:
    """Reads held-out stored conversations as training does; every rank takes its share.

    alpha of a depth is E sum min(target_probs, draft_probs), given that all earlier tokens were
    accepted: the acceptance rate there when sampling at temperature 1. Tokens that a reduced
    vocabulary lacks count as rejected. The expected acceptance length is the sum of the products of
    alphas; it is for the stored text, and not comparable with that of the real decode loop.
    """

    metric = EXPECTED_LENGTH

    def __init__(
        self,
        source: StoredTarget,
        engine: Engine,
        held_out: Sequence[Sample],
        *,
        num_conversations: int,
        micro_batch: int,
    ) -> None:
        assert isinstance(engine.module, Drafter)
        if not held_out:
            raise ValueError(
                "data.holdout must be at least 1 conversation if features.validate=false, got "
                "0: the best checkpoint is chosen by them"
            )
        self.source, self.engine, self.drafter = source, engine, engine.module
        self.held_out = list(held_out)[:num_conversations]
        self.yardstick = {"conversations": num_conversations}
        self.micro_batch = micro_batch
        common = isinstance(self.drafter.config, TokenLossConfig)  # else its losses are its own
        self.terms = self.drafter.depth_terms if common else ()
        self.depth = len(self.terms) or self.drafter.unroll
        self.rows: list[list[float]] = []

    @torch.no_grad()
    def __call__(self, tell: Tell = silently) -> dict[str, float]:
        """Return alpha of each depth and the expected acceptance length."""
        drafter = self.engine.copy_of_module().eval()
        assert isinstance(drafter, Drafter)
        if self.terms:
            drafter.config = dataclasses.replace(drafter.config, losses=REJECTION)  # type: ignore[call-arg]
        ranks = self.engine.ranks
        sums = torch.zeros(self.depth, 2, dtype=torch.float64, device=ranks.device)
        mine = self.held_out[ranks.rank :: ranks.world_size]
        for first in range(0, len(mine), self.micro_batch):
            tell(f"validating {first}/{len(mine)}")
            batch = collate(mine[first : first + self.micro_batch])
            features = self.source.features(batch, drafter.captures)
            batch = placed(batch, ranks.device)
            with self.engine.precision:
                if self.terms:  # from the training forward
                    losses = drafter(batch, features, NoChance())
                    terms = [losses[name] for name in self.terms]
                    overlaps = torch.stack([(term.count - term.sum).double() for term in terms])
                    counts = torch.stack([term.count.double() for term in terms])
                    sums += torch.stack([overlaps, counts], dim=1)
                else:
                    sums += sum(
                        drafted_along(drafter, batch, features, row, self.depth)
                        for row in range(len(batch.tokens))
                    )
        metrics, expected, so_far = {}, 1.0, 1.0
        self.rows = []
        for depth, (overlap, count) in enumerate(ranks.sum_over_ranks(sums).tolist(), start=1):
            alpha = overlap / max(count, 1)
            so_far *= alpha
            expected += so_far
            metrics[f"val/alpha_{depth}"] = alpha
            self.rows.append([float(depth), alpha, count])
        return {self.metric: expected, **metrics}

    def table(self) -> tuple[list[str], list[list[float]]]:
        """Return columns and rows of the last validation: one row per depth."""
        return ["depth", "alpha", "positions"], self.rows


def drafted_along(
    drafter: Drafter, batch: Batch, features: TargetFeatures, row: int, depth: int
) -> Float[Tensor, "depth 2"]:
    """Return overlap and positions of each depth, drafting along the text of one conversation.

    As in decoding, from at most FROM of its tokens, evenly spread: each is the last token of a row
    of its own. For drafters that do not train with the common token losses.
    """
    tokens, trained = batch.tokens[row], batch.loss_mask[row]
    length = int((batch.document[row] >= 0).sum())
    places = torch.arange(1, length - 1, device=tokens.device)
    ahead = places[:, None] + torch.arange(1, depth + 1, device=tokens.device)
    followed = (ahead < length) & trained[ahead.clamp(max=length - 1)]
    places = places[followed.any(-1)]
    if len(places) > FROM:
        chosen = torch.linspace(0, len(places) - 1, FROM, device=tokens.device)
        places = places[chosen.round().long()]
    sums = torch.zeros(depth, 2, dtype=torch.float64, device=tokens.device)
    if not len(places):
        return sums
    counts = places.tolist()
    rows, longest = len(counts), max(counts)
    own = features.rows([row] * rows).slice(0, longest)
    state = drafter.begin(features.readout, tokens[:1].expand(rows), longest + depth + 1)
    drafter.observe(state, tokens[1 : longest + 1].expand(rows, longest), counts, own)
    drafted: Tensor | None = None
    for level in range(depth):
        draft = drafter.expand(state, drafted)[:, 0].float().softmax(-1)
        if drafter.vocab is not None:
            draft = drafter.vocab.scatter(draft)
        at = places + level + 1  # the drafted token; the target predicts it one position before
        inside = at.clamp(max=length - 1)
        hidden = features.final_hidden[row, inside - 1]
        target = features.readout.float32_logits(hidden).softmax(-1)
        counted = (at < length) & trained[inside]
        sums[level, 0] += (torch.minimum(target, draft).sum(-1) * counted).sum()
        sums[level, 1] += counted.sum()
        drafted = tokens[inside][:, None]
    return sums


class NoChance(TrainingChance):
    """The chance of validation, which draws nothing."""

    def uniform_like(
        self, values: Float[Tensor, "batch seq hidden"], document: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq hidden"]:
        raise AssertionError("a drafter that is not training asked for noise")
