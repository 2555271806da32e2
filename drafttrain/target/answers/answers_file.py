"""The answers file: a line is added as each conversation is answered, and sorted at the end."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from drafttrain.data.prompts_to_answer import Question
from drafttrain.data.skips import SkipReport
from drafttrain.runtime.disk import replacing, write_whole, writing
from drafttrain.runtime.journal import append_records, read_records, replace_records
from drafttrain.runtime.load import SpeedWatch
from drafttrain.runtime.lock import hold, of_answers
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import console, progress, silently
from drafttrain.runtime.untrusted_input import (
    Count,
    UntrustedError,
    read_object,
    shown,
    typed,
)
from drafttrain.target.answers.dialogue import AnsweredConversation, Failure, Outcome

FORMAT = 1
Kind = TypeVar("Kind")
Backend = Callable[[Sequence[Question]], Iterator[list[Outcome]]]


@dataclass(frozen=True)
class Answered:
    """What is kept in memory of an answered conversation; its line on disk has the rest."""

    index: Count
    source: str
    digest: str
    cut: str | None
    num_answers: Count = 0
    num_unfinished: Count = 0  # answers that reached the limit of new tokens


class Answers:
    """The answers on disk so far; a conversation whose answer was written is not asked again.

    Next to OUT.jsonl are OUT.settings.json, what the answers depend on, and OUT.failed.jsonl, the
    conversations without an answer. Use it in a `with` block: one process writes at a time, and a
    second writer gets HeldError.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out = out
        self.header = out.with_suffix(".settings.json")
        self.failed = out.with_suffix(".failed.jsonl")
        self.settings = {"format": FORMAT, **settings}
        self.rows: dict[int, Answered] = {}
        self.failures: dict[int, Failure] = {}
        self._open = ExitStack()

    def __enter__(self) -> "Answers":
        with ExitStack() as stack:
            lock = of_answers(self.out)
            key, command = "regenerate.out", "regenerate"
            stack.enter_context(hold(self.out, key, command, console.print, file=lock))
            self.check_settings()
            for file in (self.out, self.failed):
                append_records(file, [])  # fail before anything is asked
            self.rows = {row.index: kept(row) for row in load(self.out, AnsweredConversation)}
            failed = {failure.index: failure for failure in load(self.failed, Failure)}
            # A killed run leaves failures in the file that an earlier one of its answers mended.
            self.failures = {i: one for i, one in failed.items() if i not in self.rows}
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def check_settings(self) -> None:
        """Write the header, or refuse to add to answers that were made with other settings."""
        if not self.header.is_file():
            if self.out.is_file() and self.out.stat().st_size:
                raise ValueError(
                    f"regenerate.out must not name a file that `regenerate` did not write, got "
                    f"{self.out}, which has no {self.header.name} next to it; name another file"
                )
            write_whole(self.header, json.dumps(self.settings, indent=2) + "\n")
            return
        try:
            earlier = read_object(self.header)
        except UntrustedError as error:
            raise ValueError(f"{error}; it must be what `regenerate` wrote: remove it") from None
        for key in {**earlier, **self.settings}:
            before, now = earlier.get(key), self.settings.get(key)
            if before != now:
                name = shown(key)
                raise ValueError(
                    f"regenerate.out={self.out} was started with {name}={shown(before)} and would "
                    f"resume with {name}={shown(now)}; set it as it was, or name another file"
                )

    def missing(self, asked: Sequence[Question]) -> list[Question]:
        """Return the conversations still to be asked; ValueError if the prompts have changed."""
        known: dict[int, Answered | Failure] = {**self.failures, **self.rows}
        for index in sorted(known):
            found = known[index]
            if index >= len(asked) or found.digest != asked[index].digest:
                now = "no longer exists" if index >= len(asked) else "has changed"
                raise ValueError(
                    f"regenerate.out={self.out} answers conversation {index} of "
                    f"{shown(found.source)}, "
                    f"which {now}; give the prompts it was started with, or name another file"
                )
        done = {i for i, failure in self.failures.items() if failure.final} | set(self.rows)
        return [one for one in asked if one.index not in done]

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Write outcomes to disk; once this returns, they survive a loss of power."""
        for file, kind in ((self.out, AnsweredConversation), (self.failed, Failure)):
            records = [asdict(outcome) for outcome in outcomes if isinstance(outcome, kind)]
            if records:
                append_records(file, records)
        for outcome in outcomes:
            if isinstance(outcome, AnsweredConversation):
                self.rows[outcome.index] = kept(outcome)
                self.failures.pop(outcome.index, None)
            else:
                self.failures[outcome.index] = outcome

    def finish(self) -> None:
        """Sort the lines into input order, atomically; the same answers give the same bytes."""
        with (
            writing(self.out),
            replacing(self.out) as beside,
            self.out.open("rb") as unsorted,
            beside.open("wb") as file,
        ):
            place, places = 0, {}  # of each line: together they may be larger than memory
            for line in unsorted:
                if line.endswith(b"\n"):
                    places[typed(Answered, line, shown(self.out, 400)).index] = place
                place += len(line)
            for index in sorted(places):
                unsorted.seek(places[index])
                file.write(unsorted.readline())
        failures = [self.failures[index] for index in sorted(self.failures)]
        replace_records(self.failed, map(asdict, failures))

    def report(self, num_asked: int) -> SkipReport:
        report = SkipReport(num_asked)
        for index in sorted(self.failures):
            failure = self.failures[index]
            report.skip(failure.reason, failure.source, failure.detail)
        return report


def kept(row: AnsweredConversation) -> Answered:
    unfinished = sum(answer.get("finished") is False for answer in row.answers)
    count = len(row.answers)
    return Answered(row.index, row.source, row.digest, row.cut, count, unfinished)


def load(file: Path, kind: type[Kind]) -> Iterator[Kind]:
    try:
        yield from read_records(file, kind)
    except UntrustedError as error:
        raise ValueError(
            f"{error}; it must be a line as `regenerate` wrote it: remove it, and it is asked again"
        ) from None


@dataclass(frozen=True)
class Work:
    num_answered: int
    num_tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)


def regenerate(
    asked: Sequence[Question],
    answers: Answers,
    backend: Backend,
    stop: StopRequest,
    show: bool = True,
) -> Work:
    """Answer every conversation that has no answer yet, and leave the answers in input order.

    Outcomes are written before the next are awaited: a run that is killed resumes from them.
    Raises Stopped if `stop` was requested.
    """
    missing = answers.missing(asked)
    began, num_answered, num_tokens = time.monotonic(), 0, 0
    done = len(asked) - len(missing)
    watch = SpeedWatch("answers", console.print if show else silently)
    with progress("regenerate", len(asked), done, show and bool(missing)) as tick:
        for outcomes in backend(missing) if missing else ():
            answers.add(outcomes)
            rows = [outcome for outcome in outcomes if isinstance(outcome, AnsweredConversation)]
            num_answered += len(rows)
            watch.add(sum(row.num_tokens for row in rows))
            num_tokens += sum(row.num_tokens for row in rows)
            if outcomes:
                speed = num_tokens / max(time.monotonic() - began, 1e-9)
                tick(len(outcomes), f"{speed:,.0f} tokens/s")
            stop.obey()
    answers.finish()
    return Work(num_answered, num_tokens, time.monotonic() - began)
