"""The model card: what the drafter is, what was measured, how to serve it, where it came from."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.drafters.shared.publications import About
from drafttrain.report.definitions import DEFINITIONS
from drafttrain.report.document import LONGEST_TEXT, escaped, table_parts
from drafttrain.report.pages import conditions_line
from drafttrain.report.phrases import flat, sentence
from drafttrain.report.results import Report, Table
from drafttrain.report.tables import MEASURED, certificate_table, table
from drafttrain.runtime.untrusted_input import UntrustedError, read_object, read_typed, shown
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.models import EMBEDDED

MADE_BY = "Made with drafttrain."
# Placeholders in a card's commands for folders of the machine that wrote it.
TARGET, DRAFTER = "TARGET", "DRAFTER"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# Keys of settings and records that concern one machine only, and are left out of a card.
PLACES = re.compile("command|checkpoint|examples|paths?|(cache_)?dir|files|init_from|adapter")
A_PLACE = re.compile(r"(^|[\s=:'\"(\[,])(~?/[\w.]|~$|\.\.?/|[A-Za-z]:\\|[A-Za-z][\w+.-]*://)")


@dataclass(frozen=True)
class CardData:
    """The content of a card besides the weights.

    `target` is the target's name for people, `base_model` its Hub repository if it has one.
    `training` and `provenance` are printed, flattened, without what concerns one machine only;
    `reports` are evaluations' report.json by name. All of it may be text written by others.
    """

    title: str
    family: str  # the drafter's name, as in its yaml
    about: About | None
    target: str
    base_model: str | None
    license: str
    training: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)


def served_as(model: ModelConfig) -> str:
    """Return a target's name in serve commands: its directory, or its repository on the Hub.

    The directory is that of this machine, wherever the command is given. A target with random
    weights has neither; then its own name is used. One with an adapter has no directory yet.
    """
    if model.adapter is not None:
        return TARGET
    if model.path:
        return os.path.abspath(os.path.expanduser(model.path))
    return str(EMBEDDED) if model.embedded else model.repo or model.name


def read_run(run_dir: Path) -> tuple[dict[str, Any], dict[str, Report]]:
    """Return provenance.json and every evaluations/*/report.json of a run, by evaluation name.

    Raises ValueError, naming the file, if one is not JSON or not a report.
    """
    provenance = run_dir / "provenance.json"
    reports = {}
    for file in sorted((run_dir / "evaluations").glob("*/report.json")):
        try:
            reports[file.parent.name] = read_typed(Report, file)
        except UntrustedError as error:
            raise ValueError(
                f"{error}: no model card can be made from this report; evaluate the run again, or "
                "remove its folder"
            ) from error
    return read_object(provenance) if provenance.exists() else {}, reports


def model_card(
    card: CardData, settings: Mapping[str, Any], commands: Mapping[str, str], notes: tuple[str, ...]
) -> str:
    """Return README.md: front matter that the Hub understands, then the card in Markdown."""
    sections = [
        _front_matter(card, commands),
        f"# {escaped(card.title)}",
        f"{_family(card)} for speculative decoding with {_target(card)}. It drafts for that one "
        "target; another would reject most of its drafts. With a lossless rule, speculative "
        "decoding changes only the target's speed, not the distribution of its output.",
        "## Measured",
        *_measured(card.reports),
        "## Serving",
        *(f"{engine}:\n\n{_fenced(command)}" for engine, command in commands.items()),
        *_stand_ins(commands),
        *notes,
        "The target must have exactly the weights that the drafter was trained with; a fine-tuned "
        "variant accepts fewer drafts.",
        "## Shape",
        _listed(["config.json", "value"], {k: v for k, v in settings.items() if v is not None}),
        "## Training",
        _listed(["setting", "value"], card.training),
        "## Provenance",
        _listed(["record", "value"], card.provenance),
        MADE_BY,
    ]
    return "\n\n".join(sections) + "\n"


