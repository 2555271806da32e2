"""An answer while it is decoded: text as soon as it is verified, told apart by who wrote it."""

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from drafttrain.core.types import Decoded
from drafttrain.decode.rows import Passes, Row

# Who wrote a token: the drafter, and the target accepted it; the target, in place of a rejected
# draft, after a draft that was accepted whole, or where nothing was drafted.
ACCEPTED, CORRECTED, BONUS, PLAIN = "accepted", "corrected", "bonus", "plain"


@dataclass(frozen=True)
class Piece:
    """New tokens of one writer. The text of an unfinished character comes with its last token."""

    text: str
    tokens: tuple[int, ...]
    writer: str  # ACCEPTED, CORRECTED, BONUS or PLAIN


def written_by(drafted: int, accepted: int, kept: int) -> list[tuple[str, int]]:
    """Return who wrote the tokens that a pass added to an output, and how many each, in order.

    drafted: tokens of the proposal, or of its deepest path; kept: of the new tokens, those that
    reached the output, which may end inside an accepted run.
    """
    by_drafter = min(accepted, kept)
    found = [(ACCEPTED, by_drafter)] if by_drafter else []
    if kept > by_drafter:
        last = PLAIN if drafted == 0 else BONUS if accepted == drafted else CORRECTED
        found.append((last, kept - by_drafter))
    return found


class Stream:
    """The pieces of one answer, decoded as they are asked for: `for`, or `async for` in a thread.

    What has been decoded so far is in `tokens`, `text` and `pieces`; `num_passes` and `seconds` of
    the wall are those after the prefill. `decoded` is there once the answer has ended; `close` ends
    it where it is.
    """

    def __init__(self, passes: Passes, tokenizer: Any, depth: int) -> None:
        self.tokens: list[int] = []
        self.pieces: list[Piece] = []
        self.text = ""
        self.num_passes, self.seconds = 0, 0.0
        self.decoded: Decoded | None = None
        self._passes, self._tokenizer, self._depth = passes, tokenizer, depth
        self._pieces = self._decode()

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens for each pass of the target after the prefill, so far."""
        return (len(self.tokens) - 1) / self.num_passes if self.num_passes else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens for each second after the prefill, so far."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else None

    def close(self) -> None:
        """End the answer where it is; a stream that has ended stays as it is."""
        self._pieces.close()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while True:
                piece = await asyncio.to_thread(next, self._pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            self.close()

    def _decode(self) -> Generator[Piece, None, None]:
        spell, began = DecodeStream(skip_special_tokens=True), time.perf_counter()
        writer = PLAIN
        for row in self._rows():
            drafted = accepted = 0
            if self.tokens:  # else this is the prefill's
                self.num_passes += 1
                self.seconds += time.perf_counter() - began
                _, drafted, accepted = row.stats.cycles[-1] if row.stats.cycles else (0, 0, 0)
            new = row.output[len(self.tokens) :]
            for writer, count in written_by(min(drafted, self._depth), accepted, len(new)):
                own, new = new[:count], new[count:]
                parts = [spell.step(self._tokenizer.backend_tokenizer, token) for token in own]
                self.tokens += own
                yield self._piece("".join(part or "" for part in parts), own, writer)
            began = time.perf_counter()
        # An answer may end inside a character.
        whole = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        if whole.startswith(self.text) and whole != self.text:
            yield self._piece(whole[len(self.text) :], [], writer)

    def _rows(self) -> Iterator[Row]:
        """Yield the row after each pass; keep what was decoded at the end."""
        while True:
            try:
                (row,) = next(self._passes)
            except StopIteration as end:
                (self.decoded,) = end.value
                return
            yield row

    def _piece(self, text: str, tokens: list[int], writer: str) -> Piece:
        self.text += text
        self.pieces.append(Piece(text, tuple(tokens), writer))
        return self.pieces[-1]
