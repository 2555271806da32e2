"""One record of a data set: turns or text in any known spelling, or why it cannot be used."""

import re
from dataclasses import dataclass
from typing import Any

from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, UntrustedError, parse_json, shown

ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model"), "assistant"),
}
# What a turn or a record may hold besides its text: a chat template writes it, `render` does not.
BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
BESIDE_TURNS = ("tools", "functions")


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: str  # system, user or assistant
    content: str
    trained: bool = True  # False: an answer that is context only


@dataclass(frozen=True)
class Recorded:
    """An answer as its target wrote it."""

    tokens: tuple[int, ...] | None  # None: only its text is known
    finished: bool  # else it was cut, and no end of turn follows it
    prompt: tuple[int, ...] | None = None  # the prompt it answers, where that is known


class Unusable(ValueError):
    """One record cannot be used: the reason it is counted under, and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, shown(detail)


def parse(line: bytes) -> Any:
    """Return the content of a line, or the `Unusable` that describes what is wrong with it."""
    try:
        return parse_json(line.decode("utf-8-sig"), "a record")
    except UnicodeDecodeError as error:
        return Unusable("not UTF-8", f"byte {error.start}")
    except UntrustedError as error:
        # The line of the file is known; within it, JSON counts columns.
        reason = re.sub(r" at line \d+ column (\d+)", r" at column \1", str(error))
        return Unusable("not JSON", reason.rpartition("got: ")[2])


def plain_text(record: Any) -> str:
    """Return the text of a record for data.template=none."""
    if "text" not in object_of(record):
        if "messages" in record or "conversations" in record:
            raise Unusable('conversation where data.template=none takes {"text": ...}')
        raise Unusable("without text")
    return checked_text(record["text"], "text")


def first(mapping: dict[str, Any], *keys: str) -> Any:
    """Return the value of the first key that has one: tables fill missing columns with null."""
    return next((mapping[key] for key in keys if mapping.get(key) is not None), None)


def object_of(record: Any) -> dict[str, Any]:
    """Return a record as an object; Unusable if it is none."""
    if not isinstance(record, dict):
        raise Unusable("not an object", type(record).__name__)
    return record


def messages_of(record: Any) -> tuple[Message, ...]:
    """Return the turns of a record in any of the known spellings."""
    if first(object_of(record), "messages", "conversations") is None and "text" in record:
        raise Unusable("text without turns, which needs data.template=none")
    turns = turns_of(record, "messages", "conversations")
    if not turns:
        raise Unusable("empty conversation")
    messages = tuple(message_of(turn, place) for place, turn in enumerate(turns, 1))
    check_order(messages)
    return messages


def turns_of(record: Any, *keys: str) -> list[Any]:
    """Return the turns under the first of these keys that has some; a text counts as one turn."""
    some = {key: value for key, value in object_of(record).items() if value}
    turns = first(some, *keys) or first(record, *keys)
    if turns is None:
        raise Unusable(f"without {', '.join(keys[:-1])} or {keys[-1]}")
    refuse("a record", record, BESIDE_TURNS)
    if isinstance(turns, str) and "prompt" in keys:
        return [turns]
    if isinstance(turns, dict):  # how `datasets` stores a sequence of structs
        if not all(isinstance(column, list) for column in turns.values()):
            raise Unusable("turns are not a list", "dict")
        if len({len(column) for column in turns.values()}) > 1:
            raise Unusable("turns of unequal length")
        rows = zip(*turns.values(), strict=True)
        return [dict(zip(turns, values, strict=True)) for values in rows]
    if not isinstance(turns, list):
        raise Unusable("turns are not a list", type(turns).__name__)
    return turns


def message_of(turn: Any, place: int, rewritten: bool = False) -> Message:
    """Return one turn, spelled role/content or from/value.

    rewritten: an answer is written anew, so that it may hold more than its text.
    """
    if not isinstance(turn, dict):
        raise Unusable("a turn is not an object", f"turn {place}: {type(turn).__name__}")
    role = first(turn, "role", "from")
    if not isinstance(role, str) or role not in ROLES:
        raise Unusable("unknown role", f"turn {place}: {str(role)[:40]!r}")
    if not (rewritten and ROLES[role] == "assistant"):
        refuse("a turn", turn, BESIDE_CONTENT, f"turn {place}")
    content = content_of(first(turn, "content", "value"), f"turn {place}")
    if not content.strip() and ROLES[role] != "system":
        raise Unusable("an empty turn", f"turn {place}")
    weight = turn.get("weight")  # of OpenAI's fine-tuning format; null where a table has the column
    if weight not in (None, 0, 1):
        raise Unusable("a weight that is neither 0 nor 1", f"turn {place}: {str(weight)[:40]}")
    return Message(ROLES[role], content, weight != 0 and turn.get("train") is not False)


def refuse(what: str, mapping: dict[str, Any], keys: tuple[str, ...], place: str = "") -> None:
    """Raise Unusable where one of these keys has something: its target would write other text."""
    for key in keys:
        if str(mapping.get(key) or "").strip() not in ("", "[]"):  # some tables hold lists as text
            raise Unusable(f"{what} with {key}, which is not trained", place)


def content_of(content: Any, place: str) -> str:
    """Return the text of a turn, which may come in OpenAI's parts: [{"type": "text", ...}]."""
    if not isinstance(content, list):
        return checked_text(content, place)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise Unusable("content with parts that are no text", f"{place}: {kind}")
        texts.append(checked_text(part.get("text"), place))
    return "".join(texts)


