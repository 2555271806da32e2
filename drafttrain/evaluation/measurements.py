"""The measurements of an evaluation so far, on disk, from which a stopped evaluation resumes."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.core.types import PromptResult
from drafttrain.runtime.disk import digest_of
from drafttrain.runtime.journal import append_records, read_records, replace_records
from drafttrain.runtime.untrusted_input import UntrustedError

Key = tuple[int, int]  # block, batch of prompts

PARTIAL = "measurements.partial.jsonl"
WHOLE = "measurements.jsonl"
VERSION = 4  # of what is measured, and how: times of others are not mixed with these


class Measurements:
    """A file of JSON lines: first the conditions of the measurements, then one line per batch.

    Results measured with other settings, weights, prompts, dtype or threads are not reused, but not
    lost either: the file's name depends on the conditions. A torn last line, which a killed run
    leaves, is skipped.
    """

    def __init__(self, folder: Path, name: str, conditions: Mapping[str, Any]) -> None:
        conditions = {**conditions, "version": VERSION}
        self.mark = digest_of(conditions)
        self.file = folder / f"{name}.{self.mark[:8]}.{PARTIAL}"
        self.whole = folder / f"{name}.{WHOLE}"
        self.known: dict[Key, list[PromptResult]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not self._load():
            replace_records(self.file, [{"mark": self.mark, "conditions": conditions}])

    @property
    def others(self) -> list[Path]:
        """The unfinished files of other conditions."""
        begun = self.file.parent.glob(f"{self.whole.name.removesuffix(WHOLE)}*.{PARTIAL}")
        return sorted(file for file in begun if file != self.file)

    def add(self, key: Key, results: Sequence[PromptResult]) -> None:
        """Write the results of a batch; they are on the disk when this returns."""
        record = {"key": key, "results": [asdict(result) for result in results]}
        append_records(self.file, [record])

    def finish(self) -> None:
        """Rename the file to its final name, so that the next evaluation starts afresh."""
        self.file.replace(self.whole)

    def _load(self) -> bool:
        if self.file.is_symlink() or not self.file.is_file():
            return False  # a link is replaced, and its target is not touched
        with suppress(UntrustedError, StopIteration):
            if next(read_records(self.file, _Head)).mark == self.mark:
                batches = read_records(self.file, _Batch, first=1)
                self.known = {batch.key: batch.results for batch in batches}
                return True
        return False


@dataclass(frozen=True)
class _Head:
    mark: str


@dataclass(frozen=True)
class _Batch:
    key: Key
    results: list[PromptResult]
