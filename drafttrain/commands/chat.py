"""`chat` and `generate`: a target with a drafter answers what is typed, or prompts of a file."""

import contextlib
import signal
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from rich.text import Text

from drafttrain import __version__
from drafttrain.commands.setup.talk import Talk, ready_to_talk
from drafttrain.config.sections import ChatConfig
from drafttrain.data.evaluation_prompts import Prompt, read_prompts
from drafttrain.data.files import SUFFIXES
from drafttrain.data.records import Message
from drafttrain.decode.config import ChatSettings
from drafttrain.decode.stream import Stream
from drafttrain.report.answers import DRAFTED, LEGEND, show
from drafttrain.runtime.disk import digest_of, require_writable
from drafttrain.runtime.hardware import dtype_name
from drafttrain.runtime.journal import append_records, read_records
from drafttrain.runtime.lock import hold, of_answers, require_free
from drafttrain.runtime.signals import answered_by
from drafttrain.runtime.terminal import console, progress
from drafttrain.runtime.untrusted_input import UntrustedError, read_bytes, shown

HELP = "/new begins a new conversation, /system TEXT sets the system's turn, /exit ends"
ASK = "> "
MAX_FILE = 64 << 20  # bytes of a file of prompts, a line each
FIRST = b'{"id": '  # how each line of chat.out begins
# Settings of `eval` that say how to decode; the others are of measurements.
DECODING = (
    *("policy", "tree", "tree_replacement", "tree_nodes", "tree_width", "tree_temperature"),
    *("latency_ms", "depth"),
    *("temperature", "top_k", "top_p", "draft_temperature", "draft_top_k", "draft_top_p", "rule"),
    *("typical_epsilon", "typical_delta", "lenience", "stop_strings", "from_tune"),
)


def chat(config: ChatConfig) -> None:
    """Talk to the target: at a terminal, or each line of a pipe is a turn."""
    for key in ("prompt", "file", "out"):
        unset = getattr(config.chat, key) is None
        config.chat.require(key, unset, "be null: it is for `generate`")
    if console.is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited, and earlier ones come back)
        console.print(f"drafttrain {__version__}: chat")
    talk, _ = ready_to_talk(config)
    ChatLoop(talk, config.chat).run()


class ChatLoop:
    """The turns so far, and how they are shown."""

    def __init__(self, talk: Talk, settings: ChatSettings) -> None:
        self.talk, self.marks = talk, settings.marks
        self.typed = sys.stdin.isatty()  # not a pipe
        self.system, self.messages = settings.system, list[Message]()
        self.plain: float | None = None  # tokens per second of the target alone
        talk.tokens(self._with(Message("user", "Hello")))  # a base model has no chat template

    def run(self) -> None:
        """Answer turns until there are no more."""
        if self.typed and console.is_terminal:
            if self.marks:
                console.print(Text(LEGEND).append(DRAFTED, DRAFTED))
            console.print(HELP)
        # Ctrl-C stops an answer, and at the prompt the command.
        with answered_by(signal.default_int_handler, [signal.SIGINT]):
            for text in self._turns():
                name, _, rest = text.partition(" ")
                if not (self.typed and text.startswith("/")):
                    self._answer(text)
                elif name == "/exit":
                    return
                else:
                    sys.stderr.write(self._reply(name, rest.strip()) + "\n")

    def _turns(self) -> Iterator[str]:
        """Yield the user's turns, without empty ones."""
        for number in count(1):
            try:
                line = self._line()
            except KeyboardInterrupt:
                sys.stderr.write("\n")
                raise
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number} of stdin must be UTF-8 ({error.reason})") from None
            if not line:
                return
            if line.strip():
                yield line.strip()

    def _line(self) -> str:
        """Return the next line with its end; an empty text where there is none."""
        if self.typed and console.is_terminal:
            with contextlib.suppress(EOFError):
                return input(ASK) + "\n"
            console.print()
            return ""
        if self.typed:
            sys.stderr.write(ASK)
            sys.stderr.flush()
        return sys.stdin.readline()

    def _reply(self, name: str, rest: str) -> str:
        """Run a command, such as /new, and return what to say of it."""
        if name == "/new" and not rest:
            self.messages.clear()
            return "a new conversation"
        if name == "/system":
            self.messages.clear()
            self.system = rest or None
            return f"a new conversation, {'with this' if rest else 'without a'} system's turn"
        return HELP

    def _with(self, turn: Message) -> list[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, *self.messages, turn]

    def _answer(self, text: str) -> None:
        """Answer a turn, and keep both; one that cannot be answered is as if it had not come."""
        turn = Message("user", text)
        asked = self._with(turn)
        try:
            stream = self.talk.stream(asked)
        except ValueError as error:
            if not self.typed:
                raise
            sys.stderr.write(f"{error}\n")
            return
        try:
            if self.plain is None and console.is_terminal:
                self.plain = self.talk.plain_tokens_per_second(asked)
            show(stream, console, self.marks, self.plain)
        except KeyboardInterrupt:
            if not self.typed:
                raise
            sys.stderr.write("stopped\n")
        answer = stream.turn_of(stream.tokens)
        if answer.content.strip():  # else it was stopped before it began
            self.messages += [turn, answer]