def recorded_of(record: dict[str, Any], num_answers: int) -> tuple[Recorded | None, ...]:
    """Return the answers that a line of `regenerate` or selfgen records; empty if it has none.

    One for each of the assistant's turns, None for those that were not written anew.
    """
    if isinstance(record.get("tokens"), list) and "num_prompt_tokens" in record:  # selfgen
        tokens, start = _token_ids(record["tokens"]), record["num_prompt_tokens"]
        if type(start) is not int or not 0 < start < len(tokens) or num_answers != 1:
            raise Unusable("recorded tokens do not fit the turns", f"num_prompt_tokens {start}")
        return (Recorded(tokens[start:], record.get("finished") is True, tokens[:start]),)
    answers = record.get("answers")
    ours = isinstance(answers, list) and all(
        isinstance(answer, dict) and isinstance(answer.get("finished"), bool) for answer in answers
    )
    if not answers or not ours:
        return ()
    if len(answers) > num_answers:
        raise Unusable("recorded answers do not fit the turns", f"{len(answers)} recorded")
    found = [
        Recorded(None if (ids := each.get("tokens")) is None else _token_ids(ids), each["finished"])
        for each in answers
    ]
    return (*[None] * (num_answers - len(found)), *found)


def _token_ids(tokens: Any) -> tuple[int, ...]:
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < MAX_VOCABULARY for token in tokens
    ):
        raise Unusable("recorded tokens are no token ids")
    if not tokens:
        raise Unusable("an empty turn", "no recorded tokens")
    return tuple(tokens)


def checked_text(text: Any, place: str) -> str:
    """Return `text` if it is a string that can be encoded; else raise Unusable."""
    if not isinstance(text, str):
        raise Unusable("content is not a string", f"{place}: {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unusable("content is not valid Unicode", f"{place}: a lone surrogate") from None
    return text


def check_order(messages: tuple[Message, ...]) -> None:
    """Raise Unusable unless user and assistant alternate, after at most one system turn."""
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    for place, role in enumerate(turns):
        expected = ("user", "assistant")[place % 2]
        if role != expected:
            detail = f"turn {place + 1 + len(roles) - len(turns)}: {role} instead of {expected}"
            raise Unusable("user and assistant do not alternate", detail)
    if "assistant" not in turns:
        raise Unusable("no assistant turn")
