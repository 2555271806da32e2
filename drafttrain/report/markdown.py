"""The report as Markdown: for a pull request, a model card, a log."""

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from drafttrain.report.rows import Row
from drafttrain.report.statistics import PLAIN
from drafttrain.report.verdict import main_depth, rows_by_depth
from drafttrain.report.wording import (
    NOTHING,
    estimate,
    flat,
    memory,
    money,
    number,
    percent,
    positions,
    shortened,
    speed,
)
from drafttrain.runtime.untrusted_input import shown

LONGEST_TEXT = 100_000  # characters; what is longer is no text of a report


def escaped(value: object) -> str:
    """Return text in one line that neither Markdown, HTML nor a terminal takes for markup."""
    text = escape(shown(" ".join(str(value).split()), LONGEST_TEXT), quote=False)
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", text) or NOTHING


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table; cells are escaped already."""
    aligned = ["---", *["---:"] * (len(columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, aligned, *rows)]


def methods_of(report: dict[str, Any]) -> dict[str, dict[str, Row]]:
    """Return the rows of each drafting method, the report's drafter first, "all" first in each.

    The drafter's are those of the headline's depth, the others' those of the report's.
    """
    others = {name: rows for name, rows in report["methods"].items() if name != PLAIN}
    return {report["drafter"]: rows_by_depth(report)[main_depth(report)]} | {
        name: {"all": rows["summary"], **rows["tasks"]} for name, rows in others.items()
    }


def depth_told(report: Mapping[str, Any]) -> str:
    """Return the depth that the drafter is shown at, and of which it is the fastest."""
    depth, depths = main_depth(report), report["verdicts"]["all"]["of_depths"]
    told = f"depth {depth}"
    if len(depths) > 1:
        told += f", the fastest of {', '.join(map(str, depths))}"
    return told if depth == report["depth"] else f"{told} (ngram drafts at {report['depth']})"


def measured_table(report: dict[str, Any]) -> list[str]:
    """Return the table of what was measured, every method: the one that a model card shows."""
    columns = [
        "task",
        "acceptance length [95 %]",
        "macro",
        "per position",
        "tokens/s plain",
        "tokens/s drafted",
        "speedup [95 %]",
    ]
    lines: list[str] = []
    for method, rows in methods_of(report).items():
        cells = [
            [
                escaped(name),
                estimate(row["acceptance_length"]),
                number(row["acceptance_length"]["macro"]),
                positions(row["acceptance_per_position"]),
                speed(row["tokens_per_second"]["autoregressive"]),
                speed(row["tokens_per_second"]["speculative"]),
                estimate(row["speedup"]),
            ]
            for name, row in rows.items()
        ]
        lines += [f"**{escaped(method)}**", "", *table(columns, cells), ""]
    return lines


def verdict_table(report: dict[str, Any]) -> list[str]:
    """Return the verdict by task: what to do, what it brings, what it costs."""
    verdicts = report["verdicts"]
    columns = ["task", "verdict", "depth", "speedup [95 %]", "acceptance rate"]
    priced = any(verdict["money"] for verdict in verdicts.values())
    sized = any(verdict["extra_memory"] for verdict in verdicts.values())
    if priced:
        currency = escaped(verdicts["all"]["money"]["currency"])
        columns += [f"{currency} per million tokens, plain", "drafted", "saving [95 %]"]
    if sized:
        columns.append("extra memory")
    cells = []
    for name, verdict in verdicts.items():
        line = [
            escaped(name),
            verdict["decision"],
            str(verdict["depth"]),
            estimate(verdict["speedup"]),
            number(verdict["acceptance_rate"]),
        ]
        if priced:
            line += money_cells(verdict)
        if sized:
            line.append(memory(verdict["extra_memory"]["total_bytes"]))
        cells.append(line)
    return table(columns, cells)


def money_cells(verdict: dict[str, Any]) -> list[str]:
    """Return the price per million tokens, plain and drafted, and the saving with its interval."""
    cost = verdict["money"]
    if cost is None:
        return [NOTHING] * 3
    saving, ci95 = percent(cost["saving"]["value"]), cost["saving"]["ci95"]
    bounds = "" if ci95 is None else f" [{percent(ci95[0])}, {percent(ci95[1])}]"
    return [*map(money, cost["per_million_tokens"].values()), saving + bounds]


def repetition_table(report: dict[str, Any]) -> list[str]:
    """Return acceptance outside repetition, every method, and its difference to prompt lookup."""
    columns = [
        "task",
        "text repeats",
        "acceptance length outside [95 %]",
        "rate outside",
        "share of drafts",
        "acceptance length minus ngram's [95 %]",
        "the same, outside repetition",
        "tokens per pass minus ngram's [95 %]",
        "the same, outside repetition",
    ]
    lines: list[str] = []
    for method, rows in methods_of(report).items():
        cells = []
        for name, row in rows.items():
            outside = row["outside_repetition"]
            beside = [
                estimate(row[f"{what}_difference_to_ngram"][where])
                for what in ("acceptance_length", "tokens_per_pass")
                for where in ("all_text", "outside_repetition")
            ]
            cells.append(
                [
                    escaped(name),
                    percent(row["repetition_rate"]),
                    estimate({"value": outside["acceptance_length"], "ci95": outside["ci95"]}),
                    number(outside["acceptance_rate"]),
                    percent(outside["share_of_drafts"]),
                    *beside,
                ]
            )
        lines += [f"**{escaped(method)}**", "", *table(columns, cells), ""]
    return lines


def counts_table(report: dict[str, Any]) -> list[str]:
    """Return the counters and times of the report's drafter."""
    columns = [
        "task",
        "prompts",
        "tokens",
        "drafts",
        "drafted",
        "accepted",
        "rate",
        "draft ms",
        "verify ms",
        "other ms",
        "prefill ms",
        "predicted speedup",
        "repetition",
    ]
    cells = [
        [
            escaped(name),
            number(row["num_prompts"], 0),
            number(row["num_output_tokens"], 0),
            number(row["num_drafts"], 0),
            number(row["num_draft_tokens"], 0),
            number(row["num_accepted_tokens"], 0),
            number(row["acceptance_rate"]),
            *(number(row["time_ms"][part]) for part in ("draft", "verify", "other", "prefill")),
            number(row["predicted_speedup"]),
            percent(row["repetition_rate"]),
        ]
        for name, row in methods_of(report)[report["drafter"]].items()
    ]
    return table(columns, cells)


