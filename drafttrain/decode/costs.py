"""The seconds of passes on a machine, as measured: by depth, rows and context."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CELL = ("batch", "context")
NAMES = {
    **{kind: CELL for kind in ("plain", "read")},
    **{kind: ("depth", *CELL) for kind in ("verify", "draft")},
}


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
        return {
            kind: [
                dict(zip((*names, "ms"), (*key, 1000 * seconds), strict=True))
                for key, seconds in getattr(self, kind).items()
            ]
            for kind, names in NAMES.items()
        }

    @classmethod
    def of_records(cls, records: Mapping[str, Iterable[Mapping[str, float]]]) -> "Costs":
        """Return the costs that a file holds. ValueError for gaps and for what cannot be."""
        kinds: dict[str, dict[Any, float]] = {}
        for kind, names in NAMES.items():
            try:
                cells = [[*(cell[name] for name in names), cell["ms"]] for cell in records[kind]]
            except KeyError as error:
                raise ValueError(f"costs must have {error}, got none") from None
            if not all(value > 0 for cell in cells for value in cell):
                raise ValueError("costs must be above 0, at sizes above 0, got others")
            kinds[kind] = {tuple(map(int, key)): ms / 1000 for *key, ms in cells}
        plain, draft = kinds["plain"], kinds["draft"]
        batches, contexts = (sorted({key[place] for key in plain}) for place in (0, 1))
        depths = {key[0] for key in draft}
        whole = bool(draft) and len(plain) == len(batches) * len(contexts)
        whole = whole and set(plain) == set(kinds["read"]) and set(draft) == set(kinds["verify"])
        whole = whole and len(draft) == len(depths) * len(plain)
        if not whole or not all(key[1:] in plain for key in draft):
            raise ValueError("costs must have every depth, batch and context, got gaps")
        return cls(batches, contexts, plain, kinds["verify"], draft, kinds["read"])
