"""One record of a data set: turns or text in any known spelling, or why it cannot be used."""

import re
from collections.abc import Mapping, Sequence
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
# What a turn or a record may hold besides its text: its target would read or write it as well.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
BESIDE_CONTENT = (
    *("tool_calls", "function_call", "reasoning", "reasoning_content", "reasoning_details"),
    *("thinking", "thought", "thoughts", "cot", "chain_of_thought", "train_detail", *MEDIA),
)
BESIDE_TURNS = ("tools", "functions", "documents", "history", "choices", "options", *MEDIA)
# How formats mark turns as trained or not: OpenAI's, axolotl's, ms-swift's and others.
TRAINED = {"weight": True, "train": True, "training": True, "loss": True, "masked": False}
YES_NO = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
TOKENS = (
    "a row of tokens (input_ids with loss_mask or labels), which are not read: give its turns "
    "(messages), or its text with data.template=none"
)
# Rows of instructions, as Alpaca, Dolly, OpenOrca and TRL spell them.
QUESTIONS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "response", "output", "answer")
CONTEXT = ("input", "context")  # text that belongs to the question
SYSTEM = ("system", "system_prompt", "system_message")
TURNS = ("messages", "conversations")
TEXTS = (*QUESTIONS, *CONTEXT, *SYSTEM, *BESIDE_TURNS)  # what is read beside turns, or refused
NOTHING = ("", "[]", "{}", "null", "none", "on", "off", "true")  # as text, and mere switches


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
    if record.get("label") is False:  # of TRL's format for KTO
        raise Unusable("an answer that is marked as bad (label: false)")
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
    `answered` is set. A system prompt beside the turns becomes the first of them. Unusable for a
    record with other text that a model would read, or write with its answer: see `refuse`.
    """
    some = {key: value for key, value in object_of(record).items() if value}
    key = next((key for of in (some, record) for key in keys if of.get(key) is not None), None)
    if key is None:
        if "text" in record:
            raise Unusable("text without turns, which needs data.template=none")
        raise Unusable(f"without {', '.join(keys[:-1])} or {keys[-1]}", f"has {', '.join(record)}")
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
            turns = [opening, *turns]
    others = {*TURNS, *TEXTS, *(BESIDE_CONTENT if answered else ())} - {key}
    refuse("a record", record, tuple(name for name in record if name in others), turns=turns)
    return turns


def _with_context(question: Any, context: list[Any]) -> list[Any]:
    """Return a question as turns; its context follows it on a new line, as in LLaMA-Factory."""
    if isinstance(question, list):
        return question
    parts = [checked_text(part, "input") for part in context if part not in (None, question)]
    parts = [part for part in [checked_text(question, "turn 1"), *parts] if part.strip()]
    return [{"role": "user", "content": "\n".join(parts)}]


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
    trained = True
    for key, when in TRAINED.items():
        if (value := turn.get(key)) not in (None, ""):  # as in a table with the column
            found = YES_NO.get(str(value).strip().lower())
            if found is None:
                detail = f"turn {place}: {str(value)[:40]}"
                raise Unusable(f"a {key} that is neither 0 nor 1", detail)
            trained = trained and found == when
    return Message(roles[role], content, trained)


def refuse(
    what: str,
    mapping: dict[str, Any],
    keys: tuple[str, ...],
    place: str = "",
    turns: Sequence[Any] = (),
) -> None:
    """Raise Unusable where one of these keys has text that is not, as whole lines, in a turn."""
    present = [key for key in keys if mapping.get(key)]
    known = [f"\n{text}\n" for text in _texts(turns)] if present else []
    for key in present:
        for text in _texts(mapping[key]):
            if text.lower() not in NOTHING and not any(f"\n{text}\n" in each for each in known):
                raise Unusable(f"{what} with {key}, which is not trained", place)


def _texts(value: Any) -> list[str]:
    """Return a text, or those of a list of texts or turns, without the space around each line."""
    parts = value if isinstance(value, list | tuple) else [value]
    found = [first(part, "content", "value") if isinstance(part, dict) else part for part in parts]
    texts = [str(part if text is None else text) for part, text in zip(parts, found, strict=True)]
    return ["\n".join(map(str.strip, text.strip().splitlines())) for text in texts]


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
