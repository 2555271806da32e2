"""Conversations from local files and from the Hub; what cannot be used is counted and named."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, ClassVar

from drafttrain.core.sampling_config import Temperature
from drafttrain.data.files import (
    ELSE,
    Record,
    dataset_records,
    file_records,
    find_files,
    left_out,
    usable_of,
)
from drafttrain.data.records import (
    BESIDE_CONTENT,
    QUESTIONS,
    ROLES,
    TEXTS,
    TURNS,
    Message,
    Recorded,
    Roles,
    Unusable,
    check_order,
    message_of,
    messages_of,
    plain_text,
    recorded_of,
    turns_of,
    without_greeting,
)
from drafttrain.data.skips import SkipReport
from drafttrain.data.template import Template
from drafttrain.runtime import limits
from drafttrain.runtime.disk import digest_of
from drafttrain.runtime.lock import of_answers, require_free
from drafttrain.runtime.settings import Limit, Settings, require
from drafttrain.runtime.untrusted_input import shown

RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}  # given anyway
GREETING = "conversations begin with the assistant: what it says before the user is left out"
LEFT_OUT = "files or folders in data.path are not read"
MAX_KWARGS = 10_000  # characters
ALL, LAST = "all", "last"  # the answers that `regenerate` writes anew
ANSWERS = "answers"  # which tokens are trained: these, or ALL
DATA_SET = Limit(
    "name a data set on the Hub or a local directory",
    bool,
    "; for example data.repo=HuggingFaceH4/ultrachat_200k",
)
NOT_GREEDY = Limit("be above 0, or every conversation would be the same", bool)


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """The settings that every source of conversations has."""

    section = "data"

    name: str
    max_length: Annotated[int, limits.at_least(2)]  # tokens
    holdout: limits.NonNegativeInt  # conversations
    template: Annotated[str, limits.one_of("chat", "none")]  # none: plain text
    template_kwargs: dict[str, Any]
    template_date: Annotated[str, Limit("be a day such as 2026-01-31", _is_day)]
    roles: dict[str, Any]  # more names of speakers, each with the role it stands for
    preview: limits.NonNegativeInt  # conversations
    train_on: Annotated[str, limits.one_of(ANSWERS, ALL)]
    seed: limits.NonNegativeInt

    def __post_init__(self) -> None:
        super().__post_init__()
        taken = [key for key in self.template_kwargs if key in RESERVED or not key.isidentifier()]
        told = "name variables of the chat template that it is not given anyway"
        require(not taken, "data.template_kwargs", told, ", ".join(taken))
        wrong = [
            f"{name}={role}" for name, role in self.roles.items() if role not in ROLES.values()
        ]
        require(not wrong, "data.roles", "map names to user, assistant or system", ", ".join(wrong))
        try:
            plain = json.dumps(self.template_kwargs, allow_nan=False)
        except (ValueError, TypeError):
            plain = ""
        bounds = f"hold plain values of at most {MAX_KWARGS:,} characters"
        self.require("template_kwargs", 0 < len(plain) <= MAX_KWARGS, bounds)

    def check_text(self) -> None:
        """Raise ValueError where these settings give no text to train on."""

    @property
    def known_roles(self) -> dict[str, str]:
        """The role that each name of a speaker stands for."""
        return {**ROLES, **self.roles}

    @property
    def text_format(self) -> Template:
        """How turns become text."""
        return Template(self.template, self.template_kwargs, self.template_date)


@dataclass(frozen=True, kw_only=True)
class SelfgenConfig(DataConfig):
    """The target writes its own conversations; see `regenerate`."""

    num_conversations: limits.PositiveInt
    batch_size: limits.PositiveInt
    user_temperature: Annotated[Temperature, NOT_GREEDY]
    answer_temperature: Temperature
    top_k: limits.NonNegativeInt
    top_p: limits.PositiveFraction
    max_user_tokens: limits.PositiveInt
    max_answer_tokens: limits.PositiveInt
    cache_dir: str

    def check_text(self) -> None:
        """Raise ValueError where no conversation can be written."""
        self.require(
            "template",
            self.template == "chat",
            "be chat for data=selfgen, which starts from the chat template's opening",
            "; give text of your own with data=jsonl data.path=FILE data.template=none",
        )


@dataclass(frozen=True, kw_only=True)
class ReadConfig(DataConfig, ABC):
    """Conversations that are read from a source; subclasses read them."""

    limit: limits.PositiveInt | None
    key: ClassVar[str]  # the setting that names the source

    @property
    def place(self) -> str:
        """The setting that names the source of the records, with its value."""
        return f"data.{self.key}={getattr(self, self.key)}"

    def note_unread(self, report: SkipReport) -> None:
        """Note what lies in a directory that is named and is not read."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yield the records; ValueError if they cannot be reached."""


