"""From prompts to answers on the disk: the same for every backend."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from drafttrain.data.prompts_to_answer import Question
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import progress
from drafttrain.target.answers.answers_file import Answers
from drafttrain.target.answers.dialogue import AnsweredConversation, Outcome

Backend = Callable[[Sequence[Question]], Iterator[list[Outcome]]]


@dataclass(frozen=True)
class Work:
    """What a run of `regenerate` did."""

    num_answered: int
    num_tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Answered tokens per second."""
        return self.num_tokens / max(self.seconds, 1e-9)


def regenerate(
    asked: Sequence[Question],
    answers: Answers,
    backend: Backend,
    stop: StopRequest,
    show: bool = True,
) -> Work:
    """Have every conversation answered that is not yet, and leave the answers in input order.

    Outcomes are on the disk before the next are awaited: a run that is killed goes on from them.
    Raises Stopped where `stop` was asked.
    """
    missing = answers.missing(asked)
    began, num_answered, num_tokens = time.monotonic(), 0, 0
    done = len(asked) - len(missing)
    with progress("regenerate", len(asked), done, show and bool(missing)) as tick:
        for outcomes in backend(missing) if missing else ():
            answers.add(outcomes)
            rows = [outcome for outcome in outcomes if isinstance(outcome, AnsweredConversation)]
            num_answered += len(rows)
            num_tokens += sum(row.num_tokens for row in rows)
            if outcomes:
                speed = num_tokens / max(time.monotonic() - began, 1e-9)
                tick(len(outcomes), f"{speed:,.0f} tokens/s")
            stop.obey()
    answers.finish()
    return Work(num_answered, num_tokens, time.monotonic() - began)
