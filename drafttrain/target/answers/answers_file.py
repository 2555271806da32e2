"""The answers file: a line is added as each conversation is answered, and sorted at the end."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from drafttrain.data.conversations import Conversation
from drafttrain.data.skips import SkipReport
from drafttrain.runtime.disk import replacing, write_whole, writing
from drafttrain.runtime.journal import append_records, read_records, replace_records
from drafttrain.runtime.load import SpeedWatch
from drafttrain.runtime.lock import hold, of_answers
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import Tell, console, progress, silently
from drafttrain.runtime.untrusted_input import UntrustedError, read_object, shown, typed
from drafttrain.target.answers.dialogue import AnsweredConversation, Failure, Outcome

FORMAT = 1
Kind = TypeVar("Kind")
Backend = Callable[[Sequence[Conversation]], Iterator[list[Outcome]]]


class Answers:
    """The answers on disk so far; a conversation whose answer was written is not asked again.

    Next to OUT.jsonl are OUT.settings.json, what the answers depend on, and OUT.failed.jsonl, the
    conversations without an answer. One process writes at a time: see `open_answers`.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out = out
        self.failed = out.with_suffix(".failed.jsonl")
        self.settings = {"format": FORMAT, **settings}
        self.check_settings()
        for file in (self.out, self.failed):
            append_records(file, [])  # fail before anything is asked
        self.rows = {
            row.index: without_text(row) for row in read_answers(self.out, AnsweredConversation)
        }
        failed = {failure.index: failure for failure in read_answers(self.failed, Failure)}
        # A killed run leaves failures in the file that an earlier one of its answers mended.
        self.failures = {i: one for i, one in failed.items() if i not in self.rows}

    def check_settings(self) -> None:
        """Write the header, or refuse to add to answers that were made with other settings."""
        header = self.out.with_suffix(".settings.json")
        if not header.is_file():
            if self.out.is_file() and self.out.stat().st_size:
                raise ValueError(
                    f"regenerate.out must not name a file that `regenerate` did not write, got "
                    f"{self.out}, which has no {header.name} next to it; name another file"
                )
            write_whole(header, json.dumps(self.settings, indent=2) + "\n")
            return
        try:
            earlier = read_object(header)
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

    def missing(self, asked: Sequence[Conversation]) -> list[Conversation]:
        """Return the conversations still to be asked; ValueError if the prompts have changed."""
        known: dict[int, Outcome] = {**self.failures, **self.rows}
        for index, found in sorted(known.items()):
            gone = index >= len(asked)
            if gone or found.digest != asked[index].digest:
                now = "no longer exists" if gone else "has changed"
                raise ValueError(
                    f"regenerate.out={self.out} answers conversation {index} of "
                    f"{shown(found.source)}, which {now}; give the prompts it was started with, or "
                    "name another file"
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
                self.rows[outcome.index] = without_text(outcome)
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
                    row = typed(AnsweredConversation, line, shown(self.out, 400))
                    places[row.index] = place
                place += len(line)
            for index in sorted(places):
                unsorted.seek(places[index])
                file.write(unsorted.readline())
        failures = [self.failures[index] for index in sorted(self.failures)]
        replace_records(self.failed, map(asdict, failures))

    def report(self, num_asked: int) -> SkipReport:
        """Return which conversations have no answer, and how many answers are not whole."""
        report = SkipReport(num_asked)
        for _, failure in sorted(self.failures.items()):
            report.skip(failure.reason, failure.source, failure.detail)
        num_cut = sum(row.cut is not None for row in self.rows.values())
        report.note(f"conversations were cut after an answer: see `cut` in {self.out}", num_cut)
        answers = [answer for row in self.rows.values() for answer in row.answers]
        report.note(
            f"of {len(answers):,} answers reached the limit, regenerate.max_new_tokens="
            f"{self.settings.get('max_new_tokens')}, and are trained without an end; raise it, "
            "with another regenerate.out, to have them finished",
            sum(answer.get("finished") is False for answer in answers),
        )
        return report


@contextmanager
def open_answers(out: Path, settings: dict[str, Any]) -> Iterator[Answers]:
    """Yield the answers on disk, which no other process writes meanwhile; else HeldError."""
    with hold(out, "regenerate.out", "regenerate", console.print, file=of_answers(out)):
        yield Answers(out, settings)


def without_text(row: AnsweredConversation) -> AnsweredConversation:
    """Return what is kept in memory of an answered conversation; its line on disk has the rest."""
    ends = [{"finished": answer.get("finished")} for answer in row.answers]
    return replace(row, messages=[], answers=ends)


def read_answers(file: Path, kind: type[Kind], writer: str = "`regenerate`") -> Iterator[Kind]:
    """Yield the lines of a file; ValueError names one that its writer did not write."""
    try:
        yield from read_records(file, kind)
    except UntrustedError as error:
        raise ValueError(
            f"{error}; it must be a line as {writer} wrote it: remove it, and it is written again"
        ) from None


def regenerate(
    asked: Sequence[Conversation],
    answers: Answers,
    opened: AbstractContextManager[Backend],
    stop: StopRequest,
    show: bool = True,
) -> None:
    """Answer every conversation that has no answer yet, and leave the answers in input order.

    Outcomes are written before the next are awaited: a run that is killed resumes from them.
    opened: the backend, which is opened only if something is to be asked. Raises Stopped if `stop`
    was requested.
    """
    say: Tell = console.print if show else silently
    missing = answers.missing(asked)
    done = len(asked) - len(missing)
    say(f"data: {len(asked):,} conversations, {done:,} answered before")
    if missing:
        with opened as backend, progress("regenerate", len(asked), done, show) as tick:
            began, seconds, num_answered, num_tokens = time.monotonic(), 1e-9, 0, 0
            watch = SpeedWatch("answers", say)
            for outcomes in backend(missing):
                answers.add(outcomes)
                rows = [one for one in outcomes if isinstance(one, AnsweredConversation)]
                new = sum(row.num_tokens for row in rows)
                watch.add(new)
                num_answered, num_tokens = num_answered + len(rows), num_tokens + new
                seconds = max(time.monotonic() - began, 1e-9)
                if outcomes:
                    tick(len(outcomes), f"{num_tokens / seconds:,.0f} tokens/s")
                stop.obey()
        say(
            f"answered {num_answered:,} conversations with {num_tokens:,} tokens in "
            f"{seconds:,.1f} s ({num_tokens / seconds:,.0f} tokens/s)"
        )
    answers.finish()
