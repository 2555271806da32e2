"""Conversations as a chat template writes them, and where the answers are in that text."""

import atexit
import hashlib
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.data.records import Message, Recorded, Unusable
from drafttrain.data.renderer import MEMORY, SECONDS
from drafttrain.runtime.untrusted_input import shown

# Placeholders for contents; templates print them as they are.
USER, ANSWER = "Kx7user7xK", "Kx7answer{}7xK"
RENDERER = Path(__file__).with_name("renderer.py")
# A text takes a millisecond. A template that takes long for each, if less than its limit, would
# keep a data set busy for days: it may be so slow for a while only.
SECONDS_IN_ALL, SECONDS_EACH = 120.0, 0.25
MAX_TEXT = 64 << 20  # bytes of one conversation, as JSON
NONE = "none"


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
    """Where an answer is in a text, with its end of turn; `recorded`: as its target wrote it."""

    start: int
    end: int
    recorded: Recorded | None = None


@dataclass(frozen=True)
class Located:
    """A conversation up to its last answer, as text, and which of it is trained."""

    text: str
    spans: list[Span]
    tokens: tuple[int, ...] | None = None  # of the last answer, after `text`
    num_rewritten: int = 0  # earlier answers that the template rewrites: context, not trained
    num_foreign: int = 0  # recorded answers whose tokens are another target's


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
            f"the chat template of {_name(tokenizer)} must write a conversation within {SECONDS:g} "
            f"s of computing and {MEMORY >> 20} MB, and took {found['limit']}; correct "
            "tokenizer.chat_template, or name another target"
        )
    if "error" in found:
        raise Unusable("the chat template refuses it", found["error"])
    return found["text"]


