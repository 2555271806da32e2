"""A conversation while it is answered, turn by turn, by any backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.core.chance import Purpose, SeededChance, draw_of
from drafttrain.data.prompts_to_answer import Question
from drafttrain.data.records import Message
from drafttrain.runtime.untrusted_input import Count


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

    def __init__(self, asked: Question, keep_answers: bool) -> None:
        self.asked = asked
        self.messages: list[Message] = []
        self.answers: list[dict[str, Any]] = []
        self.outcome: Outcome | None = None
        self.rest = list(asked.messages)
        if keep_answers:  # everything before the last user turn is kept
            self.messages, self.rest = self.rest[:-1], self.rest[-1:]
        self._ask()

    def _ask(self) -> None:
        while self.rest:
            message = self.rest.pop(0)
            self.messages.append(message)
            if message.role == "user":
                return

    @property
    def turn(self) -> int:
        return len(self.answers)

    def seed(self, seed: int) -> int:
        """Return the seed of the next answer; it depends on this conversation and turn alone."""
        draw = draw_of(0, Purpose.EMIT)
        return int(SeededChance(seed).uniforms([self.asked.index], [self.turn], draw)[0] * 2**31)

    def take(
        self, text: str, tokens: Sequence[int] | None, num_tokens: int, finished: bool
    ) -> None:
        """Add the next answer; after the last one, `outcome` is set."""
        if not text.strip():
            return self.stop("an empty answer", f"turn {self.turn + 1}", final=True)
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