@dataclass(frozen=True, kw_only=True)
class JsonlConfig(ReadConfig):
    """Local files, one record a line (a .json file holds one list of records)."""

    path: Any  # a file, a directory or a glob, or a list of those
    key = "path"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "path",
            bool(self.paths) and all(isinstance(path, str) and path for path in self.paths),
            "name a file, a directory or a glob, or a list of those",
            "; for example data.path=conversations.jsonl",
        )

    @property
    def paths(self) -> list[Any]:
        """The path, or the paths, as a list."""
        return [self.path] if not isinstance(self.path, list | tuple) else list(self.path)

    def note_unread(self, report: SkipReport) -> None:
        """Note what lies in a directory that is named and is not read."""
        names = [name for path in self.paths for name in left_out(path)]
        report.note(f"{LEFT_OUT}: {shown(', '.join(names), 400)}; {ELSE}", len(names))

    def records(self) -> Iterator[Record]:
        """Yield the records of the files; ValueError if a path names none."""
        files = [file for path in self.paths for file in find_files(path)]
        for file in files:  # answers that `regenerate` still writes are incomplete
            require_free(file, "data.path", file=of_answers(file))
        for file in files:
            yield from file_records(file)


@dataclass(frozen=True, kw_only=True)
class HubConfig(ReadConfig):
    """A data set on the Hugging Face Hub, or in a local directory that `datasets` understands."""

    repo: Annotated[str | None, DATA_SET]
    revision: str | None
    subset: str | None
    files: str | None
    split: str
    streaming: bool
    column: str | None
    prompt_column: str | None
    response_column: str | None
    key = "repo"

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = (self.prompt_column, self.response_column)
        require(
            all(pair) if self.column is None else not any(pair),
            "data.column",
            "name the column of messages (or text), unless data.prompt_column and"
            " data.response_column both do",
            f"column={self.column} prompt_column={pair[0]} response_column={pair[1]}",
        )

    def records(self) -> Iterator[Record]:
        """Yield the rows in the spelling of local files; ValueError without such columns."""
        rows = dataset_records(
            "data.repo",
            str(self.repo),
            self.subset,
            self.split,
            self.revision,
            "data=jsonl data.path=FILE",
            data_files=self.files,
            streaming=self.streaming,
        )
        asked, answered = str(self.prompt_column), str(self.response_column)
        for where, row in rows:
            names = [self.column] if self.column else [asked, answered]
            if isinstance(row, Unusable):
                yield where, row
                continue
            if missing := [name for name in names if name not in row]:
                there = shown(", ".join(row))
                raise ValueError(f"data.column: no column {', '.join(missing)} (there are {there})")
            kept = {*TEXTS, *BESIDE_CONTENT} - {*names, *(() if self.column else QUESTIONS)}
            record = {key: row[key] for key in kept if key in row}
            if self.column:
                record["text" if self.template == "none" else "messages"] = row[self.column]
            else:
                record |= {"prompt": row[asked], "completion": row[answered]}
            yield where, record


