"""Marks of a model's thoughts in text: <think> and </think>, and what other models call them."""

import re

WORD = r"(?:think|thought|reason)"
# <think>, [THINK], <seed:think>, </think>, <|END_THINKING|>
MARK = re.compile(rf"[<\[][^<>\[\]\s]{{0,40}}{WORD}[^<>\[\]\s]{{0,40}}[>\]]", re.IGNORECASE)
# </think>, [/THINK], <|/think|>, <|END_THINKING|>, and <channel|>, which ends <|channel>
CLOSING = re.compile(
    r"</[^<>\s]{1,40}>|<\|/[^<>\s]{1,40}>|\[/[^\[\]\s]{1,40}\]|<[^<>|\s]{1,40}\|>"
    rf"|<\W?end[^<>\s]{{0,40}}{WORD}[^<>\s]{{0,40}}>",
    re.IGNORECASE,
)


def marks_of(text: str) -> list[bool]:
    """Return the marks of thoughts in a text, in order: True for one that closes a thought."""
    return [CLOSING.fullmatch(mark) is not None for mark in MARK.findall(text)]


def closed_length(text: str) -> int:
    """Return the length of the start of `text` up to its last closing mark, with space after it."""
    ends = [found.end() for found in CLOSING.finditer(text)]
    if not ends:
        return 0
    return len(text) - len(text[ends[-1] :].lstrip())


def after_thought(text: str) -> str:
    """Return what follows the last mark that closes a thought; all of a text without one."""
    ends = [mark.end() for mark in MARK.finditer(text) if CLOSING.fullmatch(mark[0])]
    return text[ends[-1] :].lstrip() if ends else text


def begins_with_thought(answer: str) -> bool:
    """Return whether an answer begins with a mark that opens a thought."""
    found = MARK.match(answer.lstrip())
    return found is not None and not CLOSING.fullmatch(found[0])


def start_of_answer(text: str, answer: str) -> int | None:
    """Return where the answer begins that `text` ends with; None if it does not end with it.

    Templates write other space around an answer, and around the marks of its thoughts.
    """
    pieces = re.split(f"({MARK.pattern})", answer, flags=re.IGNORECASE)
    at = len(text)
    for piece in reversed([piece.strip() for piece in pieces if piece.strip()]):
        at = len(text[:at].rstrip())
        if not text.endswith(piece, 0, at):
            return None
        at -= len(piece)
    return at


def repeated_length(prompt: str, answer: str, least: int) -> int:
    """Return how long the start of `answer` is that `prompt` ends with already; 0 if there is none.

    least: characters of the prompt's end that the answer must repeat.
    """
    for start in range(len(prompt) - least + 1):
        end = prompt[start:]
        for repeated in (end, end.rstrip()):
            if repeated.strip() and answer.startswith(repeated):
                return len(repeated)
    return 0