def _name(tokenizer: Any) -> str:
    return shown(tokenizer.name_or_path or "the tokenizer")


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

    opening: before the first user turn, with a default system prompt. closing: after a user turn,
    up to where the assistant begins; `prompt_closing`: the same in a prompt for generation, to
    which some templates add text. tail: after an answer.
    """

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self.tokenizer, self.template = tokenizer, template
        words = {token.content for token in tokenizer.added_tokens_decoder.values()}
        words.update(tokenizer.all_special_tokens)
        longest_first = sorted(words, key=lambda word: (-len(word), word))
        self.specials = re.compile(rf"\s*(?:{'|'.join(map(re.escape, longest_first))})")
        # Rendering placeholders shows what the template writes around contents.
        user, answer = Message("user", USER), Message("assistant", ANSWER.format(0))
        try:
            prompt = self.render([user], for_answer=True).split(USER)
            pair = re.split(f"{USER}|{answer.content}", self.render([user, answer]))
        except Unusable as error:
            raise ValueError(
                f"the chat template of {_name(tokenizer)} must write a question and an answer, "
                f"got: {shown(error.detail)}; correct tokenizer.chat_template"
            ) from None
        once = len(prompt) == 2 and len(pair) == 3
        closing = os.path.commonprefix([prompt[1], pair[1]]) if once else ""  # noqa: RUF071 (no paths)
        if not closing:
            raise ValueError(
                f"the chat template of {_name(tokenizer)} must write each turn once, with something"
                " between user and assistant; correct tokenizer.chat_template"
            )
        self.opening, self.prompt_closing, self.tail = prompt[0], prompt[1], pair[2]
        self.closing = closing

    def render(self, messages: Sequence[Message], for_answer: bool = False) -> str:
        """Return the conversation as text; see `render`."""
        return render(messages, self.tokenizer, self.template, for_answer)

    def locate(
        self, messages: Sequence[Message], recorded: Sequence[Recorded | None] = ()
    ) -> Located:
        """Return a conversation up to its last answer as text, and where its answers are in it.

        The text before the last answer is exactly the prompt that evaluation would use, with an
        empty <think> block if it has one. The last answer is what its target wrote, token by token,
        where that is `recorded` (one for each answer, None for those without); else the rendering
        must hold its text unchanged, except for surrounding space, or it is Unusable. Earlier
        answers are as later turns see them; one that the template rewrites is context only.
        """
        places = [place for place, turn in enumerate(messages) if turn.role == "assistant"]
        history, last = messages[: places[-1]], messages[places[-1]]
        text = self.render(history, for_answer=True)
        spans = self._earlier_spans(history, text, recorded)
        rewritten = len(places) - 1 - len(spans)
        own = recorded[-1] if recorded else None
        if own is not None and own.tokens is not None:
            return Located(text, spans, own.tokens, rewritten)
        start = len(text)
        text, tail = self._with_answer(text, [*history, last])
        if own is not None and not own.finished:  # cut: the target did not end its turn
            return Located(text, [*spans, Span(start, len(text))], None, rewritten)
        span = Span(start, len(text) + self._ending(tail))
        return Located(text + tail, [*spans, span], None, rewritten)

    def _ending(self, tail: str) -> int:
        """Return the length of the end-of-turn token in `tail`, which follows an answer."""
        found = self.specials.match(tail)
        return found.end() if found else 0

    def _with_answer(self, prompt: str, messages: Sequence[Message]) -> tuple[str, str]:
        """Return a prompt followed by its answer, and what the template writes after the answer."""
        whole, answer = self.render(messages), messages[-1].content
        for elsewhere in (False, True):
            tail = self._surroundings(messages)[-1] if elsewhere else self.tail
            for content in _trimmed(answer):
                if whole.endswith(content + tail):
                    head = whole[: len(whole) - len(content) - len(tail)]
                    # Space before the answer belongs to the answer: Llama 2 begins with one.
                    agrees = head.startswith(prompt) and not head[len(prompt) :].strip()
                    return head + content if agrees else prompt + content.lstrip(), tail
        raise Unusable(
            "the chat template shortens or rewrites the last answer, which only its target's own "
            "tokens could mend (python -m drafttrain regenerate)"
        )

    def _earlier_spans(
        self, history: Sequence[Message], text: str, recorded: Sequence[Recorded | None]
    ) -> list[Span]:
        """Return where the answers of a prompt are in its text, without those it rewrites.

        They are found by rendering the prompt again with placeholders instead of the answers, which
        shows what surrounds the answers. Unusable if the two renderings do not agree.
        """
        answers = [message.content for message in history if message.role == "assistant"]
        if not answers:
            return []
        around = self._surroundings(history, for_answer=True)
        parts = [self._split_header(piece) for piece in around[:-1]]
        if not text.startswith(parts[0][0]):
            raise Unusable("the chat template hides where the assistant speaks", "turn 1")
        headers = [header for header, _ in parts] + [around[-1]]
        position, spans = 0, []
        for place, (answer, (header, added)) in enumerate(zip(answers, parts, strict=True)):
            start, last = position + len(header), place + 1 == len(answers)
            begins, position = _find_end(text, start, added, answer, headers[place + 1], last)
            if begins is None:
                continue
            own = recorded[place] if recorded else None
            finished = own is None or own.finished
            ending = self._ending(around[place + 1]) if finished else 0
            spans.append(Span(begins, position + ending, own))
        return spans

    def _surroundings(self, messages: Sequence[Message], for_answer: bool = False) -> list[str]:
        """Return what the template writes before, between and after the answers."""
        words: list[str] = []
        masked = list(messages)
        for place, message in enumerate(messages):
            if message.role == "assistant":
                words.append(ANSWER.format(len(words)))
                masked[place] = Message("assistant", words[-1])
        rest, pieces = self.render(masked, for_answer), []
        for place, word in enumerate(words, 1):
            piece, found, rest = rest.partition(word)
            if not found:
                raise Unusable("the chat template leaves out an answer", f"answer {place}")
            pieces.append(piece)
        return [*pieces, rest]

    def _split_header(self, piece: str) -> tuple[str, str]:
        """Split what precedes an answer into the end of the prompt and what follows that."""
        for closing in (self.prompt_closing, self.closing):
            before, found, after = piece.rpartition(closing)
            if found:
                return before + closing, after
        raise Unusable("the chat template hides where the assistant speaks")


def _trimmed(answer: str) -> tuple[str, ...]:
    """Return the forms in which templates may write an answer."""
    return answer, answer.strip(), answer.rstrip(), answer.lstrip()


def _find_end(
    text: str, start: int, added: str, answer: str, following: str, last: bool
) -> tuple[int | None, int]:
    """Return where the words of an answer begin, None where they are rewritten, and where they end.

    start: where the text `added` before the answer begins; `following` is the text after it.
    """
    for before in (added, ""):
        for content in _trimmed(answer):
            end = start + len(before) + len(content)
            if text.startswith(before + content + following, start) and (
                not last or end + len(following) == len(text)
            ):
                return start + (len(before) if before.strip() else 0), end
    if last:  # rewritten by the template: what follows is known, and it must follow once
        end = len(text) - len(following)
        if end >= start and text.endswith(following):
            return None, end
    elif text.count(following, start) == 1:
        return None, text.index(following, start)
    raise Unusable("the chat template rewrites an answer beyond recognition")
