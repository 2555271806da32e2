"""The seconds of passes on a machine, as measured: by depth, rows and context."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Costs:
    """Median seconds by batch and context: a plain step, and per depth a draft and a pass over it.

    `draft` is the drafter's part of a cycle: a proposal, and reading the accepted tokens. `read` is
    the drafter's reading of the whole context.
    """

    batches: Sequence[int]
    contexts: Sequence[int]
    plain: dict[tuple[int, int], float]  # batch, context
    verify: dict[tuple[int, int, int], float]  # depth, batch, context
    draft: dict[tuple[int, int, int], float]
    read: dict[tuple[int, int], float] = field(default_factory=dict)

    def plain_s(self, rows: int, context: float) -> float:
        """Return the seconds of a plain step, interpolated between measurements."""
        return self._between(lambda batch, length: self.plain[batch, length], rows, context)

    def read_s(self, rows: int, context: float) -> float:
        """Return the seconds in which the drafter reads a context; it takes longer by its length.

        Beyond the longest one that was measured, in proportion.
        """
        measured = self._between(lambda batch, length: self.read[batch, length], rows, context)
        return measured * max(context / self.contexts[-1], 1.0)

    def draft_s(self, depth: int, rows: int, context: float) -> float:
        """Return the drafter's seconds in a cycle at a measured depth, interpolated."""
        return self._between(lambda b, c: self.draft[depth, b, c], rows, context)

    def verify_s(self, depth: int, rows: int, context: float) -> float:
        """Return the target's seconds in a cycle at a measured depth, interpolated."""
        return self._between(lambda b, c: self.verify[depth, b, c], rows, context)

    def cycle_s(self, depth: int, rows: int, context: float) -> float:
        """Return the seconds of a cycle at a measured depth, interpolated."""
        return self.draft_s(depth, rows, context) + self.verify_s(depth, rows, context)

    @property
    def depths(self) -> list[int]:
        """The depths that were measured, ascending."""
        return sorted({depth for depth, *_ in self.draft})

    def _between(self, value: Callable[[int, int], float], rows: int, context: float) -> float:
        by_batch = [
            float(np.interp(context, self.contexts, [value(batch, c) for c in self.contexts]))
            for batch in self.batches
        ]
        return float(np.interp(rows, self.batches, by_batch))

    def records(self) -> dict[str, list[dict[str, float]]]:
        """Return the costs in milliseconds, for a file; `of_records` reads them."""
        names = ("depth", "batch", "context")

        def cells(values: Mapping[Any, float], names: Sequence[str]) -> list[dict[str, float]]:
            told = values.items()
            return [dict(zip((*names, "ms"), (*key, 1000 * s), strict=True)) for key, s in told]

        return {
            "plain": cells(self.plain, names[1:]),
            "read": cells(self.read, names[1:]),
            "verify": cells(self.verify, names),
            "draft": cells(self.draft, names),
        }

    @classmethod
    def of_records(cls, records: Mapping[str, Iterable[Mapping[str, float]]]) -> "Costs":
        """Return the costs that a file holds. ValueError where a cell is missing."""
        try:
            plain, read = (
                {(int(cell["batch"]), int(cell["context"])): cell["ms"] / 1000 for cell in cells}
                for cells in (records["plain"], records["read"])
            )
            verify, draft = (
                {
                    (int(cell["depth"]), int(cell["batch"]), int(cell["context"])): cell["ms"]
                    / 1000
                    for cell in cells
                }
                for cells in (records["verify"], records["draft"])
            )
        except KeyError as error:
            raise ValueError(f"costs must have {error}, got none") from None
        batches, contexts = (sorted({key[place] for key in plain}) for place in (0, 1))
        found = cls(batches, contexts, plain, verify, draft, read)
        wanted = {(batch, context) for batch in batches for context in contexts}
        by_depth = {(depth, *cell) for depth in found.depths for cell in wanted}
        whole = wanted == set(plain) == set(read) and by_depth == set(draft) == set(verify)
        if not wanted or not by_depth or not whole:
            raise ValueError("costs must have every depth, batch and context, got gaps")
        if not all(value > 0 for part in (plain, read, verify, draft) for value in part.values()):
            raise ValueError("costs must be above 0, got another")
        return found
