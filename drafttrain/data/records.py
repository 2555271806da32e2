"""One record of a data set: turns or text in any known spelling, or why it cannot be used."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafttrain.runtime.untrusted_input import MAX_VOCABULARY, UntrustedError, parse_json, shown

Roles = Mapping[str, str]
ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model"), "assistant"),
}
UNKNOWN_ROLE = "unknown role (data.roles={NAME: user, assistant or system} maps a name)"
# What a turn or a record may hold besides its text: a chat template writes it, `render` does not.
BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
BESIDE_TURNS = ("tools", "functions", "documents")
UNTRAINED = ("train", "training", "loss")  # false: as axolotl and ms-swift mark a turn
TOKENS = (
    "a row of tokens (input_ids with loss_mask or labels), which are not read: give its turns "
    "(messages), or its text with data.template=none"
)
# Rows of instructions, as Alpaca, Dolly, OpenOrca and TRL spell them.
QUESTIONS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "response", "output", "answer")
CONTEXT = ("input", "context")  # text that belongs to the question
SYSTEM = ("system", "system_prompt")
TURNS = ("messages", "conversations")


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
    if "input_ids" in record and not any(record.get(key) for key in (*TURNS, *QUESTIONS, "text")):
        raise Unusable(TOKENS)
    return record


def messages_of(record: Any, roles: Roles = ROLES) -> tuple[Message, ...]:
    """Return the turns of a record in any of the known spellings; see `check_order`.

    roles: the role that each name of a speaker stands for.
    """
    turns = turns_of(record, *TURNS, *QUESTIONS, answered=True)
    if not turns:
        raise Unusable("empty conversation")
    return tuple(message_of(turn, place, roles=roles) for place, turn in enumerate(turns, 1))


def without_greeting(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the turns without those of the assistant that come before the first of the user.

    They answer nothing, and most chat templates refuse them. A third of ShareGPT has such turns.
    """
    start = int(bool(messages) and messages[0].role == "system")
    stop = start
    while stop < len(messages) and messages[stop].role == "assistant":
        stop += 1
    return messages[:start] + messages[stop:]


def turns_of(record: Any, *keys: str, answered: bool = False) -> list[Any]:
    """Return the turns under the first of these keys that has some.

    A text under one of `QUESTIONS` is a turn of the user, with its context, and with its answer if
    `answered` is set. A system prompt beside the turns becomes the first of them.
    """
    some = {key: value for key, value in object_of(record).items() if value}
    key = next((key for of in (some, record) for key in keys if of.get(key) is not None), None)
    if key is None:
        if "text" in record:
            raise Unusable("text without turns, which needs data.template=none")
        raise Unusable(f"without {', '.join(keys[:-1])} or {keys[-1]}", f"has {', '.join(record)}")
    refuse("a record", record, (*BESIDE_TURNS, *(("history",) if key in QUESTIONS else ())))
    if answered and key in QUESTIONS:
        refuse("a record", record, BESIDE_CONTENT)
    turns = record[key]
    if key in QUESTIONS:
        turns = _with_context(turns, [record.get(name) for name in CONTEXT])
        if answered:
            answer = first(record, *ANSWERS)
            if answer is None:
                raise Unusable(f"a question without an answer ({', '.join(ANSWERS)})")
            pair = isinstance(answer, list)  # of turns, as TRL has them
            turns = turns + answer if pair else [*turns, {"role": "assistant", "content": answer}]
    if isinstance(turns, dict):  # how `datasets` stores a sequence of structs
        if not all(isinstance(column, list) for column in turns.values()):
            raise Unusable("turns are not a list", "dict")
        if len({len(column) for column in turns.values()}) > 1:
            raise Unusable("turns of unequal length")
        rows = zip(*turns.values(), strict=True)
        turns = [dict(zip(turns, values, strict=True)) for values in rows]
    if not isinstance(turns, list):
        raise Unusable("turns are not a list", type(turns).__name__)
    if (system := first(some, *SYSTEM)) is not None:
        opening = {"role": "system", "content": system}
        begins = bool(turns) and isinstance(turns[0], dict)
        if not begins or first(turns[0], "role", "from") != "system":
            return [opening, *turns]
        if message_of(turns[0], 1) != message_of(opening, 1):
            raise Unusable("a system prompt beside turns that begin with another")
    return turns


def _with_context(question: Any, context: list[Any]) -> list[Any]:
    """Return a question as turns; its context follows it on a new line, as in LLaMA-Factory."""
    parts = [checked_text(part, "input") for part in context if part not in (None, "", question)]
    if isinstance(question, list) and not parts:
        return question
    if isinstance(question, list):
        raise Unusable("a question in turns, with an input beside them")
    content = "\n".join([checked_text(question, "turn 1"), *parts])
    return [{"role": "user", "content": content}]


def message_of(turn: Any, place: int, rewritten: bool = False, roles: Roles = ROLES) -> Message:
    """Return one turn, spelled role/content or from/value.

    rewritten: an answer is written anew, so that it may hold more than its text.
    """
    if not isinstance(turn, dict):
        raise Unusable("a turn is not an object", f"turn {place}: {type(turn).__name__}")
    role = first(turn, "role", "from")
    if not isinstance(role, str) or role not in roles:
        raise Unusable(UNKNOWN_ROLE, f"turn {place}: {str(role)[:40]!r}")
    if not (rewritten and roles[role] == "assistant"):
        refuse("a turn", turn, BESIDE_CONTENT, f"turn {place}")
    content = content_of(first(turn, "content", "value"), f"turn {place}")
    if not content.strip() and roles[role] != "system":
        raise Unusable("an empty turn", f"turn {place}")
    weight = turn.get("weight")  # of OpenAI's fine-tuning format; null where a table has the column
    if weight not in (None, 0, 1):
        raise Unusable("a weight that is neither 0 nor 1", f"turn {place}: {str(weight)[:40]}")
    untrained = weight == 0 or any(turn.get(key) in (False,) for key in UNTRAINED)
    return Message(roles[role], content, not untrained)


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
    turns = roles[1:] if roles[:1] == ["system"] else roles
    for place, role in enumerate(turns):
        expected = ("user", "assistant")[place % 2]
        if role != expected:
            detail = f"turn {place + 1 + len(roles) - len(turns)}: {role} instead of {expected}"
            raise Unusable("user and assistant do not alternate", detail)
    if "assistant" not in turns:
        raise Unusable("no assistant turn")
