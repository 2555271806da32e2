"""Conversations from local files and from the Hub; what cannot be used is counted and named."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from drafttrain.data.files import Record, file_records, find_files, require
from drafttrain.data.records import (
    Message,
    Recorded,
    Unusable,
    messages_of,
    plain_text,
    recorded_of,
)
from drafttrain.data.skips import NothingUsable, SkipReport
from drafttrain.data.template import Template
from drafttrain.runtime.lock import of_answers, require_free
from drafttrain.runtime.untrusted_input import shown

RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}  # given anyway
MAX_KWARGS = 10_000  # characters


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Common to every source of conversations; subclasses say where they come from."""

    name: str
    max_length: int
    holdout: int
    template: str
    template_kwargs: dict[str, Any]
    template_date: str
    seed: int

    def __post_init__(self) -> None:
        require(self.max_length >= 2, "max_length", "be at least 2 tokens", self.max_length)
        require(self.holdout >= 0, "holdout", "be at least 0 conversations", self.holdout)
        require(self.seed >= 0, "seed", "be at least 0", self.seed)
        require(
            self.template in ("chat", "none"),
            "template",
            "be chat (the tokenizer's chat template) or none (plain text)",
            repr(self.template),
        )
        taken = [key for key in self.template_kwargs if key in RESERVED or not key.isidentifier()]
        require(
            not taken,
            "template_kwargs",
            "name variables of the chat template that it is not given anyway",
            shown(", ".join(taken)),
        )
        try:
            plain = json.dumps(self.template_kwargs, allow_nan=False)
        except (ValueError, TypeError):
            plain = ""
        require(
            0 < len(plain) <= MAX_KWARGS,
            "template_kwargs",
            f"hold plain values of at most {MAX_KWARGS:,} characters",
            shown(self.template_kwargs),
        )
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            require(
                False, "template_date", "be a day such as 2026-01-31", shown(self.template_date)
            )

    def check_text(self) -> None:
        """Raise ValueError where these settings give no text to train on.

        An evaluation needs none: of this section it has the format alone.
        """

    @property
    def text_format(self) -> Template:
        """How turns become text."""
        return Template(self.template, self.template_kwargs, self.template_date)


@dataclass(frozen=True, kw_only=True)
class SelfgenConfig(DataConfig):
    """The target writes its own conversations; see `regenerate`."""

    num_conversations: int
    batch_size: int
    user_temperature: float
    answer_temperature: float
    top_k: int
    top_p: float
    max_user_tokens: int
    max_answer_tokens: int
    cache_dir: str

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("num_conversations", "batch_size", "max_user_tokens", "max_answer_tokens"):
            require(getattr(self, key) >= 1, key, "be at least 1", getattr(self, key))
        for key in ("user_temperature", "answer_temperature"):
            require(0 <= getattr(self, key) <= 10, key, "be in [0, 10]", getattr(self, key))
        require(
            self.user_temperature > 0,
            "user_temperature",
            "be above 0, or every conversation would be the same",
            self.user_temperature,
        )
        require(self.top_k >= 0, "top_k", "be at least 0 (0 is off)", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "be in (0, 1] (1.0 is off)", self.top_p)

    def check_text(self) -> None:
        """Raise ValueError where no conversation can be written."""
        require(
            self.template == "chat",
            "template",
            "be chat for data=selfgen, which starts from the chat template's opening",
            self.template,
            "; give text of your own with data=jsonl data.path=FILE data.template=none",
        )


@dataclass(frozen=True, kw_only=True)
class JsonlConfig(DataConfig):
    """Local files, one record a line (a .json file holds one list of records)."""

    path: Any  # a file, a directory or a glob, or a list of those
    limit: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = self.paths
        require(
            bool(paths) and all(isinstance(path, str) and path for path in paths),
            "path",
            "name a file, a directory or a glob, or a list of those",
            self.path,
            "; for example data.path=conversations.jsonl",
        )
        require_limit(self.limit)

    @property
    def paths(self) -> list[Any]:
        """The path, or the paths, as a list."""
        return [self.path] if not isinstance(self.path, list | tuple) else list(self.path)


@dataclass(frozen=True, kw_only=True)
class HubConfig(DataConfig):
    """A data set on the Hugging Face Hub, or in a local directory that `datasets` understands."""

    repo: str | None
    revision: str | None
    subset: str | None
    files: str | None
    split: str
    streaming: bool
    column: str | None
    prompt_column: str | None
    response_column: str | None
    limit: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.repo),
            "repo",
            "name a data set on the Hub or a local directory",
            self.repo,
            "; for example data.repo=HuggingFaceH4/ultrachat_200k",
        )
        pair = (self.prompt_column, self.response_column)
        require(
            all(pair) if self.column is None else not any(pair),
            "column",
            "name the column of messages (or text), unless data.prompt_column and"
            " data.response_column both do",
            f"column={self.column} prompt_column={pair[0]} response_column={pair[1]}",
        )
        require_limit(self.limit)


