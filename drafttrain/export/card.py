"""The model card: what the drafter is, what was measured, how to serve it, where it came from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.pretrained import EMBEDDED, ModelConfig
from drafttrain.report.certificate import certificate_rows
from drafttrain.report.definitions import DEFINITIONS
from drafttrain.report.wording import estimate, flat, number, positions, speed

FAMILIES = {
    "eagle3": ("An EAGLE-3", "2503.01840"),
    "eagle": ("An EAGLE", "2401.15077"),
    "medusa": ("A Medusa", "2401.10774"),
    "small_lm": ("A distilled", "2310.08461"),
}
MADE_BY = "Made with drafttrain."


@dataclass(frozen=True)
class CardData:
    """What a card says beyond the weights themselves.

    `target` names the target in words, `base_model` is its Hub repository if it has one. `training`
    and `provenance` are printed as they are, nested mappings flattened; `reports` are evaluations'
    report.json by name.
    """

    title: str
    family: str  # the drafter's name: eagle3, eagle, medusa, small_lm
    target: str
    base_model: str | None
    license: str
    training: Mapping[str, Any]
    provenance: Mapping[str, Any]
    reports: Mapping[str, Mapping[str, Any]]


def served_as(model: ModelConfig) -> str:
    """Return what a serve command calls a target: its directory, or its repository on the Hub.

    A target of random weights has neither; then it is its name.
    """
    if model.path:
        return model.path
    return str(EMBEDDED) if model.embedded else model.repo or model.name


def read_run(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return provenance.json and every evaluations/*/report.json of a run, by evaluation name.

    Raises ValueError, naming the file, for one that is not JSON.
    """
    provenance = run_dir / "provenance.json"
    reports = sorted((run_dir / "evaluations").glob("*/report.json"))
    return (
        _read(provenance) if provenance.exists() else {},
        {path.parent.name: _read(path) for path in reports},
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON object, but cannot be read: {error}") from error


def model_card(
    card: CardData, settings: Mapping[str, Any], commands: Mapping[str, str], notes: tuple[str, ...]
) -> str:
    """Return README.md: front matter that the Hub understands, then the card in Markdown."""
    family, paper = FAMILIES[card.family]
    sections = [
        _front_matter(card, commands),
        f"# {card.title}",
        f"{family} drafter ([arXiv:{paper}](https://arxiv.org/abs/{paper})) for speculative "
        f"decoding with {_target(card)}. It drafts for that one target; another "
        "would refuse most of its drafts. Speculative decoding by an exact rule does not change "
        "what the target says, only how fast.",
        "## Measured",
        *_measured(card.reports),
        "## Serving",
        *(f"{engine}:\n\n```bash\n{command}\n```" for engine, command in commands.items()),
        *notes,
        "The target must be the very weights that the drafter was trained with; a fine-tuned "
        "variant is accepted less often.",
        "## Shape",
        _table(["config.json", ""], flat({k: v for k, v in settings.items() if v is not None})),
        "## Training",
        _table(["setting", "value"], flat(card.training)) if card.training else "Not recorded.",
        "## Provenance",
        _table(["", ""], flat(card.provenance)) if card.provenance else "Not recorded.",
        MADE_BY,
    ]
    return "\n\n".join(sections) + "\n"


def _target(card: CardData) -> str:
    if card.base_model is None:
        return card.target
    return f"[{card.base_model}](https://huggingface.co/{card.base_model})"


def _front_matter(card: CardData, commands: Mapping[str, str]) -> str:
    # JSON strings are YAML strings: no name, however odd, can break out of its line.
    tags = ["speculative-decoding", card.family, "drafttrain"]
    tags += [engine.lower() for engine in commands]
    lines = ["---", "library_name: drafttrain", "pipeline_tag: text-generation"]
    lines.append(f"license: {json.dumps(card.license)}")
    if card.base_model is not None:
        lines.append(f"base_model: {json.dumps(card.base_model)}")
    lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in tags), "---"]
    return "\n".join(lines)


def _measured(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not reports:
        return ["Not measured: the run has no evaluation. Acceptance and speedup are unknown."]
    parts: list[str] = []
    for name, report in reports.items():
        try:
            parts += _evaluation(name, report)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"evaluation {name} has a report.json that a card cannot be made from (it lacks "
                f"{error}); evaluate the run again, or remove that folder"
            ) from error
    terms = ("acceptance_length", "acceptance_per_position", "tokens_per_second", "speedup", "ci95")
    parts.append("\n".join(f"- `{term}`: {DEFINITIONS[term]}" for term in terms))
    return parts


def _evaluation(name: str, report: Mapping[str, Any]) -> list[str]:
    header = ["task", "acceptance length", "macro", "per position", "tokens/s plain"]
    header += ["tokens/s drafted", "speedup"]
    rows = [_row("**all**", report["summary"])]
    rows += [_row(task, row) for task, row in report["tasks"].items()]
    for method, other in report["methods"].items():
        if "speedup" in other["summary"]:
            rows.append(_row(f"all, by {method}", other["summary"]))
    sampling, timing, lossless = report["sampling"], report["timing"], report["lossless"]
    greedy = sampling["temperature"] == 0
    law = "greedy" if greedy else ", ".join(f"{key} {value}" for key, value in sampling.items())
    return [
        f"Evaluation `{name}`: {report['drafter']} at depth {report['depth']}, {law}, "
        f"batch {report['batch_size']}. {report['verdict']}",
        _table(header, rows),
        f"Lossless: {lossless['statement']}.",
        *_certificate(report["certificate"]),
        f"Timed in {timing['dtype']} on {timing['device']} with {timing['threads']} threads, "
        f"{timing['blocks']} interleaved blocks.",
        *(f"Beware ({flag['row']}): {flag['text']}." for flag in report["flags"]),
    ]


def _certificate(section: Mapping[str, Any] | None) -> list[str]:
    if section is None:
        return []
    return [
        f"Certificate ({section['dtype']}, {section['num_prompts']} prompts): "
        f"{section['statement']}. Rule: {section['rule']}.",
        _table(["check", "outcome", "measured", "bound"], certificate_rows(dict(section))),
    ]


def _row(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    length, rates = row["acceptance_length"], row["tokens_per_second"]
    return (
        name,
        estimate({"micro": length["micro"], "ci95": length["ci95"]}),
        number(length["macro"]),
        positions(row["acceptance_per_position"]),
        speed(rates["autoregressive"]),
        speed(rates["speculative"]),
        estimate(row["speedup"]),
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        escaped = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
        return "| " + " | ".join(escaped) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])
