"""One record of a data set: turns or text in any known spelling, or why it cannot be used."""

import json
from dataclasses import dataclass
from typing import Any

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: str  # system, user or assistant
    content: str


class Unusable(ValueError):
    """One record cannot be used: the reason it is counted under, and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def parse(line: bytes) -> Any:
    """Return what a line holds, or the `Unusable` that says what is wrong with it."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Unusable("not UTF-8", f"byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Unusable("not JSON", str(error))


def plain_text(record: Any) -> str:
    """Return the text of a record for data.template=none."""
    if not isinstance(record, dict):
        raise Unusable("not an object", type(record).__name__)
    if "text" not in record:
        if "messages" in record or "conversations" in record:
            raise Unusable('conversation where data.template=none takes {"text": ...}')
        raise Unusable("without text")
    return checked_text(record["text"], "text")


def first(mapping: dict[str, Any], *keys: str) -> Any:
    """Return the value of the first key that has one: tables fill missing columns with null."""
    return next((mapping[key] for key in keys if mapping.get(key) is not None), None)


def messages_of(record: Any) -> tuple[Message, ...]:
    """Return the turns of a record in any of the known spellings."""
    if not isinstance(record, dict):
        raise Unusable("not an object", type(record).__name__)
    turns = first(record, "messages", "conversations")
    if turns is None:
        if "text" in record:
            raise Unusable("text without turns, which needs data.template=none")
        raise Unusable("without messages or conversations")
    if isinstance(turns, dict):  # how `datasets` stores a sequence of structs
        turns = transposed(turns)
    if not isinstance(turns, list):
        raise Unusable("turns are not a list", type(turns).__name__)
    if not turns:
        raise Unusable("empty conversation")
    messages = tuple(message_of(turn, place) for place, turn in enumerate(turns, 1))
    check_order(messages)
    return messages


def transposed(turns: dict[str, Any]) -> list[dict[str, Any]]:
    """Turn a dictionary of lists into a list of dictionaries."""
    columns = list(turns.values())
    if not all(isinstance(column, list) for column in columns):
        raise Unusable("turns are not a list", "dict")
    if len({len(column) for column in columns}) > 1:
        raise Unusable("turns of unequal length")
    return [dict(zip(turns, values, strict=True)) for values in zip(*columns, strict=True)]


def message_of(turn: Any, place: int) -> Message:
    """Return one turn, spelled role/content or from/value."""
    if not isinstance(turn, dict):
        raise Unusable("a turn is not an object", f"turn {place}: {type(turn).__name__}")
    role = first(turn, "role", "from")
    if not isinstance(role, str) or role not in ROLES:
        raise Unusable("unknown role", f"turn {place}: {str(role)[:40]!r}")
    content = checked_text(first(turn, "content", "value"), f"turn {place}")
    if not content.strip() and ROLES[role] != "system":
        raise Unusable("an empty turn", f"turn {place}")
    return Message(ROLES[role], content)


def checked_text(text: Any, place: str) -> str:
    """Return `text` if it is a string that can be encoded."""
    if not isinstance(text, str):
        raise Unusable("content is not a string", f"{place}: {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unusable("content is not valid Unicode", f"{place}: a lone surrogate") from None
    return text


def check_order(messages: tuple[Message, ...]) -> None:
    """Raise unless user and assistant alternate, after at most one system turn."""
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    for place, role in enumerate(turns):
        expected = ("user", "assistant")[place % 2]
        if role != expected:
            detail = f"turn {place + 1 + len(roles) - len(turns)}: {role} instead of {expected}"
            raise Unusable("user and assistant do not alternate", detail)
    if "assistant" not in turns:
        raise Unusable("no assistant turn")
