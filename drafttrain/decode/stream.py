"""An answer while it is decoded: text as soon as it is verified, told apart by who wrote it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from drafttrain.core.tokenizer import text_of
from drafttrain.core.types import Decoded
from drafttrain.decode.rows import Passes

# Who wrote a token: the drafter, and the target accepted it; the target, in place of a rejected
# draft, after a draft that was accepted as deep as it went, or where nothing was drafted.
ACCEPTED, CORRECTED, BONUS, UNDRAFTED = "accepted", "corrected", "bonus", "plain"


@dataclass(frozen=True)
class Piece:
    """New tokens of one writer. The text of an unfinished character comes with its last token."""

    text: str
    tokens: tuple[int, ...]
    writer: str  # ACCEPTED, CORRECTED, BONUS or UNDRAFTED


def written_by(depth: int, accepted: int, kept: int) -> list[tuple[str, int]]:
    """Return who wrote the tokens that a pass added to an output, and how many each, in order.

    depth: of the proposal, 0 without one; kept: of the new tokens, those that reached the output,
    which may end inside an accepted run.
    """
    by_drafter = min(accepted, kept)
    found = [(ACCEPTED, by_drafter)] if by_drafter else []
    if kept > by_drafter:
        last = UNDRAFTED if depth == 0 else BONUS if accepted == depth else CORRECTED
        found.append((last, kept - by_drafter))
    return found


class Spelling:
    """The text of tokens as they come, in whole characters."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._before = self._spelled = 0  # tokens before the last ones, and those in a text so far

    def new_text(self, at_end: bool = False) -> str:
        """Return the text of the tokens that had none yet, if its characters are whole.

        The tokens before them are decoded too, as a token's text depends on them. (The decoder of
        streams in `tokenizers` raises where a target writes bytes that are no character.)
        """
        decode = partial(text_of, self._tokenizer, skip_special_tokens=True)
        known = decode(self.tokens[self._before : self._spelled])
        whole = decode(self.tokens[self._before :])
        if len(whole) <= len(known) or (whole.endswith("\ufffd") and not at_end):
            return ""
        self._before, self._spelled = self._spelled, len(self.tokens)
        return whole[len(known) :]


def pieces_of(decoded: Decoded, tokenizer: Any) -> list[Piece]:
    """Return the pieces of a speculative output whose passes were recorded."""
    stats, spelling, pieces = decoded.stats, Spelling(tokenizer), []
    ends = [*(start for start, _, _ in stats.cycles), len(decoded.tokens)]
    runs = [(UNDRAFTED, ends[0])]  # the prefill's
    for (start, drafted, accepted), end, (_, depth, *_) in zip(
        stats.cycles, ends[1:], stats.passes, strict=True
    ):
        runs += written_by(min(depth, drafted), accepted, end - start)
    for writer, count in runs:
        own = decoded.tokens[len(spelling.tokens) :][:count]
        spelling.tokens += own
        pieces.append(Piece(spelling.new_text(), own, writer))
    if rest := spelling.new_text(at_end=True):  # an output may end inside a character
        pieces.append(Piece(rest, (), pieces[-1].writer))
    return pieces


class Stream:
    """The pieces of one answer, decoded as they are asked for: `for`, or `async for` in a thread.

    What has been decoded so far is in `tokens`, `text` and `pieces`; `num_passes` and `seconds` of
    the wall are those after the prefill. Once the answer has ended, `decoded` is there. `close`, or
    the end of a `with` block, ends it where it is, and frees what it holds.
    """

    def __init__(self, passes: Passes, tokenizer: Any, limit: int) -> None:
        self.pieces: list[Piece] = []
        self.text = ""
        self.limit = limit  # of tokens
        self.num_passes, self.seconds = 0, 0.0
        self.turn_of: Callable[[Sequence[int]], Any]  # the turn of an answer's tokens
        self.decoded: Decoded | None = None
        self._passes, self._spelling = passes, Spelling(tokenizer)
        self._ready: deque[Piece] = deque()
        self._ended = self._cut = False

    @property
    def tokens(self) -> list[int]:
        """The tokens decoded so far."""
        return self._spelling.tokens

    @property
    def message(self) -> dict[str, str]:
        """The answer so far as a turn, for the messages of the next question.

        Its content is without what the chat template writes itself, such as a header.
        """
        turn = self.turn_of(self.tokens)
        return {"role": turn.role, "content": turn.content}

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens for each pass of the target after the prefill, so far."""
        return (len(self.tokens) - 1) / self.num_passes if self.num_passes else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens for each second after the prefill, so far."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else None

    @property
    def cut(self) -> bool:
        """Whether the answer ended at its limit, without a stop."""
        return self.decoded is not None and self._cut

    def close(self) -> None:
        """End the answer where it is; a stream that has ended stays as it is."""
        self._ended = True
        self._ready.clear()
        self._passes.close()

    def rest(self) -> "Stream":
        """Decode to the end."""
        for _ in self:
            pass
        return self

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        while not self._ready and not self._ended:
            self._decode()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        step = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(next, self, None))
                piece = await asyncio.shield(step)
                if piece is None:
                    return
                yield piece
        finally:
            if step is None or step.done():
                self.close()
            else:  # it was cancelled, and its thread still decodes
                step.add_done_callback(lambda _: self.close())

    def _decode(self) -> None:
        """Decode one pass."""
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                (row,) = next(self._passes)
        except StopIteration as end:
            self._ended = True
            if end.value is None:  # an error, or Ctrl-C, ended it before
                return
            (self.decoded,) = end.value
            if rest := self._spelling.new_text(at_end=True):  # an answer may end inside a character
                self._give(rest, [], self.pieces[-1].writer)
            return
        self._cut = row.cut
        depth = accepted = 0
        if self.tokens:  # else it is the prefill's
            self.num_passes += 1
            self.seconds += time.perf_counter() - began
            if row.stats.cycles:
                depth, (_, _, accepted) = row.depth, row.stats.cycles[-1]
        new = row.output[len(self.tokens) :]
        for writer, count in written_by(depth, accepted, len(new)):
            own, new = new[:count], new[count:]
            self._spelling.tokens += own
            self._give(self._spelling.new_text(), own, writer)

    def _give(self, text: str, tokens: Sequence[int], writer: str) -> None:
        self.text += text
        self.pieces.append(Piece(text, tuple(tokens), writer))
        self._ready.append(self.pieces[-1])
