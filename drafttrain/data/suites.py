"""Suites of prompts: where they are read from, and rows of the public ones in our own format."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.data.files import Record, dataset_records, file_records
from drafttrain.data.records import QUESTIONS, TURNS, Roles, Unusable, first, message_of, turns_of

BUILTIN_PROMPTS = Path(__file__).parents[1] / "assets" / "prompts" / "tiny.jsonl"
CONVERSATIONS = "conversations"  # the task of those that name none
EMBEDDED = "embedded"  # the data set that comes with the package
# The categories of MT-bench; Spec-Bench has them besides its own five.
MT_BENCH = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Which prompts to read: those of a local file, else of a data set."""

    path: str | None
    setting: str = "eval.prompts"  # that names the path, for messages
    dataset: str | None = None  # EMBEDDED, an id on the Hugging Face Hub, or a directory
    subset: str | None = None
    split: str = ""
    revision: str | None = None
    task: str | None = None  # of rows that name none
    task_by: str = "task"  # or category: which of the two names a row's group in the report
    limit: int | None  # prompts per task, the first ones

    def __post_init__(self) -> None:
        if self.path is None and self.dataset is None:
            raise ValueError(
                "eval.prompts must name a file of prompts, or eval.dataset a data set ("
                f"{EMBEDDED}: those of the package), got null for both; Spec-Bench, which is on no "
                "Hub, is data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
            )

    @property
    def embedded(self) -> bool:
        """Whether the prompts are those that come with the package."""
        return self.path is None and self.dataset == EMBEDDED

    def describe(self) -> str:
        """Return where the prompts come from, for reports and messages."""
        if self.embedded:
            return "the prompts of the package"
        if self.path is not None:
            return self.path
        subset = f" ({self.subset})" if self.subset else ""
        return f"{self.dataset}{subset}, split {self.split}, revision {self.revision or 'newest'}"


def suite_records(source: PromptSource) -> Iterator[Record]:
    """Yield the rows of a source as (where it is, what it holds), broken ones as `Unusable`.

    Raises ValueError when the file does not exist or the data set cannot be reached.
    """
    if source.path is None and not source.embedded:
        yield from dataset_records(
            "eval.dataset",
            str(source.dataset),
            source.subset,
            source.split,
            source.revision,
            "its rows as eval.prompts=FILE.jsonl",
        )
        return
    file = Path(source.path or BUILTIN_PROMPTS).expanduser()
    if not file.is_file():
        raise ValueError(
            f"{source.setting} must name a file of prompts, got {source.path}, which is not one; a "
            'line of it is {"id": "a1", "task": "math", "turns": ["What is 2 + 2?"]}, or a row of '
            "Spec-Bench, MT-bench, GSM8K, HumanEval or MBPP as they are published"
        )
    yield from file_records(file, source.setting)


def in_our_spelling(record: Any, number: int, task: str | None, roles: Roles) -> Any:
    """Return a row with `id`, `task`, `category` and `turns`, whichever suite published it.

    The suite is recognised by its keys; a row of none of them comes back as it is. `number` is the
    row's place, for suites without ids; `task` is the task of rows that name none.
    """
    if not isinstance(record, dict):
        return record
    keys, own = record.keys(), record
    if {"id", "turns"} <= keys:
        pass
    elif {"question_id", "category", "turns"} <= keys:
        own = _question(record, record["question_id"], record["turns"])
    elif {"prompt_id", "category", "prompt"} <= keys:
        own = _question(record, record["prompt_id"], record["prompt"])
    elif {"task_id", "test_list"} <= keys:
        own = _mbpp(record, task)
    elif {"task_id", "prompt"} <= keys:
        own = {"id": record["task_id"], "turns": [record["prompt"]]}
    elif {"question", "answer"} <= keys:
        own = {"id": f"{task}_{number}", "turns": turns_of_user(record, roles, "question")}
    elif record.get("turns") is None and first(record, *TURNS, *QUESTIONS) is not None:
        own, task = _conversation(record, number, roles), task or CONVERSATIONS
    return {**own, "task": task} if own.get("task") is None else own


def _conversation(record: dict[str, Any], number: int, roles: Roles) -> dict[str, Any]:
    """Return a conversation in a format of the training data as a row of its user turns."""
    name = first(record, "id", "index")
    asked = turns_of_user(record, roles, *TURNS, *QUESTIONS)
    return {**record, "id": number if name is None else name, "turns": asked}


def turns_of_user(record: dict[str, Any], roles: Roles, *keys: str) -> list[str]:
    """Return what the user asks in a record; Unusable for a system turn, which is not asked."""
    turns = enumerate(turns_of(record, *keys), 1)
    messages = [message_of(turn, place, roles=roles) for place, turn in turns]
    if any(message.role == "system" for message in messages):
        raise Unusable("a system turn, which an evaluation prompt cannot have")
    return [message.content for message in messages if message.role == "user"]


def _question(record: dict[str, Any], number: Any, turns: Any) -> dict[str, Any]:
    """Return a question of MT-bench or Spec-Bench, whose categories include those of MT-bench."""
    category = str(record["category"])
    within = category in MT_BENCH
    return {
        "id": f"question_{number}",
        "task": "mt_bench" if within else category,
        "category": f"mt_bench/{category}" if within else category,
        "turns": turns,
    }


def _mbpp(record: dict[str, Any], task: str | None) -> dict[str, Any]:
    """Return a problem of MBPP (full: `text`, sanitized: `prompt`) with the tests it must pass.

    The tests are part of the prompt, as in the paper (Austin et al. 2021): they name the function.
    """
    words, tests = first(record, "text", "prompt"), record["test_list"]
    if not isinstance(words, str) or not words.strip():
        raise Unusable("an empty prompt", "neither text nor prompt")
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise Unusable("tests are not a list", type(tests).__name__)
    lines = [words, "Your code should satisfy these tests:", *tests]
    prompt = "\n".join(lines) if tests else words
    return {"id": f"{task}_{record['task_id']}", "turns": [prompt]}
