"""The report on disk and on the terminal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from drafttrain.report.markdown import depth_told, markdown, methods_of
from drafttrain.report.verdict import bill, grouped
from drafttrain.report.wording import estimate, number, positions, speed
from drafttrain.runtime.disk import write_whole, writing

REPORT_FILES = ("report.json", "report.md", "report.html")


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json, report.md and report.html; each appears whole or not at all."""
    from drafttrain.report.html import html  # matplotlib: a second that only writing should cost

    texts = {
        "report.json": as_json(report),
        "report.md": markdown(report),
        "report.html": html(report),
    }
    write_texts(texts, folder)


def as_json(content: Mapping[str, Any]) -> str:
    """Return plain data as the text of a .json file; there is no NaN in it."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Half a surrogate pair, which no file can hold, is written as JSON writes it.
    return text.encode("utf-8", "backslashreplace").decode()


def write_texts(texts: Mapping[str, str], folder: Path) -> None:
    """Write files by name into a folder; each appears whole or not at all."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)


def summary_table(report: dict[str, Any]) -> Table:
    """Return what the terminal shows: rows by task and in all, prompt lookup, losslessness."""
    drafter = report["drafter"]
    verdicts = report["verdicts"]
    caption = [report["verdict"], *grouped(verdicts), *bill(verdicts["all"])]
    caption += [report["beats_ngram"]["statement"]]
    caption += [f"Lossless: {report['lossless']['statement']}."]
    caption += [f"Flag: {flag['row']}: {flag['text']}." for flag in report["flags"]]
    table = Table(
        title=Text(f"{drafter} on {report['target']}, {depth_told(report)}"),
        caption=Text("\n".join(caption)),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("task", no_wrap=True)
    table.add_column("accept.\nlength", justify="right")
    table.add_column("acceptance\nper position")
    table.add_column("tok/s\nplain", justify="right")
    table.add_column("tok/s\nwith", justify="right")
    table.add_column("speedup\n[95 %]", justify="right", no_wrap=True)
    for method, rows in methods_of(report).items():
        # The drafter's tasks first, its total below them, then the total of each other method.
        shown = [*(name for name in rows if name != "all"), "all"] if method == drafter else ["all"]
        for name in shown:
            row = rows[name]
            total = f"all, {method}" if name == "all" else name
            table.add_row(
                Text(total),
                number(row["acceptance_length"]["micro"]),
                positions(row["acceptance_per_position"]),
                speed(row["tokens_per_second"]["autoregressive"]),
                speed(row["tokens_per_second"]["speculative"]),
                Text(estimate(row["speedup"])),
                style="bold" if name == "all" and method == drafter else None,
                end_section=name == shown[-1] or name == shown[-2] if len(shown) > 1 else False,
            )
    return table
