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
from drafttrain.report.answers import DRAFTED, LEGEND, AnswerView, numbers_of
from drafttrain.runtime.signals import answered_by
from drafttrain.runtime.terminal import console

COMMANDS = "/new begins a new conversation, /system TEXT sets the system's turn, /exit ends"
ASK = "> "


def chat(config: ChatConfig) -> None:
    """Talk to the target: in a terminal, or each line of a pipe is a turn."""
    at_terminal = sys.stdin.isatty() and console.is_terminal
    if at_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited, and earlier ones come back)
        console.print(f"drafttrain {__version__}: chat")
        talk = ready_to_talk(config)
    else:  # only the answers are written
        with console.capture():
            talk = ready_to_talk(config)
    Conversation(talk, config, at_terminal).run()


class Conversation:
    """The turns so far, and how they are shown."""

    def __init__(self, talk: Talk, config: ChatConfig, at_terminal: bool) -> None:
        self.talk, self.at_terminal, self.marks = talk, at_terminal, config.chat.marks
        self.system, self.said = config.chat.system, list[Message]()
        self.plain: float | None = None  # tokens per second of the target alone
        talk.tokens(self._with(Message("user", "Hello")))  # a base model has no chat template

    def run(self) -> None:
        """Answer turns until there are no more."""
        if self.at_terminal:
            if self.marks:
                console.print(Text(LEGEND).append(DRAFTED, DRAFTED))
            console.print(COMMANDS)
        # Ctrl-C stops an answer, and at the prompt the command.
        with answered_by(signal.default_int_handler, [signal.SIGINT]):
            for text in self._turns():
                if text.startswith("/") and self.at_terminal:
                    if text.split()[0] == "/exit":
                        return
                    self._obey(text)
                else:
                    self._answer(text)

    def _turns(self) -> Iterator[str]:
        """Yield the user's turns, without empty ones."""
        while True:
            try:
                line = input(ASK) if self.at_terminal else sys.stdin.readline()
            except EOFError:
                console.print()
                return
            if not line and not self.at_terminal:
                return
            if line.strip():
                yield line.strip()

    def _obey(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name in ("/new", "/system"):
            self.said.clear()
        if name == "/system":
            self.system = rest.strip() or None
        known = {"/new": "a new conversation", "/system": "a new conversation, with this system"}
        console.print(known.get(name, COMMANDS))

    def _with(self, turn: Message) -> list[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, *self.said, turn]

    def _answer(self, text: str) -> None:
        turn = Message("user", text)
        try:
            tokens = self.talk.tokens(self._with(turn))
            stream = self.talk.stream(tokens)
        except ValueError as error:
            if not self.at_terminal:
                raise
            console.print(f"{error}; /new begins a new conversation")
            return
        if not self.at_terminal:
            for piece in stream:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
        else:
            try:
                if self.plain is None:
                    self.plain = self.talk.plain_tokens_per_second(tokens)
                with AnswerView(
                    console, lambda: numbers_of(stream, self.plain), self.marks
                ) as view:
                    for piece in stream:
                        view.add(piece)
            except KeyboardInterrupt:
                console.print("stopped")
        if stream.text.strip():  # else it was stopped before it began
            self.said += [turn, Message("assistant", stream.text)]