def markdown(report: dict[str, Any]) -> str:
    """Return the whole report as one document."""
    flags = [f"- **{escaped(flag['row'])}**: {escaped(flag['text'])}" for flag in report["flags"]]
    timing, sampling = report["timing"], report["sampling"]
    divergences = [
        f"- {escaped(', '.join(f'{key} {value}' for key, value in flat(divergence)))}"
        for divergence in report["lossless"]["divergences"]
    ]
    lists = {
        "Flags": flags,
        "Greedy divergences": divergences,
        "Notes": [f"- {escaped(note)}" for note in report["notes"]],
        "Prompts": [
            f"- {escaped(key)}: {escaped(text)}" for key, text in shortened(report["prompts"])
        ],
        "Definitions": [
            f"- `{key}`: {escaped(text)}" for key, text in report["definitions"].items()
        ],
        "Provenance": [
            f"- {escaped(key)}: {escaped(text)}" for key, text in flat(report["provenance"])
        ],
    }
    lines = [
        f"# {escaped(report['drafter'])} on {escaped(report['target'])}",
        "",
        escaped(report["verdict"]),
        "",
        escaped(report["beats_ngram"]["statement"]),
        "",
        f"Lossless: {escaped(report['lossless']['statement'])}.",
        "",
        f"D{depth_told(report)[1:]}; temperature {sampling['temperature']}, top-k "
        f"{sampling['top_k']}, top-p {sampling['top_p']}, at most {sampling['max_new_tokens']} new "
        f"tokens, batch {report['batch_size']}. Timed in {escaped(timing['dtype'])} on "
        f"{escaped(timing['device'])}, {timing['threads']} threads, "
        f"{timing['blocks']} interleaved blocks, each prompt in {timing['repeats']} of them.",
        "",
        "## Verdict",
        "",
        *verdict_table(report),
        "",
        "## Measured",
        "",
        *measured_table(report),
        "## Outside repetition, and beside prompt lookup",
        "",
        *repetition_table(report),
        f"## Counters and times, {escaped(report['drafter'])}",
        "",
        *counts_table(report),
        "",
    ]
    for extra in report["tables"]:
        cells = [[escaped(cell) for cell in row] for row in extra["rows"]]
        lines += [f"## {escaped(extra['title'])}", "", escaped(extra["caption"]), ""]
        lines += [*table(extra["columns"], cells), ""]
        lines += [f"- {escaped(note)}" for note in extra["notes"]] + [""]
    for title, items in lists.items():
        if items:
            lines += [f"## {title}", "", *items, ""]
    return "\n".join(lines)
