"""Validation while training: acceptance in the real decode loop, and what it says of the rest."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Counters, Decoded, Sample
from drafttrain.data.chat import prompt_of, prompt_tokens
from drafttrain.data.evaluation_prompts import read_prompts
from drafttrain.data.records import Message
from drafttrain.data.template import Template
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode, speculative_passes
from drafttrain.decode.rows import context_of
from drafttrain.drafters.base import LOOKUP, Drafter
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import Tell, console, silently
from drafttrain.target.model import Target
from drafttrain.training.engine.engine import Engine
from drafttrain.training.loop import ERROR, METRIC

TOGETHER = 16  # prompts decoded in one batch
LOOKUP_LENGTH = f"val/{LOOKUP}_acceptance_length"  # of prompt lookup, on the same answers
BREAK_EVEN = "perf/break_even"  # the acceptance length from which speculation pays here
TIMED, ROUNDS = 8, 4  # new tokens, and how often they are decoded, to time passes
TEXTS = {
    METRIC: "acceptance length {:.2f}",
    f"{METRIC}{ERROR}": "standard error {:.2f}",
    BREAK_EVEN: "speculation pays here from {:.2f}",
    LOOKUP_LENGTH: "prompt lookup has {:.2f} where it finds a match",
}
# The share of its gain over 1 that a drafter lacks for each e-fold of fewer steps: EAGLE of a chat
# model 0.21 to 0.30, of the embedded target 0.21 to 0.24.
GROWTH = (0.15, 0.27)
MEMORISED = 0.1  # more first tokens right in training than in validation: some are known by heart


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
        lookup: Callable[[Sequence[int], Sequence[int], int], Counters] | None = None,
    ) -> None:
        """lookup: returns the counts of prompt lookup, from a prompt, its answer and the depth."""
        assert isinstance(engine.module, Drafter)
        self.target, self.engine, self.drafter = target, engine, engine.module
        deepest = self.drafter.max_depth
        self.depth = depth if deepest is None else min(depth, deepest)
        self.max_new_tokens = max_new_tokens
        self.draft_dtype = draft_dtype
        self.stop, self.lookup = stop, lookup
        self.break_even: float | None = None  # once it is measured
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
        drafter, ranks = self._copied(), self.engine.ranks
        own: list[tuple[int, dict[str, Any]]] = []
        given_up, copied = False, Counters()
        with self.target.in_step():
            mine = self.prompts[ranks.rank :: ranks.world_size]
            for first in range(0, len(mine), TOGETHER):
                tell(f"validating {first}/{len(mine)}")
                batch = mine[first : first + TOGETHER]
                decoded = self._decode(drafter, batch)
                if decoded is None:
                    given_up = True
                    break
                for prompt, each in zip(batch, decoded, strict=True):
                    own.append((prompt.index, vars(each.stats.trimmed)))
                    if self.lookup is not None:
                        copied += self.lookup(prompt.tokens, each.tokens, self.depth)
        found = ranks.gather_objects((given_up, own, vars(copied)))
        if any(rank_given_up for rank_given_up, *_ in found):
            return None
        rows = {index: Counters(**counted) for _, rank, _ in found for index, counted in rank}
        copied = sum((Counters(**counted) for *_, counted in found), Counters())
        self.rows = [(prompt.index, rows[prompt.index]) for prompt in self.prompts]
        none = Counters(num_accepted_tokens_per_position=[0] * self.depth)
        total = sum((counters for _, counters in self.rows), none)
        drafts = max(total.num_drafts, 1)
        length = total.acceptance_length or 1.0
        off = [counters.yielded - length * counters.num_drafts for _, counters in self.rows]
        metrics = {self.metric: length}
        if len(off) > 1:  # the standard error of a ratio of sums over prompts
            variance = sum(value**2 for value in off) * len(off) / (len(off) - 1)
            metrics[f"{self.metric}{ERROR}"] = math.sqrt(variance) / drafts
        beside = {LOOKUP_LENGTH: copied.acceptance_length, BREAK_EVEN: self.break_even}
        metrics |= {name: value for name, value in beside.items() if value is not None}
        for position, count in enumerate(total.num_accepted_tokens_per_position, start=1):
            metrics[f"val/acceptance_position_{position}"] = count / drafts
        for task in dict.fromkeys(prompt.task for prompt in self.prompts if prompt.task):
            of = (rows[prompt.index] for prompt in self.prompts if prompt.task == task)
            metrics[f"{self.metric}/{task}"] = sum(of, Counters()).acceptance_length or 1.0
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

    def _copied(self) -> Drafter:
        return cast(Drafter, self.engine.copy_of_module()).eval().to(self.draft_dtype)

    @torch.no_grad()
    def measure_break_even(self) -> float | None:
        """Return the acceptance length from which speculation pays here, for one prompt at a time.

        The time of drafting and verifying over that of a plain pass: medians over a few tokens of
        the prompt of middle length. None if trainer.validation_tokens=1 leaves no pass to time.
        """
        drafter, plain, cycles = self._copied(), list[float](), list[float]()
        tokens = sorted([prompt.tokens for prompt in self.prompts], key=len)[len(self.prompts) // 2]
        asked: Any = {"sampling": GREEDY, "chance": SeededChance(0), "stop_tokens": ()}
        asked |= {"max_new_tokens": min(TIMED, self.max_new_tokens)}
        with self.target.in_step():
            for _ in range(ROUNDS * self.engine.is_main):  # in turns, as speed may drift
                one = autoregressive_decode(self.target, tokens, **asked)
                other = speculative_decode(self.target, drafter, tokens, policy=self.depth, **asked)
                plain += [verify for *_, verify, _ in one.stats.passes]
                cycles += [draft + verify for *_, draft, verify, _ in other.stats.passes]
        pays = median(cycles) / median(plain) if plain and cycles else None
        self.break_even = self.engine.ranks.broadcast_object(pays)
        return self.break_even

    def table(self) -> tuple[list[str], list[list[float]]]:
        """Return columns and rows of all prompts in the last validation, the same on every rank."""
        columns = ["conversation", "num_drafts", "num_accepted_tokens", "acceptance_length"]
        return columns, [
            [*map(float, (at, of.num_drafts, of.num_accepted_tokens, of.acceptance_length or 1))]
            for at, of in self.rows
        ]


def forecast(steps: int, tokens: int, terms: Sequence[str], say: Tell) -> Callable[..., None]:
    """Return what reads a run's metrics as they are logged, and explains each validation.

    tokens: of the data. terms: the losses of the drafted tokens, in their order.
    """
    right = math.nan  # of first drafted tokens, in training

    def read(step: int, values: Mapping[str, float]) -> None:
        nonlocal right
        right = values.get(f"train/accuracy_{(*terms, '')[0]}", right)
        if METRIC not in values:
            return
        length, pays = values[METRIC], values.get(BREAK_EVEN, math.nan)
        parts = [text.format(values[name]) for name, text in TEXTS.items() if name in values]
        say(f"validation after step {step:,}: {', '.join(parts)}")
        if steps // 10 <= step < steps:
            ahead = math.log(steps / step)
            most = 1 + sum(name.startswith("val/acceptance_position_") for name in values)
            low, high = (min(most, 1 + (length - 1) / (1 - each * ahead)) for each in GROWTH)
            verdict = "pays" if low > pays else "does not pay" if high < pays else "may pay"
            say(f"  at this rate {low:.1f} to {high:.1f} at the end, which {verdict} here")
        reached = values.get("val/acceptance_position_1", math.nan)
        if right - reached > MEMORISED:
            say(
                f"  first tokens right: {right:.2f} in training, {reached:.2f} here: the drafter "
                f"memorises the {tokens:,} tokens; more text helps more than more steps"
            )

    return read
