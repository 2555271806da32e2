"""Validation while training: acceptance in the real decode loop, on held-out conversations."""

from collections.abc import Sequence

import torch

from drafttrain.chance import SeededChance
from drafttrain.data.chat import prompt_of
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.engine import Engine
from drafttrain.stopping import StopRequest
from drafttrain.target.target import Target
from drafttrain.types import GREEDY, Counters, Sample


class Validation:
    """Decodes the first prompt of held-out conversations greedily; every rank takes its share."""

    metric = "val/acceptance_length"

    def __init__(
        self,
        target: Target,
        engine: Engine,
        held_out: Sequence[Sample],
        *,
        num_prompts: int,
        depth: int,
        max_new_tokens: int,
        draft_dtype: torch.dtype,
        stop: StopRequest,
    ) -> None:
        assert isinstance(engine.module, Drafter)
        self.target, self.engine, self.drafter = target, engine, engine.module
        deepest = self.drafter.capabilities.max_depth
        self.depth = depth if deepest is None else min(depth, deepest)
        self.max_new_tokens = max_new_tokens
        self.draft_dtype = draft_dtype
        self.stop = stop
        room = target.spec.max_positions - max_new_tokens - self.depth
        prompts = [(sample.index, prompt_of(sample)) for sample in held_out]
        self.prompts = [(i, prompt) for i, prompt in prompts if len(prompt) <= room][:num_prompts]
        if not self.prompts:
            raise ValueError(
                "trainer.validation_prompts: none of the held-out conversations has a prompt that "
                f"leaves room for {max_new_tokens} new tokens; raise data.holdout or lower "
                "trainer.validation_tokens"
            )
        self.rows: list[tuple[int, Counters]] = []

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Return acceptance metrics over all ranks' prompts; none if a rank was asked to stop."""
        drafter = self.engine.copy_of_module().to(self.draft_dtype).eval()
        assert isinstance(drafter, Drafter)
        self.rows = []
        given_up = False
        for index, prompt in self.prompts[self.engine.rank :: self.engine.world_size]:
            if self.stop.asked:  # a scheduler waits half a minute, a validation may take several
                given_up = True
                break
            decoded = speculative_decode(
                self.target,
                drafter,
                prompt,
                depth=self.depth,
                sampling=GREEDY,
                max_new_tokens=self.max_new_tokens,
                chance=SeededChance(0),
            )
            self.rows.append((index, decoded.stats.trimmed))
        total = sum((counters for _, counters in self.rows), Counters())
        by_position = torch.zeros(self.depth, dtype=torch.float64)
        accepted = total.num_accepted_tokens_per_position
        by_position[: len(accepted)] = torch.tensor(accepted, dtype=torch.float64)
        first = torch.tensor([float(given_up), float(total.num_drafts)]).double()
        counts = torch.cat([first, by_position])
        ranks_given_up, drafts, *positions = self.engine.sum_over_ranks(counts).tolist()
        if ranks_given_up:
            return {}
        drafts = max(drafts, 1.0)
        metrics = {"val/acceptance_length": 1 + sum(positions) / drafts}
        for position, count in enumerate(positions, start=1):
            metrics[f"val/acceptance_position_{position}"] = count / drafts
        return metrics

    def table(self) -> tuple[list[str], list[list[float]]]:
        """Return columns and rows of this rank's prompts at the last validation."""
        columns = ["conversation", "num_drafts", "num_accepted_tokens", "acceptance_length"]
        rows: list[list[float]] = []
        for index, counters in self.rows:
            drafts, accepted = counters.num_drafts, counters.num_accepted_tokens
            length = 1 + accepted / max(drafts, 1)
            rows.append([float(index), float(drafts), float(accepted), length])
        return columns, rows
