"""Validation without the target's model: how much of its stored law the drafter's covers."""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.losses import REJECTION, TokenLossConfig
from drafttrain.core.types import Sample
from drafttrain.data.batches import collate
from drafttrain.drafters.base import Drafter, TrainingChance
from drafttrain.target.store.features import StoredTarget
from drafttrain.training.engine.engine import Engine


class TeacherForced:
    """Reads held-out stored conversations as training does; every rank takes its share.

    alpha of a depth is E sum min(target_probs, draft_probs), given that all before was accepted:
    the rate at which sampling at temperature 1 accepts there. Tokens that a reduced vocabulary
    lacks count as rejected. The expected acceptance length adds up the products of alphas over the
    depths that training unrolls; it is of the conversations' own text, not of what the real decode
    loop would write, so the two are not to be compared.
    """

    metric = "val/expected_acceptance_length"

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
                "data.holdout must be at least 1 conversation where features.validate=false, got "
                "0: the best checkpoint is chosen by them"
            )
        self.source, self.engine, self.drafter = source, engine, engine.module
        self.held_out = list(held_out)[:num_conversations]
        self.micro_batch = micro_batch
        self.terms = self.drafter.depth_terms
        if not self.terms or not isinstance(self.drafter.config, TokenLossConfig):
            raise ValueError(
                f"features.validate must be true for drafter={self.drafter.config.name}: without "
                "the target a drafter is judged by its losses on tokens, of which this one names "
                "none (Drafter.depth_terms, and a configuration that is a TokenLossConfig)"
            )
        self.depth = len(self.terms)
        self.rows: list[list[float]] = []

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Return alpha of each depth and the acceptance length that they promise."""
        drafter = self.engine.copy_of_module().eval()
        assert isinstance(drafter, Drafter)
        drafter.config = dataclasses.replace(drafter.config, losses=REJECTION)  # type: ignore[call-arg]
        sums = torch.zeros(len(self.terms), 2, dtype=torch.float64, device=self.engine.device)
        mine = self.held_out[self.engine.rank :: self.engine.world_size]
        for first in range(0, len(mine), self.micro_batch):
            batch = collate(mine[first : first + self.micro_batch])
            features = self.source.features(batch, drafter.captures)
            with self.engine.precision:
                losses = drafter(batch.to(self.engine.device), features, NoChance())
            for depth, name in enumerate(self.terms):
                sums[depth, 0] += losses[name].count - losses[name].sum
                sums[depth, 1] += losses[name].count
        table = self.engine.sum_over_ranks(sums).tolist()
        metrics, expected, so_far = {}, 1.0, 1.0
        self.rows = []
        for depth, (overlap, count) in enumerate(table, start=1):
            alpha = overlap / max(count, 1)
            so_far *= alpha
            expected += so_far
            metrics[f"val/alpha_{depth}"] = alpha
            self.rows.append([float(depth), alpha, count])
        return {self.metric: expected, **metrics}

    def table(self) -> tuple[list[str], list[list[float]]]:
        """Return columns and rows of the last validation: one row a depth."""
        return ["depth", "alpha", "positions"], self.rows


class NoChance(TrainingChance):
    """Validation draws nothing."""

    def uniform_like(
        self, values: Float[Tensor, "batch seq hidden"], document: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Refuse."""
        raise AssertionError("a drafter that is not training asked for noise")
