"""A conversation while it is answered, turn by turn; the backends whose prompts are token ids."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


class InFlight:
    """Conversations that are answered at the same time: their next prompts and their outcomes."""

    def __init__(self, asked: Sequence[Conversation], chat: ChatTokens) -> None:
        self.chat = chat
        self.waiting: dict[int, Dialogue] = {}  # for the answer to a prompt, by its name
        self._rest = map(Dialogue, asked)
        self._answered: list[Dialogue] = []  # since the last outcomes
        self._ready: list[Dialogue] = []  # for their next turn

    def more(self, count: int) -> list[tuple[int, list[int]]]:
        """Return up to `count` further prompts, each with its name; later turns come first."""
        prompts: list[tuple[int, list[int]]] = []
        while len(prompts) < count:
            dialogue = self._ready.pop(0) if self._ready else next(self._rest, None)
            if dialogue is None:
                break
            prompt = self.chat.next_prompt(dialogue)
            if prompt is None:
                self._answered.append(dialogue)
            else:
                self.waiting[dialogue.asked.index] = dialogue
                prompts.append((dialogue.asked.index, prompt))
        return prompts

    def take(self, name: int, tokens: Sequence[int], refused: str | None = None) -> None:
        """Take the answer to a prompt; refused: why there is none."""
        dialogue = self.waiting.pop(name)
        if refused is not None:
            dialogue.stop("refused by vLLM", refused, final=True)
        else:
            self.chat.take(dialogue, tokens)
        (self._ready if dialogue.outcome is None else self._answered).append(dialogue)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        new, self._answered = self._answered, []
        return [dialogue.outcome for dialogue in new if dialogue.outcome is not None]


def by_transformers(
    asked: Sequence[Conversation],
    target: Target,
    chat: ChatTokens,
    decode: Callable[..., Iterator[list[tuple[int, list[int]]]]],
) -> Iterator[list[Outcome]]:
    """Yield outcomes as conversations end; a conversation's tokens do not depend on its batch.

    Rounding is the exception: of two almost equally likely tokens, another batch may choose the
    other. decode: the plain loop on a queue of prompts.
    """
    config = chat.config
    # Prompts of similar length are prefilled together: less padding.
    by_length = sorted(asked, key=lambda one: sum(len(turn.content) for turn in one.messages))
    conversations = InFlight(by_length, chat)
    for answers in decode(
        target,
        conversations.more,
        sampling=config.sampling,
        max_new_tokens=config.max_new_tokens,
        chance=SeededChance(config.seed),
        batch_size=config.batch_size,
    ):
        for name, tokens in answers:
            conversations.take(name, tokens)
        if outcomes := conversations.outcomes():
            yield outcomes
    yield conversations.outcomes()


def by_vllm(
    asked: Sequence[Conversation], engine: VllmEngine, chat: ChatTokens, in_flight: int
) -> Iterator[list[Outcome]]:
    """Yield outcomes as the engine finishes them, with `in_flight` conversations at a time.

    Every conversation and turn is sampled with its own seed; whether the tokens are the same in
    another batch depends on vLLM's kernels.
    """
    config, conversations = chat.config, InFlight(asked, chat)
    while True:
        for name, prompt in conversations.more(in_flight - len(conversations.waiting)):
            engine.submit(
                name,
                prompt,
                sampling=config.sampling,
                max_new_tokens=config.max_new_tokens,
                seed=conversations.waiting[name].seed(config.seed),
                stop_tokens=chat.spec.eos_token_ids,
            )
        yield conversations.outcomes()
        if not conversations.waiting:
            return
        answer = engine.next_answer()
        conversations.take(answer.name, answer.tokens, answer.refused)
