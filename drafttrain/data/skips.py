"""What was left out of a data set, and why: counted, and named by line."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from drafttrain.data.records import Unusable

MAX_EXAMPLES = 3


@dataclass
class SkipReport:
    """Counts of skipped records by reason, with the places of the first few of each."""

    num_read: int = 0  # records read, with the skipped ones
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    what: str = "conversations"  # what a record is, for the printed line
    notes: Counter[str] = field(default_factory=Counter)  # on records that are kept

    def skip(self, reason: str, where: str, detail: str = "") -> None:
        """Count one skipped record; `where` is its file and line."""
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(f"{where} ({detail})" if detail else where)

    @contextmanager
    def skipping(self, where: str) -> Iterator[None]:
        """Skip the record that the block finds `Unusable`."""
        try:
            yield
        except Unusable as error:
            self.skip(error.reason, where, error.detail)

    def note(self, text: str, count: int = 1) -> None:
        """Count something about records that are kept."""
        if count:
            self.notes[text] += count

    def __add__(self, other: "SkipReport") -> "SkipReport":
        """Return the report of two stations in sequence, of which the first read the records."""
        counts = self.counts + other.counts
        examples = {
            reason: [*self.examples.get(reason, []), *other.examples.get(reason, [])][:MAX_EXAMPLES]
            for reason in counts
        }
        num_read = max(self.num_read, other.num_read)
        return SkipReport(num_read, counts, examples, self.what, self.notes + other.notes)

    @property
    def num_skipped(self) -> int:
        """How many records were left out."""
        return self.counts.total()

    def reasons(self) -> list[str]:
        """Return each reason with its count and first places, the commonest first."""
        found = []
        for reason, count in self.counts.most_common():
            places = ", ".join(self.examples[reason])
            more = ", ..." if count > len(self.examples[reason]) else ""
            found.append(f"{count:,} x {reason}: {places}{more}")
        return found

    def lines(self) -> list[str]:
        """Return the lines to print; empty if nothing was skipped and there are no notes."""
        notes = [f"{count:,} {text}" for text, count in self.notes.items()]
        if not self.counts:
            return notes
        return [f"{self._title()}:", *(f"  {reason}" for reason in self.reasons()), *notes]

    def sentence(self) -> str:
        """Return what was skipped as part of a one-line message."""
        return f"{self._title()}: {'; '.join(self.reasons())}"

    def _title(self) -> str:
        return f"skipped {self.num_skipped:,} of {self.num_read:,} {self.what}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report for provenance.json."""
        return {
            "num_read": self.num_read,
            "skipped": dict(self.counts),
            "examples": self.examples,
            "notes": dict(self.notes),
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "SkipReport":
        """Return the report on conversations that `to_dict` gave."""
        counts, notes = Counter(found["skipped"]), Counter(found["notes"])
        return cls(found["num_read"], counts, found["examples"], notes=notes)


class NothingUsable(ValueError):
    """Every record was skipped; the message carries the report."""

    def __init__(self, what: str, report: SkipReport, advice: str) -> None:
        skipped = f" ({report.sentence()})" if report.counts else ""
        super().__init__(f"{what}{skipped}; {advice}")
