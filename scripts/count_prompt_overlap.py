"""Count the overlap of a file of prompts with training text, and write it next to the prompts.

usage: count_prompt_overlap.py CONVERSATIONS.jsonl[.gz] [PROMPTS.jsonl]

The record names both files by sha256. `evaluate` reads and prints it, so the text itself need not
be shipped.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from drafttrain.data.evaluation_prompts import (
    count_overlap,
    overlap_line,
    overlap_path,
    read_prompts,
    sha256_of,
)
from drafttrain.data.files import file_records
from drafttrain.data.records import Unusable, messages_of
from drafttrain.data.suites import BUILTIN_PROMPTS


def turns_of(training: Path) -> Iterator[list[str]]:
    for where, record in file_records(training):
        if isinstance(record, Unusable):
            raise SystemExit(f"{where}: {record.reason} ({record.detail})")
        yield [message.content for message in messages_of(record)]


def main(training: Path, path: Path) -> None:
    prompts, report = read_prompts(path, None)
    if report.num_skipped:
        raise SystemExit("\n".join(report.lines()))
    record = {
        "prompts": path.name,
        "prompts_sha256": sha256_of(path),
        "training": training.name,
        "training_sha256": sha256_of(training),
        **count_overlap(prompts, turns_of(training)),
    }
    overlap_path(path).write_text(json.dumps(record, indent=2) + "\n")
    print(overlap_line(record))
    for task, counts in record["tasks"].items():
        print(f"  {task}: {overlap_line({**record, **counts}).split(': ', 1)[1]}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else BUILTIN_PROMPTS)
