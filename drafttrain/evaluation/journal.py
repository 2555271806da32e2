"""What an evaluation has measured so far, on disk: a run of hours that stops goes on from there."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.core.types import PromptResult
from drafttrain.runtime.disk import append_text, cut_torn_line, write_whole
from drafttrain.runtime.untrusted_input import UntrustedError, lines_of, typed

Key = tuple[int, int]  # block, batch of prompts

PARTIAL = "measurements.partial.jsonl"
WHOLE = "measurements.jsonl"


class Journal:
    """A file of JSON lines: first what it was measured with, then one line a batch.

    Results measured with other settings, weights, prompts, dtype or threads are not taken up, and
    not lost: what they were measured with names their file. A torn last line, which a killed run
    leaves, is cut off.
    """

    def __init__(self, folder: Path, name: str, conditions: Mapping[str, Any]) -> None:
        self.mark = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
        self.file = folder / f"{name}.{self.mark[:8]}.{PARTIAL}"
        self.whole = folder / f"{name}.{WHOLE}"
        self.known: dict[Key, list[PromptResult]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not self._load():
            write_whole(
                self.file, json.dumps({"mark": self.mark, "conditions": dict(conditions)}) + "\n"
            )

    @property
    def others(self) -> list[Path]:
        """What was begun under other conditions and not finished."""
        begun = self.file.parent.glob(f"{self.whole.name.removesuffix(WHOLE)}*.{PARTIAL}")
        return sorted(file for file in begun if file != self.file)

    @property
    def num_known(self) -> int:
        """How many batches were measured before."""
        return len(self.known)

    def get(self, key: Key) -> list[PromptResult] | None:
        """Return what was measured of a batch in a block, if it was."""
        return self.known.get(key)

    def add(self, key: Key, results: Sequence[PromptResult]) -> None:
        """Write down what was measured; it is on the disk when this returns."""
        line = json.dumps({"key": key, "results": [asdict(result) for result in results]})
        append_text(self.file, line + "\n")

    def finish(self) -> None:
        """Keep the measurements under their final name: the next evaluation begins anew."""
        self.file.replace(self.whole)

    def _load(self) -> bool:
        if self.file.is_symlink() or not self.file.is_file():
            return False  # a link is replaced, and what it stands for is not touched
        cut_torn_line(self.file)
        with suppress(UntrustedError), self.file.open("rb") as stream:
            lines = lines_of(stream)
            if typed(_Head, next(lines, None) or b"", "a line").mark != self.mark:
                return False
            for line in lines:
                batch = typed(_Batch, line or b"", "a line")
                self.known[batch.key] = batch.results
            return True
        self.known = {}
        return False


@dataclass(frozen=True)
class _Head:
    mark: str


@dataclass(frozen=True)
class _Batch:
    key: Key
    results: list[PromptResult]