def require_limit(limit: int | None) -> None:
    """Check the number of records to read."""
    require(limit is None or limit >= 1, "limit", "be at least 1, or null for all", limit)


@dataclass(frozen=True)
class Conversation:
    """Turns in order; `index` is its place among the usable ones, `source` its file and line."""

    messages: tuple[Message, ...]
    index: int
    source: str
    recorded: tuple[Recorded | None, ...] = ()  # of each answer, where its target's are recorded


@dataclass(frozen=True)
class PlainText:
    """Text without turns, for targets without a chat template."""

    text: str
    index: int
    source: str


Conversations = list[Conversation] | list[PlainText]


def read(config: DataConfig) -> tuple[Conversations, SkipReport]:
    """Read the conversations that `config` names."""
    if isinstance(config, JsonlConfig):
        return read_jsonl(config)
    if isinstance(config, HubConfig):
        return read_hub(config)
    raise AssertionError(f"{type(config).__name__} is not read but generated")


def read_jsonl(config: JsonlConfig) -> tuple[Conversations, SkipReport]:
    """Read local files; ValueError if a path names none, or if no record of them can be used."""
    files = [file for path in config.paths for file in find_files(path)]
    for file in files:  # answers that `regenerate` still writes are a part of what is wanted
        require_free(file, "data.path", file=of_answers(file))
    records = (record for file in files for record in file_records(file))
    return collect(records, config, config.limit, f"data.path={config.path}")


def collect(
    records: Iterable[Record], config: DataConfig, limit: int | None, what: str
) -> tuple[Conversations, SkipReport]:
    """Return the usable ones of `records`; ValueError with the report if there are none."""

    def take(record: Any, index: int, where: str) -> Any:
        if config.template == "none":
            return PlainText(plain_text(record), index, where)
        messages = messages_of(record)
        answers = sum(message.role == "assistant" for message in messages)
        return Conversation(messages, index, where, recorded_of(record, answers))

    return usable_of(records, limit, take, f"{what} must hold usable conversations")


def usable_of(
    records: Iterable[Record], limit: int | None, take: Callable[[Any, int, str], Any], must: str
) -> tuple[list[Any], SkipReport]:
    """Return what `take` makes of each record, its place and its source, and what was skipped.

    take: raises Unusable for a record that is left out. ValueError that begins with `must` and
    carries the report if nothing is left.
    """
    report = SkipReport()
    usable: list[Any] = []
    for where, record in records:
        if report.num_read == limit:
            break
        report.num_read += 1
        try:
            if isinstance(record, Unusable):
                raise record
            usable.append(take(record, len(usable), where))
        except Unusable as error:
            report.skip(error.reason, where, error.detail)
    if not usable:
        advice = "correct what is named here" if report.counts else "give it some records"
        raise NothingUsable(f"{must}, got none", report, advice)
    return usable, report


def read_hub(config: HubConfig) -> tuple[Conversations, SkipReport]:
    """Read a data set with `datasets`; ValueError if it cannot be reached or used."""
    return collect(hub_records(config), config, config.limit, f"data.repo={config.repo}")


def hub_records(config: HubConfig) -> Iterator[Record]:
    """Yield the rows of a data set as records."""
    try:
        rows = open_dataset(
            str(config.repo),
            config.subset,
            split=config.split,
            revision=config.revision,
            files=config.files,
            streaming=config.streaming,
        )
        for number, row in enumerate(rows):
            yield f"{config.repo}:{config.split}[{number}]", record_of(row, config)
    except Unusable as error:
        raise ValueError(f"data.column: {error.reason} ({error.detail})") from None
    except Exception as error:  # every library below has its own errors for "not there"
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"data.repo must name a data set that can be read, got {config.repo}"
            f" (split {config.split}): {reason}; without access to the Hub, download it elsewhere"
            " and use data=jsonl data.path=FILE, or data.repo=DIRECTORY"
        ) from error


def open_dataset(
    repo: str,
    subset: str | None,
    *,
    split: str,
    revision: str | None,
    files: str | None = None,
    streaming: bool = False,
) -> Iterable[dict[str, Any]]:
    """Open one split; a directory may hold data files or what `save_to_disk` wrote."""
    import datasets

    place = Path(repo).expanduser()
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(place))
        return saved[split] if isinstance(saved, dict) else saved
    return datasets.load_dataset(
        str(place) if place.exists() else repo,
        subset,
        data_files=files,
        split=split,
        revision=revision,
        streaming=streaming,
    )


def record_of(row: dict[str, Any], config: HubConfig) -> dict[str, Any]:
    """Return a row in the spelling of local files."""
    names = [config.column] if config.column else [config.prompt_column, config.response_column]
    missing = [str(name) for name in names if name not in row]
    if missing:
        raise Unusable(f"no column {', '.join(missing)}", f"there are {', '.join(row)}")
    if not config.column:
        prompt, response = (row[str(name)] for name in names)
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return {"messages": turns}
    return {"text" if config.template == "none" else "messages": row[config.column]}
