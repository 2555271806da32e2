"""Evaluation prompts, embedded or of a suite, and their overlap with training text."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.data.files import usable_of
from drafttrain.data.records import ROLES, Roles, Unusable, checked_text, object_of
from drafttrain.data.skips import SkipReport
from drafttrain.data.suites import PromptSource, in_our_spelling, suite_records
from drafttrain.runtime.disk import sha256_of
from drafttrain.runtime.untrusted_input import Count, Sha256, read_object, read_typed

MAX_NAME = 200  # characters of an id or a task


@dataclass(frozen=True)
class Prompt:
    """The user's turns of one conversation; the target answers each in its place."""

    id: str
    task: str
    category: str
    turns: tuple[str, ...]


def load_prompts(source: PromptSource, roles: Roles = ROLES) -> tuple[list[Prompt], SkipReport]:
    """Read the prompts of a source; at most the first `source.limit` of each task, None for all.

    A row is `{"id", "task", "turns": [...]}`, with a `category` if there is one, a row of a public
    suite as it is published, or a conversation as training reads it, whose user turns are the
    prompts. roles: the role that each name of a speaker stands for. Unusable rows are skipped and
    counted. Raises ValueError when the source does not exist or nothing in it can be used.
    """
    seen: dict[str, str] = {}

    def take(numbered: tuple[int, Any], _: int, where: str) -> Prompt:
        number, record = numbered
        prompt = _prompt(in_our_spelling(record, number, source.task, roles), source.task_by)
        if prompt.id in seen:
            raise Unusable("an id seen before", f"{prompt.id!r} is at {seen[prompt.id]}")
        seen[prompt.id] = where
        return prompt

    records = (
        (where, record if isinstance(record, Unusable) else (number, record))
        for number, (where, record) in enumerate(suite_records(source))
    )
    named = f"{source.setting}={source.path}"
    place = f"eval.dataset={source.dataset}" if source.path is None else named
    must = f"{place} must hold usable prompts"
    found, report = usable_of(records, None, take, must, "prompts")
    kept: dict[str, list[Prompt]] = {}
    for prompt in found:
        kept.setdefault(prompt.task, []).append(prompt)
    first = {prompt.id for group in kept.values() for prompt in group[: source.limit]}
    return [prompt for prompt in found if prompt.id in first], report


def read_prompts(
    path: str | Path, limit: int | None, roles: Roles = ROLES, setting: str = "eval.prompts"
) -> tuple[list[Prompt], SkipReport]:
    """Read a file of prompts, grouped by the key `task` of its lines; see load_prompts.

    setting: that names the file, for messages.
    """
    return load_prompts(PromptSource(path=str(path), limit=limit, setting=setting), roles)


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Return the sha256 of what is decoded: ids, tasks and turns, in order."""
    content = [[prompt.id, prompt.task, list(prompt.turns)] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def _prompt(record: Any, task_by: str) -> Prompt:
    for key in ("id", "task", "turns"):
        if object_of(record).get(key) is None:
            raise Unusable(f"without {key}")
    turns = record["turns"]
    if not isinstance(turns, list):
        raise Unusable("turns are not a list", type(turns).__name__)
    if not turns:
        raise Unusable("an empty prompt", "no turns")
    for place, turn in enumerate(turns, 1):
        if not checked_text(turn, f"turn {place}").strip():
            raise Unusable("an empty prompt", f"turn {place}")
    name, task = _name(record["id"], "id"), _name(record["task"], "task")
    category = _name(record.get("category") or record["task"], "category")
    group = category if task_by == "category" else task
    if group == "all":
        raise Unusable(f'{task_by} is "all", as reports call all tasks together')
    return Prompt(name, group, category, tuple(turns))


def _name(value: Any, key: str) -> str:
    """Return a name for reports: a number or a short line. Unusable for anything else."""
    if type(value) not in (str, int):
        raise Unusable(f"{key} is neither text nor a number", type(value).__name__)
    text = checked_text(str(value), key)
    if len(text) > MAX_NAME or not text.isprintable():
        raise Unusable(f"{key} is no line of at most {MAX_NAME} characters")
    return text


def overlap_path(path: str | Path) -> Path:
    """Return the file of the overlap record, next to its file of prompts."""
    return Path(path).expanduser().with_suffix(".overlap.json")


@dataclass(frozen=True)
class _Overlap:
    """The checked fields of an overlap record, whoever wrote it."""

    prompts_sha256: Sha256
    num_prompts: Count
    num_equal_prompts: Count
    num_ngrams: Count
    num_shared_ngrams: Count
    ngram_words: Count
    shared_ngram_share: float | None


def overlap_record(path: str | Path) -> dict[str, Any] | None:
    """Return the recorded overlap of a file of prompts with the target's training text.

    None when it was not counted. Raises ValueError when the record is of other prompts than these.
    """
    place = overlap_path(path)
    if not place.is_file():
        return None
    known = read_typed(_Overlap, place)
    found = sha256_of(Path(path).expanduser())
    if known.prompts_sha256 != found:
        raise ValueError(
            f"{place} must be the overlap of {path}, got one of a file with other content; remove "
            "it, or count again with scripts/count_prompt_overlap.py"
        )
    return read_object(place)


def overlap_line(record: dict[str, Any] | None) -> str:
    """Return the line that a command prints about an overlap record."""
    if record is None:
        return "overlap of the prompts with the target's training text: not known"
    share = record["shared_ngram_share"]
    return (
        f"overlap with the target's training text: {record['num_equal_prompts']} of "
        f"{record['num_prompts']} prompts equal a first prompt, and "
        f"{record['num_shared_ngrams']:,} of {record['num_ngrams']:,} "
        f"{record['ngram_words']}-grams of words occur"
        + (f" ({100 * share:.1f} %)" if share is not None else "")
    )
