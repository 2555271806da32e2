"""What was left out of a data set, and why: counted, and named by line."""

from dataclasses import dataclass, field
from typing import Any

MAX_EXAMPLES = 3


@dataclass
class SkipReport:
    """Counts of skipped records by reason, with the places of the first few of each."""

    num_read: int = 0  # records looked at, skipped ones with them
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    what: str = "conversations"  # what a record is, for the printed line

    def skip(self, reason: str, where: str, detail: str = "") -> None:
        """Count one skipped record; `where` is its file and line."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(f"{where} ({detail})" if detail else where)

    def __add__(self, other: "SkipReport") -> "SkipReport":
        """Return the report of two stations one after the other: the first one did the reading."""
        total = SkipReport(max(self.num_read, other.num_read), what=self.what)
        for report in (self, other):
            for reason, count in report.counts.items():
                total.counts[reason] = total.counts.get(reason, 0) + count
                places = total.examples.setdefault(reason, [])
                places.extend(report.examples[reason][: MAX_EXAMPLES - len(places)])
        return total

    @property
    def num_skipped(self) -> int:
        """How many records were left out."""
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """Return what to print: nothing if nothing was skipped."""
        if not self.counts:
            return []
        lines = [f"skipped {self.num_skipped:,} of {self.num_read:,} {self.what}:"]
        for reason, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            places = ", ".join(self.examples[reason])
            more = ", ..." if count > len(self.examples[reason]) else ""
            lines.append(f"  {count:,} x {reason}: {places}{more}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the report for provenance.json."""
        return {"num_read": self.num_read, "skipped": self.counts, "examples": self.examples}


class NothingUsable(ValueError):
    """Every record was skipped; the message carries the report."""

    def __init__(self, what: str, report: SkipReport, advice: str) -> None:
        head, *reasons = [line.strip() for line in report.lines()] or [""]
        told = f" ({head} {'; '.join(reasons)})" if head else ""
        super().__init__(f"{what}{told}; {advice}")
