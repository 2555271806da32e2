"""Answers to one prompt or to a file of them."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.commands.setup.talk import Talk, ready_to_talk
from drafttrain.config.sections import ChatConfig
from drafttrain.data.evaluation_prompts import Prompt, read_prompts
from drafttrain.data.files import SUFFIXES
from drafttrain.data.records import Message
from drafttrain.decode.rows import check_tokens
from drafttrain.decode.stream import Stream
from drafttrain.report.answers import show
from drafttrain.runtime.disk import require_writable
from drafttrain.runtime.journal import append_records, read_records
from drafttrain.runtime.lock import hold, of_answers, require_free
from drafttrain.runtime.terminal import console, progress
from drafttrain.runtime.untrusted_input import UntrustedError, read_bytes, shown

MAX_FILE = 64 << 20  # bytes of a file of prompts, a line each
FIRST = b'{"id": '  # how each line of chat.out begins


def generate(config: ChatConfig) -> None:
    """Answer the prompts, and print the answers or write them to chat.out."""
    settings = config.chat
    prompts = asked(config)
    if settings.out is None:
        talk = ready_to_talk(config)
        for row, prompt in enumerate(prompts):
            if len(prompts) > 1 and console.is_terminal:
                console.print(f"{prompt.id}:", style="dim")
            answered(talk, prompt, row, lambda stream: show(stream, console, settings.marks))
        return
    out = Path(settings.out).expanduser()
    check_out(out, settings.file)
    require_free(out, "chat.out", file=of_answers(out))
    talk = ready_to_talk(config)
    with hold(out, "chat.out", "generate", console.print, file=of_answers(out)):
        write(talk, prompts, out)


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
        try:
            prompts, skipped = read_prompts(file, None, config.data.known_roles)
        except ValueError as error:  # it reads eval.prompts too
            raise ValueError(str(error).replace("eval.prompts", "chat.file", 1)) from error
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


def answered(talk: Talk, prompt: Prompt, row: int, decode: Callable[[Stream], Any]) -> list[Stream]:
    """Answer every turn of a prompt, the row-th, by `decode`, and return the answers."""
    system = talk.config.chat.system
    messages = [Message("system", system)] if system else []
    streams = []
    for turn in prompt.turns:
        messages.append(Message("user", turn))
        try:
            stream = talk.stream(talk.tokens(messages), row)
        except ValueError as error:
            raise ValueError(f"{prompt.id}: {error}") from error
        decode(stream)
        messages.append(talk.answer(messages, stream))
        streams.append(stream)
    return streams


@dataclass(frozen=True)
class _Answered:
    """What is read again of a line of chat.out."""

    id: str
    mark: str


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


def write(talk: Talk, prompts: list[Prompt], out: Path) -> None:
    """Write an answer for each prompt that `out` has none for.

    ValueError, before anything is decoded, if it holds answers of other settings or weights, or for
    a prompt that cannot become tokens of the target.
    """
    for prompt in prompts:
        try:
            tokens = [talk.tokens([Message("user", turn)]) for turn in prompt.turns]
            check_tokens(talk.loaded.target.spec, tokens)
        except ValueError as error:
            raise ValueError(f"chat.file: {prompt.id}: {error}") from error
    marks = {prompt.id: _mark(talk.conditions, prompt) for prompt in prompts}
    done = set()
    try:
        for record in read_records(out, _Answered) if out.exists() else ():
            if marks.get(record.id) != record.mark:
                raise ValueError(
                    f"chat.out={out} must be a new file, or hold answers to these prompts by these "
                    f"settings and weights, got another's for {shown(record.id)}"
                )
            done.add(record.id)
    except UntrustedError as error:
        raise ValueError(f"chat.out must be a new file, or one of `generate`: {error}") from None
    with progress("answers", len(prompts), done=len(done)) as tick:
        for row, prompt in enumerate(prompts):
            if prompt.id not in done:
                streams = answered(talk, prompt, row, Stream.rest)
                append_records(out, [_record(prompt, streams, marks[prompt.id])])
                tick()
    console.print(f"answers: {out}")


def _mark(conditions: dict[str, Any], prompt: Prompt) -> str:
    content = json.dumps([conditions, prompt.turns], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _record(prompt: Prompt, streams: list[Stream], mark: str) -> dict[str, Any]:
    answers = [
        {
            "text": stream.text,
            "cut": stream.cut,
            "pieces": [[piece.writer, len(piece.tokens)] for piece in stream.pieces],
            "tokens": stream.tokens,
            "tokens_per_pass": stream.tokens_per_pass,
        }
        for stream in streams
    ]
    return {"id": prompt.id, "mark": mark, "turns": list(prompt.turns), "answers": answers}
