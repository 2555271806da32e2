"""A comparison on disk and on the terminal: JSON, Markdown, one HTML file, a table."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from drafttrain.report import wording
from drafttrain.report.markdown import escaped, table
from drafttrain.report.pages import page
from drafttrain.report.wording import NOTHING, change, estimate, flat, number, size, speed
from drafttrain.report.write import as_json, write_texts

FILES = ("compare.json", "compare.md", "compare.html")


def write_comparison(comparison: dict[str, Any], folder: Path) -> None:
    """Write compare.json, compare.md and compare.html; each appears whole or not at all."""
    texts = (as_json(comparison), comparison_markdown(comparison), comparison_html(comparison))
    write_texts(dict(zip(FILES, texts, strict=True)), folder)


def versus_baseline(comparison: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the differences to the baseline, by method."""
    base = comparison["baseline"]
    return {pair["method"]: pair for pair in comparison["differences"] if pair["other"] == base}


def other_pairs(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the differences between rows other than the baseline."""
    base = comparison["baseline"]
    return [pair for pair in comparison["differences"] if pair["other"] != base]


def spread_of(measured: dict[str, Any]) -> str:
    """Return the range over seeds or repeated measurements, a dash for a single one."""
    if len(measured["by_run"]) < 2 or measured["range"] is None:
        return NOTHING
    low, high = measured["range"]
    return f"{number(low)} to {number(high)}"


def conditions_line(comparison: dict[str, Any]) -> str:
    """Return under which conditions all runs were evaluated."""
    told = comparison["conditions"]
    sampling = ", ".join(
        f"{key.removeprefix('eval.').replace('_', ' ')} {value}"
        for key, value in told.items()
        if key not in ("target fingerprint", "eval.prompts")
    )
    return (
        f"{comparison['prompts']['statement']}, in {len(comparison['prompts']['tasks'])} tasks of "
        f"{told['eval.prompts']}; {sampling}; target fingerprint "
        f"{str(told['target fingerprint'])[:16]}"
    )


def comparison_summary(comparison: dict[str, Any]) -> Table:
    """Return what the terminal shows: a row per method, its differences, what to read with care."""
    versus = versus_baseline(comparison)
    caption = [pair["statement"] for pair in comparison["differences"]]
    caption += [f"{row['method']}: {row['lossless']['statement']}." for row in comparison["rows"]]
    caption += [f"Flag: {flag['row']}: {flag['text']}." for flag in comparison["flags"]]
    caption += [f"{conditions_line(comparison)}.", "Intervals: 95 %, paired by prompt."]
    shown = Table(
        title=Text(f"{comparison['target']}: differences to {comparison['baseline']}"),
        caption=Text("\n".join(caption)),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("method\ntraining", overflow="fold", min_width=12)
    # 80 columns hold the numbers whole; what gives way is the method's name.
    for name in ("accept. length, 95 %", "speedup, 95 %"):
        shown.add_column(f"{name}\ndifference", justify="right", no_wrap=True, min_width=20)
    for name in ("draft\nms", "para-\nmeters", "loss-\nless"):
        shown.add_column(
            name, justify="right", no_wrap=True, min_width=len(max(name.split("\n"), key=len))
        )
    for row in comparison["rows"]:
        summary, pair = row["summary"], versus.get(row["method"])
        cells = [
            f"{estimate(summary[name])}\n{change(pair['summary'][name]) if pair else 'baseline'}"
            for name in ("acceptance_length", "speedup")
        ]
        count = len(row["seeds"])
        training = f"{count} seeds" if count > 1 else "single run" if count else "reference"
        shown.add_row(
            Text(f"{row['method']}\n{training}"),
            *map(Text, cells),
            number(summary["draft_ms"]),
            size(row["drafter_parameters"]),
            "yes" if row["lossless"]["lossless"] else "NO",
            style="bold" if row["method"] == comparison["baseline"] else None,
        )
    return shown


def comparison_markdown(comparison: dict[str, Any]) -> str:
    """Return the whole comparison as one document."""
    flags = [
        f"- **{escaped(flag['row'])}**: {escaped(flag['text'])}" for flag in comparison["flags"]
    ]
    lines = [
        f"# {escaped(comparison['name'])}: drafters of {escaped(comparison['target'])}",
        "",
        *(f"- {escaped(pair['statement'])}" for pair in versus_baseline(comparison).values()),
        "",
        f"{escaped(conditions_line(comparison))}.",
        "",
        *(["## Read with care", "", *flags, ""] if flags else []),
        "## Methods",
        "",
        *_methods_table(comparison),
        "",
    ]
    for task in ("all", *comparison["prompts"]["tasks"]):
        lines += [f"## {escaped(task)}", "", *_task_table(comparison, task), ""]
    lists = {
        "Other differences": [
            f"- {escaped(pair['statement'])}" for pair in other_pairs(comparison)
        ],
        "Runs": _runs_table(comparison),
        "Definitions": [
            f"- `{key}`: {escaped(text)}" for key, text in comparison["definitions"].items()
        ],
        "Provenance": [
            f"- {escaped(key)}: {escaped(text)}" for key, text in flat(comparison["provenance"])
        ],
    }
    for title, items in lists.items():
        if items:
            lines += [f"## {title}", "", *items, ""]
    return "\n".join(lines)


def _methods_table(comparison: dict[str, Any]) -> list[str]:
    columns = [
        "method",
        "drafter",
        "depth",
        "training",
        "parameters",
        "training tokens",
        "draft ms",
        "tokens/s plain",
        "tokens/s drafted",
        "losslessness",
    ]
    cells = [
        [
            escaped(row["method"]),
            escaped(row["drafter"]),
            number(row["depth"], 0),
            escaped(row["training"]),
            size(row["drafter_parameters"]),
            size(row["training_tokens"]),
            number(row["summary"]["draft_ms"]),
            speed(row["summary"]["tokens_per_second"]["autoregressive"]),
            speed(row["summary"]["tokens_per_second"]["speculative"]),
            escaped(row["lossless"]["statement"]),
        ]
        for row in comparison["rows"]
    ]
    return table(columns, cells)


def _task_table(comparison: dict[str, Any], task: str) -> list[str]:
    versus = versus_baseline(comparison)
    columns = ["method", "prompts"]
    for name in ("acceptance length", "speedup"):
        columns += [f"{name} [95 %]", "range", f"to {escaped(comparison['baseline'])} [95 %]"]
    cells = []
    for row in comparison["rows"]:
        part = row["summary"] if task == "all" else row["tasks"][task]
        line = [escaped(row["method"]), number(part["num_prompts"], 0)]
        for name in ("acceptance_length", "speedup"):
            pair = versus.get(row["method"])
            beside = pair and (pair["summary"] if task == "all" else pair["tasks"][task])
            line += [estimate(part[name]), spread_of(part[name])]
            line.append(change(beside[name]) if beside else "baseline")
        cells.append(line)
    return table(columns, cells)


def _runs_table(comparison: dict[str, Any]) -> list[str]:
    columns = ["run", "drafter", "depth", "seed", "parameters", "training tokens", "losslessness"]
    cells = [
        [
            escaped(run["folder"]),
            escaped(run["drafter"]),
            number(run["depth"], 0),
            number(run["seed"], 0),
            size(run["drafter_parameters"]),
            size(run["training_tokens"]),
            escaped(run["lossless"]),
        ]
        for run in comparison["runs"]
    ]
    return table(columns, cells)


def comparison_html(comparison: dict[str, Any]) -> str:
    """Return the page: style and figures inline, every text escaped; it loads nothing."""
    from drafttrain.report import comparison_plots as plots  # matplotlib takes a second

    rows, versus = comparison["rows"], versus_baseline(comparison)
    pairs = list(versus.values())
    against = f"difference to {comparison['baseline']}, 95 % interval"
    times = "times plain decoding, 95 % interval"
    return page(
        "comparison.html.j2",
        comparison=comparison,
        rows=rows,
        versus=versus,
        others=other_pairs(comparison),
        conditions=conditions_line(comparison),
        scopes=["all", *comparison["prompts"]["tasks"]],
        looks=plots.looks(rows),
        plots={
            "speedup": plots.estimates_plot(rows, "speedup", times, even=1.0),
            "length": plots.estimates_plot(
                rows, "acceptance_length", "tokens per target pass, 95 % interval", even=1.0
            ),
            "speedup_difference": plots.differences_plot(rows, pairs, "speedup", against),
            "length_difference": plots.differences_plot(rows, pairs, "acceptance_length", against),
        },
        words=wording,
        spread_of=spread_of,
        widest={
            name: max((row["summary"][name]["value"] or 0.0 for row in rows), default=0.0) or 1.0
            for name in ("acceptance_length", "speedup")
        },
    )
