"""A conversation while it is answered, turn by turn; the backends whose prompts are token ids."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from drafttrain.core.chance import Purpose, SeededChance, draw_of
from drafttrain.core.types import TargetSpec
from drafttrain.data.chat import answer_turn, prompt_tokens
from drafttrain.data.conversations import Conversation
from drafttrain.data.records import Message, Unusable
from drafttrain.data.template import Template
from drafttrain.runtime.untrusted_input import Count
from drafttrain.target.answers.config import RegenerateSettings
from drafttrain.target.model import Target
from drafttrain.target.vllm.engine import VllmEngine


@dataclass(frozen=True)
class AnsweredConversation:
    index: Count
    messages: list[dict[str, Any]]
    answers: list[dict[str, Any]]  # each: its tokens if known, their number, whether it finished
    cut: str | None  # why the last turns were left out
    source: str
    digest: str

    @property
    def num_tokens(self) -> int:
        return sum(answer["num_tokens"] for answer in self.answers)


@dataclass(frozen=True)
class Failure:
    """A conversation without any answer; unless `final`, the next run asks it again."""

    index: Count
    reason: str
    detail: str
    final: bool
    source: str
    digest: str


Outcome = AnsweredConversation | Failure


class Dialogue:
    """One conversation: what is asked next, and its outcome so far."""

    def __init__(self, asked: Conversation) -> None:
        self.asked = asked
        self.messages: list[Message] = []
        self.answers: list[dict[str, Any]] = []
        self.outcome: Outcome | None = None
        self.rest = list(asked.messages)
        self._ask()

    def _ask(self) -> None:
        """Add the turns up to the next user turn that has no answer yet."""
        while self.rest:
            message = self.rest.pop(0)
            self.messages.append(message)
            answered = bool(self.rest) and self.rest[0].role == "assistant"
            if message.role == "user" and not answered:
                return

    def seed(self, seed: int) -> int:
        """Return the seed of the next answer; it depends on this conversation and turn alone."""
        where = [self.asked.index], [len(self.answers)], draw_of(0, Purpose.EMIT)
        return int(SeededChance(seed).uniforms(*where)[0] * 2**31)

    def take(
        self, text: str, tokens: Sequence[int] | None, num_tokens: int, finished: bool
    ) -> None:
        """Add the next answer; after the last one, `outcome` is set."""
        if not text.strip():
            return self.stop("an empty answer", f"turn {len(self.answers) + 1}", final=True)
        self.messages.append(Message("assistant", text))
        answer = {"num_tokens": num_tokens, "finished": finished}
        self.answers.append(answer if tokens is None else {"tokens": list(tokens), **answer})
        if self.rest:
            self._ask()
        else:
            self._end(None)

    def stop(self, reason: str, detail: str, final: bool) -> None:
        """End early, with the turns answered so far if there are any and `final` is set.

        final: asking again would give the same result.
        """
        asked = self.asked
        if self.answers and final:
            self.messages.pop()  # the turn without an answer
            self._end(f"{reason} ({detail})" if detail else reason)
        else:
            self.outcome = Failure(asked.index, reason, detail, final, asked.source, asked.digest)

    def _end(self, cut: str | None) -> None:
        asked = self.asked
        messages = [
            {"role": turn.role, "content": turn.content} | ({} if turn.trained else {"weight": 0})
            for turn in self.messages
        ]
        self.outcome = AnsweredConversation(
            asked.index, messages, self.answers, cut, asked.source, asked.digest
        )


@dataclass(frozen=True)
class ChatTokens:
    """How the turns of a dialogue become tokens of a target, and its answers turns."""

    config: RegenerateSettings
    template: Template
    tokenizer: Any
    spec: TargetSpec
    room: int  # tokens of a prompt and its answer together

    def next_prompt(self, dialogue: Dialogue) -> list[int] | None:
        """Return the tokens of the next prompt; None if the conversation has ended."""
        if dialogue.outcome is not None:
            return None
        try:
            prompt = prompt_tokens(dialogue.messages, self.tokenizer, self.template)
        except Unusable as error:
            dialogue.stop(error.reason, error.detail, final=True)
            return None
        limit, largest = self.config.max_new_tokens, max(prompt, default=0)
        if largest >= self.spec.vocab_size:
            why = f"a token beyond the {self.spec.vocab_size:,} of the model"
            dialogue.stop(why, f"token {largest:,}", final=True)
        elif len(prompt) + limit > self.room:
            why = f"prompt and answer do not fit {self.room} tokens"
            dialogue.stop(why, f"{len(prompt)} + {limit}", final=True)
        return None if dialogue.outcome is not None else prompt

    def take(self, dialogue: Dialogue, tokens: Sequence[int]) -> None:
        """Add an answer given as tokens; what marks turns is not part of its text."""
        if (largest := max(tokens, default=0)) >= self.spec.vocab_size:
            why = f"answered with a token beyond the {self.spec.vocab_size:,} of the model"
            return dialogue.stop(why, f"token {largest:,}", final=True)
        finished = bool(tokens) and tokens[-1] in self.spec.eos_token_ids
        written = tokens[:-1] if finished else tokens
        turn = answer_turn(dialogue.messages, written, self.tokenizer, self.template)
        dialogue.take(turn.content, tokens, len(tokens), finished)


def by_transformers(
    asked: Sequence[Conversation],
    target: Target,
    chat: ChatTokens,
    decode: Callable[..., Sequence[Any]],
) -> Iterator[list[Outcome]]:
    """Yield outcomes, a batch at a time; a conversation's tokens do not depend on its batch.

    Rounding is the exception: of two almost equally likely tokens, another batch may choose the
    other. decode: the plain loop on a batch.
    """
    config = chat.config
    # Prompts of similar length share a batch: less padding.
    by_length = sorted(asked, key=lambda one: sum(len(turn.content) for turn in one.messages))
    for first in range(0, len(asked), config.batch_size):
        dialogues = [Dialogue(one) for one in by_length[first : first + config.batch_size]]
        while True:
            prompts = {each: chat.next_prompt(each) for each in dialogues}
            open_ones = {each: prompt for each, prompt in prompts.items() if prompt is not None}
            if not open_ones:
                break
            decoded = decode(
                target,
                list(open_ones.values()),
                sampling=config.sampling,
                max_new_tokens=config.max_new_tokens,
                chance=SeededChance(config.seed),
                rows=[dialogue.asked.index for dialogue in open_ones],
            )
            for dialogue, answer in zip(open_ones, decoded, strict=True):
                chat.take(dialogue, answer.tokens)
        yield [dialogue.outcome for dialogue in dialogues if dialogue.outcome is not None]


def by_vllm(
    asked: Sequence[Conversation], engine: VllmEngine, chat: ChatTokens, in_flight: int
) -> Iterator[list[Outcome]]:
    """Yield outcomes as the engine finishes them, with `in_flight` conversations at a time.

    Every conversation and turn is sampled with its own seed; whether the tokens are the same in
    another batch depends on vLLM's kernels.
    """
    config, rest = chat.config, iter(asked)
    waiting: dict[int, Dialogue] = {}
    ready: list[Dialogue] = []  # for their next turn
    while True:
        ready += map(Dialogue, islice(rest, in_flight - len(waiting) - len(ready)))
        if not ready and not waiting:
            return
        for dialogue in ready:
            prompt = chat.next_prompt(dialogue)
            if prompt is not None:
                waiting[dialogue.asked.index] = dialogue
                engine.submit(
                    dialogue.asked.index,
                    prompt,
                    sampling=config.sampling,
                    max_new_tokens=config.max_new_tokens,
                    seed=dialogue.seed(config.seed),
                    stop_tokens=chat.spec.eos_token_ids,
                )
        yield [dialogue.outcome for dialogue in ready if dialogue.outcome is not None]
        ready = []
        if waiting:
            answer = engine.next_answer()
            dialogue = waiting.pop(answer.name)
            ready.append(dialogue)
            if answer.refused is not None:
                dialogue.stop("refused by vLLM", answer.refused, final=True)
            else:
                chat.take(dialogue, answer.tokens)
