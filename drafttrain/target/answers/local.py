"""Answers from a target that runs in this process or in a vLLM engine; prompts are token ids."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drafttrain.core.chance import SeededChance
from drafttrain.core.tokenizer import text_of
from drafttrain.core.types import TargetSpec
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.prompts_to_answer import LAST, Question
from drafttrain.data.records import Unusable
from drafttrain.data.template import Template
from drafttrain.target.answers.config import RegenerateSettings
from drafttrain.target.answers.dialogue import Dialogue, Outcome
from drafttrain.target.model import Target
from drafttrain.target.vllm.engine import VllmEngine


def by_transformers(
    target: Target,
    asked: Sequence[Question],
    config: RegenerateSettings,
    template: Template,
    room: int,
    decode: Callable[..., Sequence[Any]],
) -> Iterator[list[Outcome]]:
    """Yield outcomes, a batch at a time; a conversation's tokens do not depend on its batch.

    Rounding is the exception: of two almost equally likely tokens, another batch may choose the
    other. room: tokens of a prompt and its answer together. decode: the plain loop on a batch.
    """
    chance, spec = SeededChance(config.seed), target.spec
    # Prompts of similar length share a batch: less padding.
    by_length = sorted(asked, key=lambda one: sum(len(turn.content) for turn in one.messages))
    for first in range(0, len(asked), config.batch_size):
        batch = by_length[first : first + config.batch_size]
        dialogues = [Dialogue(one, config.turns == LAST) for one in batch]
        while True:
            prompts = {}
            for place, dialogue in enumerate(dialogues):
                prompt = next_prompt(dialogue, target.tokenizer, config, template, room, spec)
                if prompt is not None:
                    prompts[place] = prompt
            if not prompts:
                break
            decoded = decode(
                target,
                list(prompts.values()),
                sampling=config.sampling,
                max_new_tokens=config.max_new_tokens,
                chance=chance,
                rows=[dialogues[place].asked.index for place in prompts],
            )
            for place, answer in zip(prompts, decoded, strict=True):
                take_tokens(dialogues[place], answer.tokens, spec, target.tokenizer)
        yield [dialogue.outcome for dialogue in dialogues if dialogue.outcome is not None]


def by_vllm(
    engine: VllmEngine,
    spec: TargetSpec,
    tokenizer: Any,
    asked: Sequence[Question],
    config: RegenerateSettings,
    template: Template,
    room: int,
    in_flight: int,
) -> Iterator[list[Outcome]]:
    """Yield outcomes as the engine finishes them, with `in_flight` conversations at a time.

    Every conversation and turn is sampled with its own seed; whether the tokens are the same in
    another batch depends on vLLM's kernels.
    """
    waiting: dict[int, Dialogue] = {}
    rest = iter(asked)

    def hand_in(dialogue: Dialogue) -> list[Outcome]:
        """Submit the next turn; return the outcome of a conversation that has no turn left."""
        prompt = next_prompt(dialogue, tokenizer, config, template, room, spec)
        if prompt is None:
            return [] if dialogue.outcome is None else [dialogue.outcome]
        waiting[dialogue.asked.index] = dialogue
        engine.submit(
            dialogue.asked.index,
            prompt,
            sampling=config.sampling,
            max_new_tokens=config.max_new_tokens,
            seed=dialogue.seed(config.seed),
            stop_tokens=spec.eos_token_ids,
        )
        return []

    while True:
        ended: list[Outcome] = []
        while len(waiting) < in_flight and (one := next(rest, None)) is not None:
            ended += hand_in(Dialogue(one, config.turns == LAST))
        if waiting:
            answer = engine.next_answer()
            dialogue = waiting.pop(answer.name)
            if answer.refused is not None:
                dialogue.stop("refused by vLLM", answer.refused, final=True)
            else:
                take_tokens(dialogue, answer.tokens, spec, tokenizer)
            ended += hand_in(dialogue)
        yield ended
        if not waiting:
            return


def next_prompt(
    dialogue: Dialogue,
    tokenizer: Any,
    config: RegenerateSettings,
    template: Template,
    room: int,
    spec: TargetSpec,
) -> list[int] | None:
    """Return the tokens of the next prompt; None if the conversation has ended."""
    if dialogue.outcome is not None:
        return None
    try:
        prompt = prompt_tokens(dialogue.messages, tokenizer, template)
    except Unusable as error:
        dialogue.stop(error.reason, error.detail, final=True)
        return None
    if (largest := max(prompt, default=0)) >= spec.vocab_size:
        why = f"a token beyond the {spec.vocab_size:,} of the model"
        dialogue.stop(why, f"token {largest:,}", final=True)
        return None
    if len(prompt) + config.max_new_tokens > room:
        dialogue.stop(
            f"prompt and answer do not fit {room} tokens",
            f"{len(prompt)} + {config.max_new_tokens}",
            final=True,
        )
        return None
    return prompt


def take_tokens(
    dialogue: Dialogue, tokens: Sequence[int], spec: TargetSpec, tokenizer: Any
) -> None:
    """Add an answer given as tokens; the stop token is not part of its text."""
    if (largest := max(tokens, default=0)) >= spec.vocab_size:
        why = f"answered with a token beyond the {spec.vocab_size:,} of the model"
        return dialogue.stop(why, f"token {largest:,}", final=True)
    finished = bool(tokens) and tokens[-1] in spec.eos_token_ids
    answer = tokens[:-1] if finished else tokens
    # As an endpoint returns it: without the tokens that mark turns.
    text = text_of(tokenizer, answer, skip_special_tokens=True)
    dialogue.take(text, tokens, len(tokens), finished)
