"""Count the overlap of a file of prompts with training text, and write it next to the prompts.

usage: count_prompt_overlap.py CONVERSATIONS.jsonl[.gz] [PROMPTS.jsonl]

The record names both files by sha256. `evaluate` reads and prints it, so the text itself need not
be shipped.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drafttrain.data.evaluation_prompts import Prompt, overlap_line, overlap_path, read_prompts
from drafttrain.data.files import file_records
from drafttrain.data.records import Unusable, messages_of
from drafttrain.data.suites import BUILTIN_PROMPTS
from drafttrain.runtime.disk import sha256_of

OVERLAP_WORDS = 8  # words per n-gram of the shipped record: too many to be shared by chance


def normalised(text: str) -> str:
    """Return the text in the form that overlap is counted on: lower-case words, single spaces."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _word_grams(text: str) -> Iterator[tuple[str, ...]]:
    words = normalised(text).split()
    for start in range(len(words) - OVERLAP_WORDS + 1):
        yield tuple(words[start : start + OVERLAP_WORDS])


def count_overlap(
    prompts: Sequence[Prompt], conversations: Iterable[Sequence[str]]
) -> dict[str, Any]:
    """Count what prompts share with training text: equal first prompts, and 8-grams of words.

    `conversations` are the texts of the turns in order. Case, spacing and punctuation do not count.
    """
    first = {normalised(prompt.turns[0]) for prompt in prompts}
    grams = {
        prompt.id: {g for turn in prompt.turns for g in _word_grams(turn)} for prompt in prompts
    }
    wanted = set().union(*grams.values())
    equal: set[str] = set()
    shared: set[tuple[str, ...]] = set()
    num_conversations = 0
    for turns in conversations:
        num_conversations += 1
        opening = normalised(turns[0])
        if opening in first:
            equal.add(opening)
        for turn in turns:
            shared.update(gram for gram in _word_grams(turn) if gram in wanted)

    def counts(group: Sequence[Prompt]) -> dict[str, Any]:
        own = set().union(*(grams[prompt.id] for prompt in group))
        return {
            "num_prompts": len(group),
            "num_equal_prompts": sum(normalised(prompt.turns[0]) in equal for prompt in group),
            "num_ngrams": len(own),
            "num_shared_ngrams": len(own & shared),
            "shared_ngram_share": len(own & shared) / len(own) if own else None,
        }

    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    return {
        "ngram_words": OVERLAP_WORDS,
        "num_training_conversations": num_conversations,
        **counts(prompts),
        "tasks": {task: counts(group) for task, group in tasks.items()},
    }


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