def public(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without this machine's paths, addresses and commands."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if inner := public(value):
                kept[key] = inner
        elif not PLACES.fullmatch(key.rpartition(".")[2]) and not any(
            map(_is_place, value if isinstance(value, list) else [value])
        ):
            kept[key] = value
    return kept


def _is_place(value: Any) -> bool:
    if not isinstance(value, str) or not value:
        return False
    # "squad" may be a data set of the Hub and also a folder here: then the folder is read.
    return bool(A_PLACE.search(value)) or ("/" in value and Path(value).exists())


def _family(card: CardData) -> str:
    if card.about is None:
        return f"A drafter of the family {escaped(card.family)}"
    paper = card.about.paper
    return f"{card.about.kind} drafter ([arXiv:{paper}](https://arxiv.org/abs/{paper}))"


def _target(card: CardData) -> str:
    if card.base_model is None or not REPO_ID.fullmatch(card.base_model):
        return escaped(card.target)
    return f"[{escaped(card.base_model)}](https://huggingface.co/{card.base_model})"


def _fenced(command: str) -> str:
    # The fence is longer than any run of backticks in the command, so that none closes it.
    runs = [len(run) for run in re.findall("`+", command)]
    fence = "`" * max([3, *(run + 1 for run in runs)])
    return f"{fence}bash\n{shown(command, LONGEST_TEXT)}\n{fence}"


def _stand_ins(commands: Mapping[str, str]) -> list[str]:
    told = " ".join(commands.values())
    names = [
        f"`{name}` is the directory of {what}"
        for name, what in ((TARGET, "the target's weights"), (DRAFTER, "this drafter"))
        if re.search(rf"\b{name}\b", told)
    ]
    return [f"{', '.join(names)}."] if names else []


def _front_matter(card: CardData, commands: Mapping[str, str]) -> str:
    # JSON strings are valid YAML: no name, however odd, can break out of its line.
    tags = ["speculative-decoding", shown(card.family), "drafttrain"]
    tags += [engine.lower() for engine in commands]
    lines = ["---", "library_name: drafttrain", "pipeline_tag: text-generation"]
    lines.append(f"license: {json.dumps(card.license)}")
    if card.base_model is not None and REPO_ID.fullmatch(card.base_model):
        lines.append(f"base_model: {json.dumps(card.base_model)}")
    lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in tags), "---"]
    return "\n".join(lines)


def _measured(reports: Mapping[str, Report]) -> list[str]:
    if not reports:
        return ["Not measured: the run has no evaluation. Acceptance and speedup are unknown."]
    parts = [part for name, report in reports.items() for part in _evaluation(name, report)]
    terms = ("acceptance_length", "acceptance_per_position", "tokens_per_second", "speedup", "ci95")
    parts.append("\n".join(f"- `{term}`: {DEFINITIONS[term]}" for term in terms))
    return parts


def _evaluation(name: str, report: Report) -> list[str]:
    (drafter, own), *others = report.drafting.items()
    lines = own.by_name | {f"all, by {method}": rows.summary for method, rows in others}
    measured = table("", "", "task", MEASURED, lines.items())
    checks = [] if report.certificate is None else [certificate_table(report.certificate)]
    return [
        f"Evaluation **{escaped(name)}** of {escaped(drafter)}. {escaped(report.verdict)}",
        *table_parts(measured),
        *["No engine joins drafters: drafttrain alone decodes so."] * bool(own.summary.by_member),
        f"{escaped(conditions_line(report))}. {escaped(sentence(report.lossless.statement))}",
        *(part for each in checks for part in ("Certificate:", *table_parts(each))),
        *(f"Read with care ({escaped(flag.row)}): {escaped(flag.text)}." for flag in report.flags),
    ]


def _listed(columns: list[str], tree: Mapping[str, Any]) -> str:
    rows = flat(public(tree))
    return table_parts(Table("", "", columns, rows))[0] if rows else "Not recorded."
