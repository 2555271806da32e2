"""Where the assistant's words stand in a rendered chat template: offsets, whatever the template."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from drafttrain.data.records import Message, Unusable

USER, ANSWER = (
    "Kx7user7xK",
    "Kx7answer{}7xK",
)  # stand for contents; templates print them as they are


@dataclass(frozen=True)
class ChatFormat:
    """What a template writes around a user turn and an answer."""

    opening: str  # before the first user turn, a default system prompt with it
    closing: str  # after a user turn, up to where the assistant takes over
    prompt_closing: str  # the same where generation is asked for: some templates add to it
    tail: str  # after an answer


def render(messages: Sequence[Message], tokenizer: Any, add_generation_prompt: bool = False) -> str:
    """Return the conversation as the template writes it; Unusable if the template refuses it."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except jinja2.TemplateError as error:
        raise Unusable("the chat template refuses it", str(error)) from None


def require_template(tokenizer: Any) -> None:
    """Raise unless the tokenizer has a chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            "data.template=chat needs a tokenizer with a chat template, and"
            f" {tokenizer.name_or_path or 'this one'} has none; set data.template=none to train on"
            ' plain text ({"text": ...} records)'
        )


def template_fingerprint(tokenizer: Any) -> str:
    """Return a hash of the chat template: what stored conversations are bound to."""
    return hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()[:32]


def chat_format(tokenizer: Any) -> ChatFormat:
    """Find out what the template writes by rendering words that stand for contents."""
    require_template(tokenizer)
    user, answer = Message("user", USER), Message("assistant", ANSWER.format(0))
    prompt = render([user], tokenizer, add_generation_prompt=True).split(USER)
    pair = re.split(f"{USER}|{answer.content}", render([user, answer], tokenizer))
    if len(prompt) == 2 and len(pair) == 3:
        closing = os.path.commonprefix([prompt[1], pair[1]])  # noqa: RUF071 (no paths)
        if closing:
            return ChatFormat(prompt[0], closing, prompt[1], pair[2])
    raise ValueError(
        f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} must write each turn"
        " once, with something between user and assistant; correct tokenizer.chat_template"
    )


def assistant_spans(
    messages: Sequence[Message], tokenizer: Any, form: ChatFormat, specials: re.Pattern[str]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered conversation and the offsets of what the assistant writes in it.

    A span starts where generation would start and ends with the token that ends the turn. It is
    found by rendering the conversation a second time with words in place of the answers: between
    those words stands what surrounds the answers, also where the template trims them, rewrites
    them, or moves the system prompt to the last turn. Unusable if the two renderings do not agree.
    """
    text = render(messages, tokenizer)
    around = surroundings(messages, tokenizer)
    answers = [message.content for message in messages if message.role == "assistant"]
    parts = [split_header(piece, form) for piece in around[:-1]]
    if not text.startswith(parts[0][0]):
        raise Unusable("the chat template hides where the assistant speaks", "turn 1")
    headers = [header for header, _ in parts] + [around[-1]]
    position, spans = 0, []
    for place, (answer, (header, added)) in enumerate(zip(answers, parts, strict=True)):
        start = position + len(header)
        following, last = headers[place + 1], place + 1 == len(answers)
        position = find_end(text, start, added, answer, following, last)
        ending = specials.match(around[place + 1])
        spans.append((start, position + (ending.end() if ending else 0)))
    return text, spans


def surroundings(messages: Sequence[Message], tokenizer: Any) -> list[str]:
    """Return what the template writes before, between and after the answers."""
    masked: list[Message] = []
    words: list[str] = []
    for message in messages:
        if message.role == "assistant":
            words.append(ANSWER.format(len(words)))
            masked.append(Message("assistant", words[-1]))
        else:
            masked.append(message)
    rest, pieces = render(masked, tokenizer), []
    for place, word in enumerate(words, 1):
        piece, found, rest = rest.partition(word)
        if not found:
            raise Unusable("the chat template leaves out an answer", f"answer {place}")
        pieces.append(piece)
    return [*pieces, rest]


def split_header(piece: str, form: ChatFormat) -> tuple[str, str]:
    """Split what precedes an answer: what the prompt ends with, and what the model itself adds.

    Qwen3, for one, writes an empty <think> block there: the model's tokens, not the prompt's.
    """
    at = piece.rfind(form.closing)
    if at < 0:
        raise Unusable("the chat template hides where the assistant speaks")
    at += len(form.closing)
    return piece[:at], piece[at:]


def find_end(text: str, start: int, added: str, answer: str, following: str, last: bool) -> int:
    """Return where the answer that begins at `start` ends and `following` begins."""
    for content in (answer, answer.strip(), answer.rstrip(), answer.lstrip()):
        end = start + len(added) + len(content)
        if text.startswith(added + content + following, start) and (
            not last or end + len(following) == len(text)
        ):
            return end
    if last:  # rewritten by the template: what follows is known, and it must follow once
        end = len(text) - len(following)
        if end >= start and text.endswith(following):
            return end
    elif text.count(following, start) == 1:
        return text.index(following, start)
    raise Unusable("the chat template rewrites an answer beyond recognition")
