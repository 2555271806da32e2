"""Conversations as a chat template writes them, and where the answers are in that text."""

import atexit
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from drafttrain.core.tokenizer import shown_name
from drafttrain.data.records import Message, Recorded, Unusable
from drafttrain.data.renderer import MEMORY, SECONDS
from drafttrain.data.thoughts import (
    WORD,
    begins_with_thought,
    closed_length,
    marks_of,
    repeated_length,
    start_of_answer,
)

# Placeholders for contents; templates print them as they are.
USER, ANSWER = "Kx7user7xK", "Kx7answer7xK"
RENDERER = Path(__file__).with_name("renderer.py")
# A text takes a millisecond. A template that takes long for each, if less than its limit, would
# keep a data set busy for days: it may be so slow for a while only.
SECONDS_IN_ALL, SECONDS_EACH = 120.0, 0.25
MAX_TEXT = 64 << 20  # bytes of one conversation, as JSON
NONE = "none"
REFUSED = "the chat template refuses it"
REWRITTEN_ANSWER = "the chat template shortens or rewrites the last answer"
OPEN_THOUGHT = "the answer would stand inside a thought that the prompt opens"
SECOND_THOUGHT = "the recorded thought would follow text that the chat template writes first"
UNKNOWN_PLACE = "the chat template does not show where the answer begins"
MOST_OPTIONS = 16  # variables of a template that are tried
HELPFUL: dict[str, tuple[object, ...]] = {  # values of them that may help
    OPEN_THOUGHT: (False, "none"),
    UNKNOWN_PLACE: (False, "none"),
    SECOND_THOUGHT: (True,),
    REWRITTEN_ANSWER: (),
}


@dataclass(frozen=True)
class Template:
    """How turns become text everywhere: by the tokenizer's chat template, or without one."""

    kind: str  # "chat" or NONE
    kwargs: dict[str, Any]  # variables of the chat template, such as enable_thinking
    date: str  # YYYY-MM-DD: today, for a chat template that uses it


class TemplateLimitError(ValueError):
    """A chat template takes more time or memory than any conversation needs."""


@dataclass(frozen=True)
class Span:
    """The trained part of an answer in a text, in characters, with its end of turn."""

    start: int
    end: int
    prompt: int  # where the prompt of this answer ends: between it and `start` is context
    recorded: Recorded | None = None  # as its target wrote it


@dataclass(frozen=True)
class Located:
    """A conversation up to its last trained answer, as text, and which of it is trained."""

    text: str
    spans: list[Span]
    recorded: Recorded | None = None  # the last answer, whose tokens follow `text`
    num_rewritten: int = 0  # earlier answers that the template rewrites: context, not trained
    num_foreign: int = 0  # recorded answers whose tokens are another target's


@dataclass(frozen=True)
class WrittenAnswer:
    """One answer after its prompt, as the template writes both."""

    text: str  # the prompt and the answer, without what follows
    prompt: int  # the length of the prompt
    start: int  # where the trained part begins
    tail: str  # what the template writes after the answer