def generate(config: ChatConfig) -> None:
    """Answer the prompts, and print the answers or write them to chat.out."""
    settings, prompts = config.chat, asked(config)
    if settings.out is None:
        talk, _ = ready_to_talk(config)
        for prompt, answers in unanswered(talk, prompts, settings):
            if len(prompts) > 1 and console.is_terminal:
                console.print(f"{prompt.id}:", style="dim")
            for answer in answers:
                show(answer, console, settings.marks)
        return
    out = Path(settings.out).expanduser()
    check_out(out, settings.file)
    require_free(out, "chat.out", file=of_answers(out))
    talk, given = ready_to_talk(config)
    # What an answer depends on, beside the prompt.
    conditions = {
        "drafter": [given.weights, asdict(config.drafter)],
        "target": [talk.target.spec.fingerprint, config.model.inflate],
        "dtype": dtype_name(talk.target.dtype),
        "seed": talk.seed,
        "chat": [settings.system, settings.max_new_tokens],
        "eval": {key: getattr(talk.how, key) for key in DECODING},
        "template": asdict(talk.template),
    }
    with hold(out, "chat.out", "generate", console.print, file=of_answers(out)):
        marks = {each.id: digest_of([conditions, each.turns])[:16] for each in prompts}
        done = answered(out, marks)
        with progress("answers", len(prompts), done=len(done)) as tick:
            for prompt, answers in unanswered(talk, prompts, settings, done):
                append_records(out, [record_of(prompt, answers, marks[prompt.id])])
                tick()
    console.print(f"answers: {out}")


def asked(config: ChatConfig) -> list[Prompt]:
    """Return the prompts of chat.prompt or chat.file; ValueError if there are none."""
    settings = config.chat
    if settings.prompt is not None:
        return [Prompt("prompt", "", "", (settings.prompt,))]
    if settings.file is None:
        raise ValueError(
            "chat.prompt or chat.file must be given: 'chat.prompt=Why is the sky blue?', or a file "
            "with a prompt in each line"
        )
    file = Path(settings.file).expanduser()
    if file.name.lower().endswith(SUFFIXES):
        prompts, skipped = read_prompts(file, None, config.data.known_roles, "chat.file")
        if skipped.counts:
            raise ValueError(f"chat.file must be usable in every line: {skipped.sentence()}")
        return prompts
    try:
        lines = read_bytes(file, MAX_FILE).decode("utf-8-sig").split("\n")
    except (OSError, UntrustedError, UnicodeDecodeError) as error:
        raise ValueError(f"chat.file={shown(file, 400)} cannot be read: {shown(error)}") from None
    found = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"chat.file={shown(file, 400)} must hold a prompt in each line, got none")
    return [Prompt(f"line {number}", "", "", (line,)) for number, line in found]


def unanswered(
    talk: Talk, prompts: Sequence[Prompt], settings: ChatSettings, done: Collection[str] = ()
) -> Iterator[tuple[Prompt, Iterator[Stream]]]:
    """Yield each prompt that is not done, and the answers to its turns, to decode one by one.

    ValueError, before anything is decoded, for a prompt that cannot be answered.
    """
    waiting = deque[tuple[Prompt, Iterator[Stream]]]()
    for row, prompt in enumerate(prompts):
        if prompt.id not in done:
            answers = answers_to(talk, prompt, row, settings)
            waiting.append((prompt, chain([next(answers)], answers)))
    while waiting:
        yield waiting.popleft()  # an answer is kept no longer than it is needed


def answers_to(talk: Talk, prompt: Prompt, row: int, settings: ChatSettings) -> Iterator[Stream]:
    """Yield the answer to each turn of a prompt, the row-th; each must end before the next."""
    messages = [Message("system", settings.system)] if settings.system else []
    for place, turn in enumerate(prompt.turns):
        messages.append(Message("user", turn))
        try:
            if place == 0:  # the other turns alone: the answers before them are not known yet
                for later in prompt.turns[1:]:
                    talk.tokens([Message("user", later)])
            answer = talk.stream(messages, row)
        except ValueError as error:
            name = "chat.prompt" if settings.file is None else f"chat.file: {prompt.id}"
            raise ValueError(f"{name}: {error}") from error
        yield answer
        messages.append(answer.turn_of(answer.tokens))


def check_out(out: Path, file: str | None) -> None:
    """Raise ValueError, before anything is loaded, where answers cannot be written to `out`."""
    require_writable(out.parent, "chat.out")
    if out.is_symlink() or (out.exists() and not out.is_file()):
        raise ValueError(f"chat.out must be a file or not there yet, got {out}, which is none")
    if not out.exists():
        return
    with out.open("rb") as stream:
        begins = stream.read(len(FIRST))
    # Its last line is cut off if it is torn, so it must be ours.
    if (begins and begins != FIRST) or (file and Path(file).expanduser().samefile(out)):
        raise ValueError(f"chat.out must be a new file, or one of `generate`, got {out}")


@dataclass(frozen=True)
class _Answered:
    """What is read again of a line of chat.out."""

    id: str
    mark: str


def answered(out: Path, marks: dict[str, str]) -> set[str]:
    """Return the prompts that `out` has answers for; ValueError for one of other conditions."""
    try:
        found = list(read_records(out, _Answered)) if out.exists() else []
    except UntrustedError as error:
        raise ValueError(f"chat.out must be a new file, or one of `generate`: {error}") from None
    for record in found:
        if marks.get(record.id) != record.mark:
            raise ValueError(
                f"chat.out={out} must be a new file, or hold answers to these prompts by these "
                f"settings and weights, got another's for {shown(record.id)}"
            )
    return {record.id for record in found}


def record_of(prompt: Prompt, streams: Iterator[Stream], mark: str) -> dict[str, Any]:
    """Decode the answers to a prompt, and return their line of chat.out."""
    answers = [
        {
            "text": stream.rest().text,
            "cut": stream.cut,
            "pieces": [[piece.writer, len(piece.tokens)] for piece in stream.pieces],
            "tokens": stream.tokens,
            "tokens_per_pass": stream.tokens_per_pass,
        }
        for stream in streams
    ]
    return {"id": prompt.id, "mark": mark, "turns": list(prompt.turns), "answers": answers}