@dataclass(frozen=True)
class Conversation:
    """Turns in order; `index` counts the usable conversations, `source` is its file and line."""

    messages: tuple[Message, ...]
    index: int
    source: str
    recorded: tuple[Recorded | None, ...] = ()  # of each answer, where its target's are recorded

    @property
    def digest(self) -> str:
        """What identifies its turns, wherever they stand."""
        return digest_of([[turn.role, turn.content] for turn in self.messages])[:16]


@dataclass(frozen=True)
class PlainText:
    """Text without turns, for targets without a chat template."""

    text: str
    index: int
    source: str


Conversations = list[Conversation] | list[PlainText]


def read(config: DataConfig) -> tuple[Conversations, SkipReport]:
    """Read the conversations that `config` names; ValueError if none can be reached or used."""
    assert isinstance(config, ReadConfig), f"{config.name} is not read but generated"
    num_greetings = 0

    def take(record: Any, index: int, where: str) -> Conversation | PlainText:
        if config.template == "none":
            return PlainText(plain_text(record), index, where)
        nonlocal num_greetings
        said = messages_of(record, config.known_roles)
        messages = without_greeting(said)
        check_order(messages)
        num_greetings += len(messages) < len(said)
        answers = sum(message.role == "assistant" for message in messages)
        return Conversation(messages, index, where, recorded_of(record, answers))

    must = f"{config.place} must hold usable conversations"
    found, report = usable_of(config.records(), config.limit, take, must)
    report.note(GREETING, num_greetings)
    config.note_unread(report)
    return found, report


def read_asked(config: DataConfig, turns: str) -> tuple[list[Conversation], SkipReport]:
    """Read the conversations to answer from the files or the data set that `config` names.

    Each ends with the user turn that is answered last; answers in it stay as they are. A record is
    a conversation in any spelling that training reads, with or without answers, a list of user
    turns (`turns`), or one prompt (`prompt`, `instruction`). turns: all answers are left out, or
    only the last. ValueError if nothing can be used, or if `config` reads no conversations.
    """
    why = ": plain text has no turns to answer"
    config.require("template", config.template == "chat", "be chat to regenerate", why)
    if not isinstance(config, ReadConfig):
        raise ValueError(
            f"data must hold prompts to regenerate, got data={config.name}, which writes its own; "
            "use data=jsonl data.path=FILE"
        )

    def take(record: Any, index: int, where: str) -> Conversation:
        return Conversation(messages_asked(record, turns, config.known_roles), index, where)

    must = f"{config.place} must hold usable prompts"
    found, report = usable_of(config.records(), config.limit, take, must)
    config.note_unread(report)
    return found, report


def messages_asked(record: Any, turns: str, roles: Roles) -> tuple[Message, ...]:
    """Return the turns of a record up to its last user turn; turns: see `read_asked`."""
    found = turns_of(record, *TURNS, "turns", *QUESTIONS)
    said = []
    for place, turn in enumerate(found, 1):
        spelled = {"role": "user", "content": turn} if isinstance(turn, str) else turn
        said.append(message_of(spelled, place, turns == ALL or place == len(found), roles))
    messages = without_greeting(tuple(said))
    before = "none"
    for place, message in enumerate(messages, 1):
        if message.role == "system" and place > 1:
            raise Unusable("a system turn that is not the first", f"turn {place}")
        if message.role == "assistant" and before != "user":
            raise Unusable("an answer without a question", f"turn {place}")
        before = message.role
    users = [place for place, message in enumerate(messages) if message.role == "user"]
    if not users:
        raise Unusable("no user turn")
    messages = messages[: users[-1] + 1]
    if turns == ALL:
        return tuple(message for message in messages if message.role != "assistant")
    if any(messages[place + 1].role != "assistant" for place in users[:-1]):
        raise Unusable("an earlier turn without the answer that is to be kept")
    return messages
