"""The one place that calls a target's tokenizer: it may be anyone's, so it is checked and bounded.

A tokenizer is a program in tokenizer.json: it replaces texts by patterns, and its Rust code ends in
a PanicException, no Exception of Python, where a pattern searches for too long. It encodes in a
thread, without the interpreter's lock, so that a call which takes too long can be given up.
"""

import base64
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from drafttrain.runtime.untrusted_input import UntrustedError, parse_json, read_bytes, shown

MAX_BYTES = 256 << 20  # of tokenizer.json; the largest published ones have 35 MB
MAX_STEPS = 100  # normalizers, pre-tokenizers, decoders; published tokenizers have a dozen
MAX_STRING = 4000  # characters of a pattern; the longest published one has 500
MAX_GROWTH = 64  # times that all replacements together may lengthen a text
MAX_TOKENS = 64  # for a character; four bytes, or the 18 letters of one ligature, take less
SECONDS, CHARACTERS = 60.0, 10_000  # that a tokenizer may take; and, besides, a second for so many
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def check_file(file: Path, origin: str) -> None:
    """Raise UntrustedError if a tokenizer.json could make too much of a text, or of a token."""
    if not file.is_file():
        return
    name = f"{origin}: {file.name}"
    plain = parse_json(read_bytes(file, MAX_BYTES, name), name, 40_000_000)
    plain = plain if isinstance(plain, dict) else {}
    model = next(_objects(plain.get("model")), {})
    tokens = model["vocab"] if isinstance(model.get("vocab"), dict | list) else ()
    scored = (part for token in tokens if isinstance(token, list) for part in token)  # Unigram's
    added = (token.get("content") for token in _objects(plain.get("added_tokens")))
    _require_short(name, "model", [*tokens, *scored, *added, *model.values()])
    for key in STEPS:
        growth, count = 1.0, 0
        for step in _objects(plain.get(key)):
            count += "type" in step
            charsmap = step.pop("precompiled_charsmap", None)
            _require_short(name, key, step.values())
            added = step.get("content", step.get("prepend", ""))
            pattern = step.get("pattern")
            if key == "decoder" and isinstance(pattern, dict) and "Regex" in pattern:
                # Its time cannot be bounded: decoding keeps the interpreter's lock.
                raise UntrustedError(f"{name}: its decoder must replace no Regex, got one")
            from_text = pattern.get("String") if isinstance(pattern, dict) else None
            replaced = len(from_text) if isinstance(from_text, str) and from_text else 1
            if step.get("type") in ("Replace", "Prepend") and isinstance(added, str):
                growth *= max(1.0, len(added) / replaced + (step["type"] == "Prepend"))
            growth *= 1 if charsmap is None else _longest_of(charsmap, name)
        if growth > MAX_GROWTH or count > MAX_STEPS:
            raise UntrustedError(
                f"{name}: its {key} must have at most {MAX_STEPS} steps that lengthen a text by at "
                f"most {MAX_GROWTH} times, got {count} steps and {growth:.3g} times"
            )


def _require_short(name: str, key: str, texts: Iterable[Any]) -> None:
    if any(isinstance(text, str) and len(text) > MAX_STRING for text in texts):
        raise UntrustedError(f"{name}: a text of its {key} must be of at most {MAX_STRING}")


def _longest_of(charsmap: Any, name: str) -> int:
    """Return the most characters that sentencepiece's charsmap puts in place of one, at least 1.

    It is the size of a trie of 32-bit numbers, the trie, and texts that end with a zero byte.
    UntrustedError unless it is: Rust may end the whole process at another one.
    """
    try:
        content = base64.b64decode(charsmap, validate=True)
        size = int.from_bytes(content[:4], "little")
        whole = len(content) >= 4 + size and size % 4 == 0
        texts = content[4 + size :].decode().split("\0")
    except (TypeError, ValueError):
        whole, texts = False, []
    if not whole:
        raise UntrustedError(f"{name}: a precompiled_charsmap must be one of sentencepiece's")
    return max(1, *map(len, texts))


def _objects(plain: Any) -> Iterator[dict[str, Any]]:
    if isinstance(plain, dict):
        yield plain
        plain = list(plain.values())
    for inner in plain if isinstance(plain, list) else ():
        yield from _objects(inner)


def token_ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Return the tokens of a text; special: with those that the tokenizer adds around a text."""
    return list(encoded(tokenizer, [text], add_special_tokens=special)["input_ids"][0])


def encoded(tokenizer: Any, texts: Sequence[str], **options: Any) -> Any:
    """Return what the tokenizer makes of texts.

    ValueError if it fails, takes too long, or gives too many tokens.
    """
    found = _in_time(
        tokenizer, sum(map(len, texts)) / CHARACTERS, lambda: tokenizer(list(texts), **options)
    )
    for text, ids in zip(texts, found["input_ids"], strict=True):
        if len(ids) > MAX_TOKENS * (len(text) + 1):
            raise ValueError(
                f"the tokenizer of {shown_name(tokenizer)} must give at most {MAX_TOKENS} tokens "
                f"for a character, got {len(ids):,} for {len(text):,}; use that of another target"
            )
    return found


def text_of(tokenizer: Any, tokens: Sequence[int], **options: Any) -> str:
    """Return the text of tokens; ValueError if the tokenizer fails."""
    with panics_as_errors(tokenizer):
        return str(tokenizer.decode(list(tokens), **options))


_seconds_left: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def _in_time(tokenizer: Any, seconds: float, call: Callable[[], Any]) -> Any:
    """Return what a call of a tokenizer gives; ValueError once its calls have taken too long.

    seconds: what this call adds to the time that this tokenizer has.
    """
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # it is raised where the call was made
            answer.set_exception(error)

    left = _seconds_left.get(tokenizer, SECONDS) + seconds
    if left > 0:
        threading.Thread(target=work, daemon=True).start()
    while left > 0 and not answer.done():
        begun = time.monotonic()
        with suppress(TimeoutError):
            answer.exception(min(1.0, left))
        left -= min(1.0, time.monotonic() - begun)  # this process may have been stopped
    _seconds_left[tokenizer] = left
    if not answer.done():
        raise ValueError(
            f"the tokenizer of {shown_name(tokenizer)} must read {CHARACTERS:,} characters a "
            f"second, and was not done {SECONDS:g} s after that; correct its tokenizer.json, or "
            "use another target"
        )
    with panics_as_errors(tokenizer):
        return answer.result()


@contextmanager
def panics_as_errors(tokenizer: Any) -> Iterator[None]:
    """Raise a ValueError, which names the tokenizer, where its Rust code panics or fails."""
    try:
        yield
    except BaseException as error:  # of failures it raises Exception itself
        if type(error).__name__ != "PanicException" and type(error) is not Exception:
            raise
        raise ValueError(
            f"the tokenizer of {shown_name(tokenizer)} must read any text, and failed: "
            f"{shown(error)}; correct its tokenizer.json, or use another target"
        ) from None


def shown_name(tokenizer: Any) -> str:
    """Return a tokenizer's name for a message."""
    return shown(getattr(tokenizer, "name_or_path", tokenizer) or "the target")
