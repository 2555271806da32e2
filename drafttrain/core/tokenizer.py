"""The one place that calls a target's tokenizer: it may be anyone's, so it is checked and bounded.

A tokenizer is a program in tokenizer.json: it replaces texts by patterns, and its Rust code ends in
a PanicException, no Exception of Python, where a pattern searches for too long.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafttrain.runtime.untrusted_input import UntrustedError, parse_json, read_bytes, shown

MAX_BYTES = 256 << 20  # of tokenizer.json; the largest published ones have 35 MB
MAX_STEPS = 100  # normalizers, pre-tokenizers, decoders; published tokenizers have a dozen
MAX_STRING = 4000  # characters of a pattern; the longest published one has 500
MAX_GROWTH = 64  # times that all replacements together may lengthen a text
MAX_TOKENS = 64  # for a character; four bytes, or the 18 letters of one ligature, take less
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def check_file(file: Path, origin: str) -> None:
    """Raise UntrustedError if a tokenizer.json lengthens text beyond what any tokenizer needs."""
    if not file.is_file():
        return
    name = f"{origin}: {file.name}"
    plain = parse_json(read_bytes(file, MAX_BYTES, name), name, 40_000_000)
    for key in STEPS:
        growth, count = 1.0, 0
        for step in _objects(plain.get(key) if isinstance(plain, dict) else None):
            count += "type" in step
            texts = [text for text in step.values() if isinstance(text, str)]
            if step.get("type") != "Precompiled" and any(len(text) > MAX_STRING for text in texts):
                raise UntrustedError(f"{name}: a text of its {key} must be of at most {MAX_STRING}")
            added = step.get("content", step.get("prepend", ""))
            pattern = step.get("pattern")
            from_text = pattern.get("String") if isinstance(pattern, dict) else None
            replaced = len(from_text) if isinstance(from_text, str) and from_text else 1
            if step.get("type") in ("Replace", "Prepend") and isinstance(added, str):
                growth *= max(1.0, len(added) / replaced + (step["type"] == "Prepend"))
        if growth > MAX_GROWTH or count > MAX_STEPS:
            raise UntrustedError(
                f"{name}: its {key} must have at most {MAX_STEPS} steps that lengthen a text by at "
                f"most {MAX_GROWTH} times, got {count} steps and {growth:.3g} times"
            )


def _objects(plain: Any) -> Iterator[dict[str, Any]]:
    if isinstance(plain, dict):
        yield plain
    for inner in plain.values() if isinstance(plain, dict) else plain or ():
        if isinstance(inner, dict | list):
            yield from _objects(inner)


def token_ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Return the tokens of a text; special: with those that the tokenizer adds around a text."""
    return list(encoded(tokenizer, [text], add_special_tokens=special)["input_ids"][0])


def encoded(tokenizer: Any, texts: Sequence[str], **options: Any) -> Any:
    """Return what the tokenizer makes of texts; ValueError if it fails, or for too many tokens."""
    with panics_as_errors(tokenizer):
        found = tokenizer(list(texts), **options)
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


@contextmanager
def panics_as_errors(tokenizer: Any) -> Iterator[None]:
    """Raise a ValueError, which names the tokenizer, where its Rust code panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"the tokenizer of {shown_name(tokenizer)} must read any text, and failed: "
            f"{shown(error)}; correct its tokenizer.json, or use another target"
        ) from None


def shown_name(tokenizer: Any) -> str:
    """Return a tokenizer's name for a message."""
    return shown(getattr(tokenizer, "name_or_path", tokenizer) or "the target")
