"""Prompts x methods: the decode loops, interleaved and timed, and the losslessness check."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.chance import SeededChance
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.prompts import Prompt
from drafttrain.data.records import Message
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import check_depth, rule_of, speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.report import LosslessCheck
from drafttrain.target.target import Target
from drafttrain.terminal import progress
from drafttrain.types import GREEDY, Decoded, PromptResult, Sampling

PLAIN = "autoregressive"


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Which prompts, how they are decoded, and how carefully that is measured."""

    name: str
    prompts: str | None
    prompts_per_task: int | None
    depth: int
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    blocks: int
    repeats: int
    lossless_prompts: int
    resamples: int

    def __post_init__(self) -> None:
        try:
            Sampling(self.temperature, self.top_k, self.top_p)
        except ValueError as error:
            raise ValueError(f"eval.{error}") from None
        for key in ("depth", "max_new_tokens", "blocks"):
            if getattr(self, key) < 1:
                raise ValueError(f"eval.{key} must be at least 1, got {getattr(self, key)}")
        if not 1 <= self.repeats <= self.blocks:
            raise ValueError(
                f"eval.repeats must be in 1..eval.blocks ({self.blocks}), got {self.repeats}"
            )
        if self.prompts_per_task is not None and self.prompts_per_task < 1:
            raise ValueError(
                f"eval.prompts_per_task must be at least 1 or null, got {self.prompts_per_task}"
            )
        if self.lossless_prompts < 0:
            raise ValueError(
                f"eval.lossless_prompts must be at least 0, got {self.lossless_prompts}"
            )
        if self.resamples < 100:
            raise ValueError(f"eval.resamples must be at least 100, got {self.resamples}")

    @property
    def sampling(self) -> Sampling:
        """How target and drafter turn logits into probabilities."""
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Turn:
    """One prompt turn as tokens: the conversation so far and what opens the answer."""

    prompt: Prompt
    turn: int
    tokens: list[int]


Decode = Callable[[Sequence[int], int], Decoded]  # tokens, row -> output


def check_settings(
    prompts: Sequence[Prompt],
    target: Target,
    drafter: Drafter,
    template: str,
    config: EvalConfig,
) -> None:
    """Refuse, before anything is decoded, a depth or a prompt that cannot be.

    The drafter may not be able to draft as deep, the target's context may be too short.
    """
    try:
        check_depth(drafter, config.depth)
    except ValueError as error:
        raise ValueError(f"eval.{error}") from None
    room = target.spec.max_positions - config.max_new_tokens - config.depth
    for prompt in prompts:
        # Later turns carry the answers before them, each at its longest.
        tokens = first_turn(prompt, target, template)
        needed = len(tokens) + sum(
            len(target.tokenizer(turn)["input_ids"]) + config.max_new_tokens + 16
            for turn in prompt.turns[1:]
        )
        if needed > room:
            raise ValueError(
                f"eval.prompts: {prompt.id} may need {needed} tokens before its last answer, but "
                f"{target.spec.name} has {target.spec.max_positions} positions and "
                f"eval.max_new_tokens={config.max_new_tokens}, eval.depth={config.depth} leave "
                f"{room}; shorten the prompt or lower eval.max_new_tokens"
            )


def first_turn(prompt: Prompt, target: Target, template: str) -> list[int]:
    """Return the tokens of a prompt's first turn."""
    return prompt_tokens([Message("user", prompt.turns[0])], target.tokenizer, template)


def methods_of(
    target: Target, drafters: Mapping[str, Drafter], config: EvalConfig, seed: int
) -> dict[str, Decode]:
    """Return the plain loop and the speculative one with each drafter, ready to be called."""
    chance = SeededChance(seed)
    settings: dict[str, Any] = {
        "sampling": config.sampling,
        "max_new_tokens": config.max_new_tokens,
        "chance": chance,
    }

    def plain(tokens: Sequence[int], row: int) -> Decoded:
        return autoregressive_decode(target, tokens, row=row, **settings)

    def speculative(drafter: Drafter) -> Decode:
        return lambda tokens, row: speculative_decode(
            target, drafter, tokens, depth=config.depth, row=row, **settings
        )

    return {PLAIN: plain, **{name: speculative(drafter) for name, drafter in drafters.items()}}