class Renderer:
    """The process that renders, started when it is first needed (see `renderer`)."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # the process that started it; a fork must start its own
        self.lock = threading.Lock()
        self.asked, self.seconds = 0, 0.0

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """Return the answer of the process; {"limit": ...} where a limit ends it."""
        with self.lock:
            if self.process is None or self.owner != os.getpid():
                self.process, self.owner = _started(), os.getpid()
            to, back = self.process.stdin, self.process.stdout
            assert to is not None
            assert back is not None
            self.asked += 1
            if self.seconds > SECONDS_IN_ALL + self.asked * SECONDS_EACH:
                return {"limit": f"{self.seconds:.0f} s for {self.asked:,} texts in all"}
            begun = time.monotonic()
            try:
                to.write(json.dumps(request).encode() + b"\n")
                to.flush()
                line = back.readline(MAX_TEXT)
            except BrokenPipeError:
                line = b""
            except BaseException:  # an answer is left in the pipe
                self.close()
                raise
            finally:
                self.seconds += time.monotonic() - begun
            if line.endswith(b"\n"):
                return json.loads(line)
            status = self.close()
        if line:
            return {"limit": "too much text"}
        if status == -signal.SIGPROF:
            return {"limit": "too much time"}
        return {"limit": f"its process down (status {status})"}

    def close(self) -> int:
        """End the process and return its status."""
        process, self.process = self.process, None
        if process is None or self.owner != os.getpid():
            return 0
        for pipe in (process.stdout, process.stdin):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            return process.wait(1)  # it ends by itself once its input is closed
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _started() -> subprocess.Popen[bytes]:
    # Without secrets of the environment; this Python, but nothing imported from local folders.
    kept = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", str(RENDERER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


RENDERING = Renderer()
atexit.register(RENDERING.close)


def render(
    messages: Sequence[Message],
    tokenizer: Any,
    template: Template,
    for_answer: bool = False,
) -> str:
    """Return the conversation as the template writes it; Unusable if the template refuses it.

    It renders as Transformers does, but in a process whose time and memory are limited.
    TemplateLimitError, which names the template, where it exceeds them.
    """
    require_template(tokenizer)
    variables = {
        "messages": [{"role": turn.role, "content": turn.content} for turn in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": for_answer,
        **tokenizer.special_tokens_map,
        **template.kwargs,
    }
    text = tokenizer.get_chat_template()
    found = RENDERING.ask({"template": text, "date": template.date, "variables": variables})
    if "limit" in found:
        raise TemplateLimitError(
            f"the chat template of {shown_name(tokenizer)} must write a conversation within "
            f"{SECONDS:g} s of computing and {MEMORY >> 20} MB, and took {found['limit']}; correct "
            "tokenizer.chat_template, or name another target"
        )
    if "error" in found:
        raise Unusable(REFUSED, found["error"])
    return found["text"]


def require_template(tokenizer: Any) -> None:
    """Raise unless the tokenizer has a chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            "data.template=chat needs a tokenizer with a chat template, and"
            f" {tokenizer.name_or_path or 'this one'} has none; set data.template=none: prompts"
            ' are then plain text, and what is trained on is ({"text": ...} records)'
        )


