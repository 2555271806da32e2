"""What a target is asked: conversations whose answers it writes anew, or prompts alone."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from drafttrain.data.conversations import DataConfig, ReadConfig
from drafttrain.data.files import usable_of
from drafttrain.data.records import (
    QUESTIONS,
    TURNS,
    Message,
    Roles,
    Unusable,
    checked_text,
    message_of,
    turns_of,
    without_greeting,
)
from drafttrain.data.skips import SkipReport

ALL, LAST = "all", "last"  # which answers are written anew


@dataclass(frozen=True)
class Question:
    """One conversation to answer: `messages` end with the user turn that is answered last.

    Assistant turns among them are kept as they are. `index` counts the usable conversations,
    `source` is its file and line, `digest` the hash of its messages.
    """

    messages: tuple[Message, ...]
    index: int
    source: str
    digest: str


def read_asked(config: DataConfig, turns: str) -> tuple[list[Question], SkipReport]:
    """Read the questions from the files or the data set that `config` names.

    A record is a conversation in any spelling that training reads, with or without answers, a list
    of user turns (`turns`), or one prompt (`prompt`, `instruction`). turns: all answers are left
    out, or only the last. ValueError if nothing can be used, or if `config` reads no conversations.
    """
    if config.template != "chat":
        raise ValueError(
            f"data.template must be chat to regenerate, got {config.template}: plain text has no "
            "turns to answer"
        )
    if not isinstance(config, ReadConfig):
        raise ValueError(
            f"data must hold prompts to regenerate, got data={config.name}, which writes its own; "
            "use data=jsonl data.path=FILE"
        )

    def take(record: Any, index: int, where: str) -> Question:
        messages = left_open(messages_asked(record, turns, config.known_roles), turns)
        return Question(messages, index, where, digest_of(messages))

    must = f"{config.place} must hold usable prompts"
    found, report = usable_of(config.records(), config.limit, take, must)
    config.note_unread(report)
    return found, report


def messages_asked(record: Any, turns: str, roles: Roles) -> tuple[Message, ...]:
    """Return the turns of a record, with its answers where it has some; turns: see `read_asked`."""
    found = turns_of(record, *TURNS, "turns", *QUESTIONS)
    messages = without_greeting(
        tuple(
            Message("user", checked_text(turn, f"turn {place}"))
            if isinstance(turn, str)
            else message_of(turn, place, turns == ALL or place == len(found), roles)
            for place, turn in enumerate(found, 1)
        )
    )
    for place, message in enumerate(messages, 1):
        if message.role == "system" and place > 1:
            raise Unusable("a system turn that is not the first", f"turn {place}")
        before = messages[place - 2].role if place > 1 else "none"
        if message.role == "assistant" and before != "user":
            raise Unusable("an answer without a question", f"turn {place}")
        if message.role == "user" and not message.content.strip():
            raise Unusable("an empty turn", f"turn {place}")
    return messages


def left_open(messages: tuple[Message, ...], turns: str) -> tuple[Message, ...]:
    """Return a conversation up to its last user turn, with old answers only if they are kept."""
    users = [place for place, message in enumerate(messages) if message.role == "user"]
    if not users:
        raise Unusable("no user turn")
    messages = messages[: users[-1] + 1]
    if turns == ALL:
        return tuple(message for message in messages if message.role != "assistant")
    for place in users[:-1]:
        if messages[place + 1].role != "assistant":
            raise Unusable("an earlier turn without the answer that is to be kept", "")
    return messages


def digest_of(messages: tuple[Message, ...]) -> str:
    """Return a hash that identifies a conversation."""
    text = json.dumps([[message.role, message.content] for message in messages])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