def measure(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    template: str,
    config: EvalConfig,
    seed: int,
    show: bool = True,
) -> list[PromptResult]:
    """Decode every turn of every prompt by every method; return one result each.

    The prompts are dealt into `config.blocks` blocks, each into `config.repeats` of them. Within a
    block each turn goes through all methods one after the other, in an order that rotates, so that
    a change in the machine's speed meets all of them. Later turns follow the plain loop's answers,
    the same for every method.
    """
    methods = methods_of(target, drafters, config, seed)
    names = list(methods)
    for name in names:  # first calls pay for allocations that later ones do not
        methods[name](first_turn(prompts[0], target, template)[:64], 0)
    results: list[PromptResult] = []
    total = sum(len(prompt.turns) for prompt in prompts) * config.repeats
    gc.collect()
    gc.disable()  # a collection inside a timed cycle would be charged to one method
    try:
        with progress("evaluate", total, show=show) as tick:
            for block in range(config.blocks):
                for place, prompt in enumerate(prompts):
                    if (block - place) % config.blocks >= config.repeats:
                        continue
                    messages: list[Message] = []
                    for turn, text in enumerate(prompt.turns):
                        messages.append(Message("user", text))
                        tokens = prompt_tokens(messages, target.tokenizer, template)
                        shift = len(results) // len(names) % len(names)
                        outputs = {
                            name: methods[name](tokens, place)
                            for name in names[shift:] + names[:shift]
                        }
                        for name in names:
                            decoded = outputs[name]
                            results.append(
                                PromptResult(
                                    prompt.id,
                                    turn,
                                    prompt.task,
                                    name,
                                    block,
                                    len(tokens),
                                    decoded.tokens,
                                    decoded.stats,
                                )
                            )
                        answer = target.tokenizer.decode(
                            outputs[PLAIN].tokens, skip_special_tokens=True
                        )
                        messages.append(Message("assistant", answer))
                        tick(1)
                gc.collect()
    finally:
        gc.enable()
    return results


def check_lossless(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    template: str,
    config: EvalConfig,
    show: bool = True,
) -> LosslessCheck:
    """Compare greedy speculative output with the plain loop's, token for token.

    Takes the first turns of `config.lossless_prompts` prompts, spread over the tasks. `target` and
    `drafter` are best in float32: in narrower types a tie can fall either way.
    """
    chosen = spread(prompts, config.lossless_prompts)
    chance = SeededChance(0)
    divergences = []
    with progress("losslessness", len(chosen), show=show) as tick:
        for prompt in chosen:
            tokens = first_turn(prompt, target, template)
            plain = autoregressive_decode(
                target, tokens, sampling=GREEDY, max_new_tokens=config.max_new_tokens, chance=chance
            )
            drafted = speculative_decode(
                target,
                drafter,
                tokens,
                depth=config.depth,
                sampling=GREEDY,
                max_new_tokens=config.max_new_tokens,
                chance=chance,
            )
            if plain.tokens != drafted.tokens:
                divergences.append(
                    {"prompt": prompt.id, "position": first_difference(plain, drafted)}
                )
            tick(1)
    return LosslessCheck(
        rule=rule_of(config.sampling),
        lossless=True,
        dtype=str(target.dtype).removeprefix("torch."),
        greedy_identical=len(chosen) - len(divergences),
        greedy_total=len(chosen),
        divergences=divergences,
    )


def first_difference(one: Decoded, other: Decoded) -> int:
    """Return the first position where two outputs differ."""
    for position, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            return position
    return min(len(one.tokens), len(other.tokens))


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Choose `count` prompts, one task after the other."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    longest = max((len(group) for group in by_task.values()), default=0)
    ordered = [g[i] for i in range(longest) for g in by_task.values() if i < len(g)]
    return ordered[:count]
