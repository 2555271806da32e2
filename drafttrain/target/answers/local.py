"""Answers by a target that runs here or in a vLLM engine: prompts are tokens, made by us."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drafttrain.core.chance import SeededChance
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

    But for rounding: where two tokens are nearly as likely, another batch may choose the other.
    room: tokens that a prompt and its answer may take together. decode: the plain loop on a batch.
    """
    chance = SeededChance(config.seed)
    # Prompts of like length are read together: less padding.
    by_length = sorted(asked, key=lambda one: sum(len(turn.content) for turn in one.messages))
    for first in range(0, len(asked), config.batch_size):
        batch = by_length[first : first + config.batch_size]
        dialogues = [Dialogue(one, config.turns == LAST) for one in batch]
        while True:
            prompts = {}
            for place, dialogue in enumerate(dialogues):
                prompt = next_prompt(dialogue, target.tokenizer, config, template, room)
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
                take_tokens(dialogues[place], answer.tokens, target.spec, target.tokenizer)
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
    """Yield outcomes as the engine ends them, with `in_flight` conversations handed in at a time.

    Sampled tokens have a seed of their own conversation and turn; whether they are the same in
    another batch is for vLLM's kernels to say.
    """
    waiting: dict[int, Dialogue] = {}
    rest = iter(asked)

    def hand_in(dialogue: Dialogue) -> list[Outcome]:
        """Ask for the next answer; return what has become of a conversation that needs none."""
        prompt = next_prompt(dialogue, tokenizer, config, template, room)
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
    dialogue: Dialogue, tokenizer: Any, config: RegenerateSettings, template: Template, room: int
) -> list[int] | None:
    """Return the tokens of what is asked next; None where there is an outcome instead."""
    if dialogue.outcome is not None:
        return None
    try:
        prompt = prompt_tokens(dialogue.messages, tokenizer, template)
    except Unusable as error:
        dialogue.stop(error.reason, error.detail, final=True)
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
    """Take in an answer as tokens; the one that ended it is not part of the text."""
    finished = bool(tokens) and tokens[-1] in spec.eos_token_ids
    said = tokens[:-1] if finished else tokens
    # As an endpoint gives it: what marks turns is not text.
    text = tokenizer.decode(list(said), skip_special_tokens=True)
    dialogue.take(text, tokens, len(tokens), finished)
