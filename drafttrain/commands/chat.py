"""A conversation with a target that decodes with a drafter."""

import contextlib
import signal
import sys
from collections.abc import Iterator

from rich.text import Text

from drafttrain import __version__
from drafttrain.commands.setup.talk import Talk, ready_to_talk
from drafttrain.config.sections import ChatConfig
from drafttrain.data.records import Message
from drafttrain.report.answers import DRAFTED, LEGEND, show
from drafttrain.runtime.signals import answered_by
from drafttrain.runtime.terminal import console

COMMANDS = "/new begins a new conversation, /system TEXT sets the system's turn, /exit ends"
ASK = "> "


def chat(config: ChatConfig) -> None:
    """Talk to the target: at a terminal, or each line of a pipe is a turn."""
    for key in ("prompt", "file", "out"):
        unset = getattr(config.chat, key) is None
        config.chat.require(key, unset, "be null: it is for `generate`")
    if console.is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited, and earlier ones come back)
        console.print(f"drafttrain {__version__}: chat")
    ChatLoop(ready_to_talk(config), config).run()


class ChatLoop:
    """The turns so far, and how they are shown."""

    def __init__(self, talk: Talk, config: ChatConfig) -> None:
        self.talk, self.marks = talk, config.chat.marks
        self.asked = sys.stdin.isatty()  # somebody types
        self.system, self.messages = config.chat.system, list[Message]()
        self.plain: float | None = None  # tokens per second of the target alone
        talk.tokens(self._with(Message("user", "Hello")))  # a base model has no chat template

    def run(self) -> None:
        """Answer turns until there are no more."""
        if self.asked and console.is_terminal:
            if self.marks:
                console.print(Text(LEGEND).append(DRAFTED, DRAFTED))
            console.print(COMMANDS)
        # Ctrl-C stops an answer, and at the prompt the command.
        with answered_by(signal.default_int_handler, [signal.SIGINT]):
            for text in self._turns():
                if self.asked and text.startswith("/"):
                    if text.split()[0] == "/exit":
                        return
                    self._obey(text)
                else:
                    self._answer(text)

    def _turns(self) -> Iterator[str]:
        """Yield the user's turns, without empty ones."""
        for number in range(1, sys.maxsize):
            try:
                line = self._line()
            except EOFError:
                return
            except KeyboardInterrupt:
                sys.stderr.write("\n")
                raise
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number} of stdin must be UTF-8 ({error.reason})") from None
            if line.strip():
                yield line.strip()

    def _line(self) -> str:
        if self.asked and console.is_terminal:
            try:
                return input(ASK)
            except EOFError:
                console.print()
                raise
        if self.asked:
            sys.stderr.write(ASK)
            sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line

    def _obey(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        told = COMMANDS
        if name == "/new" and not rest:
            self.messages.clear()
            told = "a new conversation"
        elif name == "/system":
            self.messages.clear()
            self.system = rest.strip() or None
            told = (
                f"a new conversation, {'with this' if self.system else 'without a'} system's turn"
            )
        sys.stderr.write(told + "\n")

    def _with(self, turn: Message) -> list[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, *self.messages, turn]

    def _answer(self, text: str) -> None:
        turn = Message("user", text)
        asked = self._with(turn)
        try:
            tokens = self.talk.tokens(asked)
            stream = self.talk.stream(tokens)
        except ValueError as error:
            if not self.asked:
                raise
            sys.stderr.write(f"{error}\n")
            return
        try:
            if self.plain is None and console.is_terminal:
                self.plain = self.talk.plain_tokens_per_second(tokens)
            show(stream, console, self.marks, self.plain)
        except KeyboardInterrupt:
            if not self.asked:
                raise
            sys.stderr.write("stopped\n")
        answer = self.talk.answer(asked, stream)
        if answer.content.strip():  # else it was stopped before it began
            self.messages += [turn, answer]