def template_fingerprint(tokenizer: Any, template: Template) -> str:
    """Return a hash of the chat template and its variables, which stored text is tied to."""
    text = str(tokenizer.chat_template or "")
    if template.kwargs:
        text += json.dumps(template.kwargs, sort_keys=True)
    if "strftime_now" in text:
        text += template.date
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class ChatFormat:
    """What a chat template writes around turns, and where the answers are in its text.

    opening: before the first user turn, with a default system prompt. prompt_closing: after a user
    turn, up to where the assistant begins to write. tail: after an answer. They are empty where the
    template does not write a question and an answer as they are; `problem` then says why.
    """

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self.tokenizer, self.template = tokenizer, template
        words = {token.content for token in tokenizer.added_tokens_decoder.values()}
        words.update(tokenizer.all_special_tokens)
        longest_first = sorted(words, key=lambda word: (-len(word), word))
        self.specials = re.compile(rf"\s*(?:{'|'.join(map(re.escape, longest_first))})")
        self.opening = self.prompt_closing = self.tail = self.problem = ""
        self.advice: dict[str, str] = {}  # by the reason for skipping a record
        # Rendering placeholders shows what the template writes around contents.
        user, answer = Message("user", USER), Message("assistant", ANSWER)
        try:
            prompt = self.render([user], for_answer=True).split(USER)
            pair = re.split(f"{USER}|{ANSWER}", self.render([user, answer]))
        except Unusable as error:
            self.problem = error.detail
            return
        if len(prompt) != 2 or len(pair) != 3 or not prompt[1]:
            self.problem = "it does not write each turn once, with something between them"
            return
        (self.opening, self.prompt_closing), self.tail = prompt, pair[2]

    @cached_property
    def later_tail(self) -> str:
        """What the template writes after an answer that another user turn follows."""
        user, answer = Message("user", USER), Message("assistant", ANSWER)
        try:
            pieces = re.split(f"{USER}|{ANSWER}", self.render([user, answer, user]))
        except Unusable:
            return ""
        return pieces[2] if len(pieces) == 4 else ""

    def render(self, messages: Sequence[Message], for_answer: bool = False) -> str:
        """Return the conversation as text; see `render`."""
        return render(messages, self.tokenizer, self.template, for_answer)

    def locate(
        self, messages: Sequence[Message], recorded: Sequence[Recorded | None] = ()
    ) -> Located:
        """Return a conversation up to its last trained answer as text, and which of it is trained.

        The text before the last answer begins with the prompt that evaluation would use. The answer
        is what its target wrote, token by token, where that is `recorded` (one for each answer,
        None for those without); else it is what the template writes after the prompt. An earlier
        answer is trained where the text shows it after its question as it was when it was the last;
        else it is context. Unusable if the last answer cannot be trained.
        """
        places = [place for place, turn in enumerate(messages) if turn.role == "assistant"]
        while not messages[places[-1]].trained:
            places.pop()
            if not places:
                raise Unusable("no answer to train on: each has weight 0")
        history, last = messages[: places[-1]], messages[places[-1]]
        known = [*recorded[: len(places)], *[None] * (len(places) - len(recorded))]
        own, spans = known[-1], []
        if own is not None and own.tokens is not None:
            text = self.render(history, for_answer=True)
        else:
            answer = self._written_or_advice(history, last)
            cut = own is not None and not own.finished  # the target did not end its turn
            text = answer.text if cut else answer.text + answer.tail
            end = len(answer.text) + (0 if cut else self._ending(answer.tail))
            spans, own = [Span(answer.start, end, answer.prompt)], None
        earlier = [
            self._earlier_span(messages[: place + 1], text, each)
            for place, each in zip(places[:-1], known, strict=False)
            if messages[place].trained
        ]
        kept = [span for span in earlier if span is not None]
        return Located(text, [*kept, *spans], own, len(earlier) - len(kept))

    def _ending(self, tail: str) -> int:
        """Return the length of the text that ends a turn, in the `tail` that follows an answer.

        It is one special token, or all up to the tokenizer's end token where that follows in later
        turns too: a template may add another at the very end, which the model never writes.
        """
        first = self.specials.match(tail)
        if first is None:
            return 0
        kept = os.path.commonprefix([tail, self.later_tail])  # noqa: RUF071 (no paths)
        for found in self.specials.finditer(kept):
            if found[0].strip() == self.tokenizer.eos_token:
                return found.end()
        return first.end()

    def _earlier_span(
        self, messages: Sequence[Message], text: str, own: Recorded | None
    ) -> Span | None:
        """Return where the last of `messages`, an answer, is in the text of the conversation.

        None where later turns change it, or what the template writes between question and answer.
        """
        try:
            answer = self._written(messages[:-1], messages[-1])
        except Unusable:
            return None
        moved = 0
        if not text.startswith(answer.text):  # some templates move the system turn, for example
            prompt, asked = answer.text[: answer.prompt], messages[-2].content.strip()
            end = answer.prompt - len(self._closing_of(prompt, messages[:-1]))
            start = max(prompt.rfind(asked, 0, end), 0)
            pair = answer.text[start:]
            if text.count(pair) != 1:
                return None
            moved = text.index(pair) - start
        end = len(answer.text) + moved
        ending = answer.tail[: self._ending(answer.tail)]
        if (own is None or own.finished) and text.startswith(ending, end):
            end += len(ending)
        return Span(answer.start + moved, end, answer.prompt + moved, own)

    def _written_or_advice(self, history: Sequence[Message], last: Message) -> WrittenAnswer:
        """Return what `_written` returns; Unusable with the option of the template that helps."""
        try:
            return self._written(history, last)
        except Unusable as error:
            if error.reason == REFUSED:
                raise
            if error.reason not in self.advice:
                self.advice[error.reason] = self._find_advice(history, last, error.reason)
            raise Unusable(f"{error.reason}; {self.advice[error.reason]}", error.detail) from None

    def _find_advice(self, history: Sequence[Message], last: Message, reason: str) -> str:
        """Return what would make an answer usable that is not, tried on this very answer."""
        text = self.tokenizer.get_chat_template()
        names = dict.fromkeys(re.findall(rf"\b[a-z_]*{WORD}[a-z_]*\b", text))
        for name, value in itertools.product([*names][:MOST_OPTIONS], HELPFUL[reason]):
            other = replace(self.template, kwargs={**self.template.kwargs, name: value})
            try:
                ChatFormat(self.tokenizer, other)._written(history, last)
            except Unusable:
                continue
            except TemplateLimitError:
                break
            return f"data.template_kwargs={{{name}: {str(value).lower()}}} would help"
        return "answers by the target itself would help (python -m drafttrain regenerate)"

    def _written(self, history: Sequence[Message], last: Message) -> WrittenAnswer:
        """Return an answer after its prompt, as the template writes both.

        Where the rendering begins with the prompt, the rest is the answer. Where the prompt ends
        with more than the rendering, the answer follows it if the answer repeats that end, which is
        then written once, or if that end is a closed thought. Unusable where the answer would stand
        inside an open thought, or where its place cannot be known.
        """
        prompt = self.render(history, for_answer=True)
        body, begin, tail = self._without_tail(history, last)
        thinks = begins_with_thought(body[begin:])
        if not thinks:
            begin -= self._indent(body[:begin], history, last)
        size, answer = len(prompt), body[begin:]
        closing, asked = self._closing_of(prompt, history), history[-1].content.strip()
        if not body.startswith(prompt) and prompt.endswith(asked + closing):
            # Before the question it may differ: some templates move the system turn, for example.
            at = _end_of_question(body[:begin], asked, closing)
            body, begin = (
                prompt[: size - len(closing)] + body[at:],
                begin - at + size - len(closing),
            )
        if body.startswith(prompt) and begin < size:
            return WrittenAnswer(body, size, size, tail)
        shared = _shared_length(prompt, body, size - len(closing))
        extra, before = prompt[shared:], body[shared:begin]
        if len(extra) > len(closing):
            raise Unusable(UNKNOWN_PLACE)
        if extra and prompt.rstrip().endswith(before.strip()):
            before = ""
        opened = marks_of(closing)[-1:] == [False]
        if extra or (thinks and opened and not before):
            repeated = repeated_length(closing, answer, len(extra) or 1)
            if repeated and (thinks or not opened):
                return WrittenAnswer(prompt + answer[repeated:], size, size, tail)
        marks = marks_of(closing if extra else closing + before)
        if marks[-1:] == [False] and marks_of(answer)[:1] != [True]:  # which would close it
            raise Unusable(OPEN_THOUGHT)
        if thinks and (before.strip() or extra.strip() or True in marks):
            raise Unusable(SECOND_THOUGHT)
        known = opened or not extra.strip() or closed_length(extra) == len(extra)
        if extra and (marks_of(before) or not known):
            raise Unusable(UNKNOWN_PLACE)
        start = size + closed_length(before)
        return WrittenAnswer(prompt + before + answer, size, start, tail)

    def _without_tail(self, history: Sequence[Message], last: Message) -> tuple[str, int, str]:
        """Return a rendering up to the end of its last answer, where that begins, and the rest."""
        whole, tail = self.render([*history, last]), self.tail
        for again in (False, True):
            if again:  # the template ends this conversation otherwise than a question and answer
                masked = Message("assistant", ANSWER)
                tail = self.render([*history, masked]).rpartition(ANSWER)[2]
            body = whole.removesuffix(tail)
            begin = start_of_answer(body, last.content)
            if begin is not None and len(body) + len(tail) == len(whole):
                return body, begin, tail
        raise Unusable(REWRITTEN_ANSWER)

    def _indent(self, text: str, history: Sequence[Message], last: Message) -> int:
        """Return the length of an answer's own space, if the template keeps it: `text` ends so."""
        space = last.content[: len(last.content) - len(last.content.lstrip())]
        if not space:
            return 0
        header = self.render([*history, Message("assistant", ANSWER)]).rpartition(ANSWER)[0]
        return len(space) if text == header + space else 0

    def _closing_of(self, prompt: str, history: Sequence[Message]) -> str:
        """Return what follows the last user turn of a prompt."""
        if self.prompt_closing and prompt.endswith(self.prompt_closing):
            return self.prompt_closing
        asked = history[-1].content.strip()
        with suppress(Unusable):
            masked = self.render([*history[:-1], Message("user", USER)], for_answer=True)
            closing = masked.rpartition(USER)[2]
            if USER in masked and prompt.endswith(closing):
                return closing
        return prompt[prompt.rfind(asked) + len(asked) :] if asked in prompt else prompt


def _end_of_question(text: str, asked: str, closing: str) -> int:
    """Return where the last question ends in a text up to its answer: where `closing` follows most.

    Its words may stand in what follows too, as the question "a" does in "assistant".
    """
    ends = [found.start() + len(asked) for found in re.finditer(f"(?={re.escape(asked)})", text)]
    if not ends:
        raise Unusable(UNKNOWN_PLACE)
    shared = [len(os.path.commonprefix([text[end:], closing])) for end in ends]  # noqa: RUF071
    return max(zip(shared, ends, strict=True))[1]


def _shared_length(prompt: str, body: str, least: int) -> int:
    """Return how many characters two texts share at their start, without part of a mark.

    least: where marks begin that may be cut.
    """
    shared = len(os.path.commonprefix([prompt, body]))  # noqa: RUF071 (no paths)
    for opening, closing in ("<>", "[]"):
        at = prompt.rfind(opening, max(least, 0), shared)
        if at >= 0 and shared < len(prompt) and closing not in prompt[at:shared]:
            shared = at
    return shared
