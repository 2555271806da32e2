"""Validation while training: acceptance in the real decode loop, on held-out conversations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Counters, Decoded, Sample
from drafttrain.data.chat import prompt_of, prompt_tokens
from drafttrain.data.evaluation_prompts import read_prompts
from drafttrain.data.records import Message
from drafttrain.data.template import Template
from drafttrain.decode.loop import speculative_passes
from drafttrain.decode.rows import context_of
from drafttrain.drafters.base import Drafter
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import Tell, console, silently
from drafttrain.target.model import Target
from drafttrain.training.engine.engine import Engine
from drafttrain.training.loop import ERROR, METRIC

TOGETHER = 16  # prompts decoded in one batch


@dataclass(frozen=True)
class ValidationPrompt:
    """A prompt to decode: its index, its tokens, and its task where a file of prompts names one."""

    index: int
    tokens: list[int]
    task: str | None = None


def held_out_prompts(held_out: Sequence[Sample]) -> list[ValidationPrompt]:
    """Return the first prompt of each held-out conversation."""
    return [ValidationPrompt(sample.index, prompt_of(sample)) for sample in held_out]


def prompts_in(path: str, target: Target, template: Template) -> list[ValidationPrompt]:
    """Return the first turns of a file of prompts, as the target reads them; see read_prompts."""
    found, skipped = read_prompts(path, None, setting="trainer.validation_prompts")
    for line in skipped.lines():
        console.print(line)
    return [
        ValidationPrompt(
            index,
            prompt_tokens([Message("user", each.turns[0])], target.tokenizer, template),
            each.task,
        )
        for index, each in enumerate(found)
    ]


class Validation:
    """Decodes the first prompt of held-out conversations greedily; every rank takes its share."""

    metric = METRIC

    def __init__(
        self,
        target: Target,
        engine: Engine,
        prompts: Sequence[ValidationPrompt],
        *,
        most: int,
        depth: int,
        max_new_tokens: int,
        draft_dtype: torch.dtype,
        stop: StopRequest,
    ) -> None:
        assert isinstance(engine.module, Drafter)
        self.target, self.engine, self.drafter = target, engine, engine.module
        deepest = self.drafter.max_depth
        self.depth = depth if deepest is None else min(depth, deepest)
        self.max_new_tokens = max_new_tokens
        self.draft_dtype = draft_dtype
        self.stop = stop
        positions, who = context_of(target.spec, [self.drafter])
        room = positions - max_new_tokens - self.depth
        self.prompts = [prompt for prompt in prompts if len(prompt.tokens) <= room][:most]
        if not self.prompts:
            raise ValueError(
                "trainer.validation_prompts: none of the held-out conversations has a prompt that "
                f"leaves room for {max_new_tokens} new tokens in the {positions} positions of "
                f"{who}; raise data.holdout or lower trainer.validation_tokens"
            )
        # Acceptance lengths compare only where all of these are the same.
        self.yardstick = {"depth": self.depth, "prompts": most, "tokens": max_new_tokens}
        self.rows: list[tuple[int, Counters]] = []

    @torch.no_grad()
    def __call__(self, tell: Tell = silently) -> dict[str, float] | None:
        """Return acceptance metrics over all ranks' prompts; None if a rank was asked to stop."""
        drafter = self.engine.copy_of_module().eval()
        assert isinstance(drafter, Drafter)
        drafter.to(self.draft_dtype)
        ranks = self.engine.ranks
        own: list[tuple[int, dict[str, Any]]] = []
        given_up = False
        with self.target.in_step():
            mine = self.prompts[ranks.rank :: ranks.world_size]
            for first in range(0, len(mine), TOGETHER):
                tell(f"validating {first}/{len(mine)}")
                batch = mine[first : first + TOGETHER]
                decoded = self._decode(drafter, batch)
                if decoded is None:
                    given_up = True
                    break
                own += [
                    (prompt.index, vars(each.stats.trimmed))
                    for prompt, each in zip(batch, decoded, strict=True)
                ]
        found = ranks.gather_objects((given_up, own))
        if any(rank_given_up for rank_given_up, _ in found):
            return None
        rows = {index: Counters(**counted) for _, rank in found for index, counted in rank}
        self.rows = [(prompt.index, rows[prompt.index]) for prompt in self.prompts]
        total = sum((counters for _, counters in self.rows), Counters())
        accepted = total.num_accepted_tokens_per_position
        positions = [*accepted, *[0] * (self.depth - len(accepted))]
        drafts = max(total.num_drafts, 1)
        length = total.acceptance_length or 1.0
        off = [counters.yielded - length * counters.num_drafts for _, counters in self.rows]
        metrics = {self.metric: length}
        if len(off) > 1:  # the standard error of a ratio of sums over prompts
            variance = sum(value**2 for value in off) * len(off) / (len(off) - 1)
            metrics[f"{self.metric}{ERROR}"] = math.sqrt(variance) / drafts
        for position, count in enumerate(positions, start=1):
            metrics[f"val/acceptance_position_{position}"] = count / drafts
        by_task: dict[str, Counters] = {}
        for prompt in self.prompts:
            if prompt.task is not None:
                before = by_task.get(prompt.task, Counters())
                by_task[prompt.task] = before + rows[prompt.index]
        for task, counters in by_task.items():
            metrics[f"{self.metric}/{task}"] = counters.acceptance_length or 1.0
        return metrics

    @torch.inference_mode()
    def _decode(
        self, drafter: Drafter, batch: Sequence[ValidationPrompt]
    ) -> Sequence[Decoded] | None:
        """Return the decoded prompts; None as soon as the run was asked to stop.

        A scheduler waits half a minute, and a batch may take several.
        """
        passes = speculative_passes(
            self.target,
            drafter,
            [prompt.tokens for prompt in batch],
            policy=self.depth,
            sampling=GREEDY,
            max_new_tokens=self.max_new_tokens,
            chance=SeededChance(0),
            rows=[prompt.index for prompt in batch],
        )
        while not self.stop.asked:
            try:
                next(passes)
            except StopIteration as end:
                return end.value
        return None

    def table(self) -> tuple[list[str], list[list[float]]]:
        """Return columns and rows of all prompts in the last validation, the same on every rank."""
        columns = ["conversation", "num_drafts", "num_accepted_tokens", "acceptance_length"]
        rows: list[list[float]] = []
        for index, counters in self.rows:
            drafts, accepted = counters.num_drafts, counters.num_accepted_tokens
            length = counters.acceptance_length or 1.0
            rows.append([float(index), float(drafts), float(accepted), length])
        return columns, rows
