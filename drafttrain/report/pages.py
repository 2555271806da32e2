"""A report on disk: JSON, Markdown and one HTML file, which say the same."""

from pathlib import Path

from drafttrain.report.document import Document, Listing, Tile, notes
from drafttrain.report.html import html
from drafttrain.report.markdown import markdown
from drafttrain.report.results import Report
from drafttrain.report.tables import depth_shown, measured_tables, verdict_table
from drafttrain.report.verdict import is_serious
from drafttrain.report.wording import (
    NOTHING,
    TOO_FEW,
    between,
    flat,
    number,
    rule_statement,
    shortened,
    speed,
)
from drafttrain.report.write import as_data, as_json, write_texts

REPORT_FILES = ("report.json", "report.md", "report.html")


def write_report(report: Report, folder: Path) -> None:
    """Write report.json, report.md and report.html; each appears whole or not at all."""
    texts = (as_json(as_data(report)), report_markdown(report), report_html(report))
    write_texts(dict(zip(REPORT_FILES, texts, strict=True)), folder)


def report_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    return markdown(report_document(report))


def report_html(report: Report) -> str:
    """Return the report as one HTML file."""
    from drafttrain.report import plots  # matplotlib takes a second

    return html(report_document(report), plots.report_figures(report))


def report_document(report: Report) -> Document:
    """Return what the pages of a report say."""
    flags = {True: list[tuple[str, str]](), False: list[tuple[str, str]]()}
    for flag in report.flags:
        flags[is_serious(flag, report.lossless)].append((flag.row, flag.text))
    divergences = [
        ("", ", ".join(f"{key} {value}" for key, value in flat(divergence)))
        for divergence in report.lossless.divergences
    ]
    return Document(
        "speculative decoding, measured",
        f"{report.drafter} on {report.target}",
        [report.verdict, report.beats_ngram.statement, f"Lossless: {report.lossless.statement}."],
        _conditions(report),
        _tiles(report),
        [
            verdict_table(report),
            Listing("Read with care", flags[True], "flags"),
            Listing("Good to know", flags[False], "mild"),
        ],
        [
            *measured_tables(report),
            *report.tables,
            notes("Notes", report.notes),
            Listing("Greedy divergences", divergences),
            Listing("Definitions", list(report.definitions.items())),
            Listing("Prompts", shortened(report.prompts)),
            Listing("Provenance", flat(report.provenance)),
        ],
    )


def _things(num: int, name: str) -> str:
    return f"{num} {name}{'s' * (num != 1)}"


def _conditions(report: Report) -> str:
    sampling, timing, row = report.sampling, report.timing, report.summary
    drawn = f"temperature {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}"
    blocks = _things(timing.blocks, "interleaved block")
    if timing.repeats < timing.blocks:
        blocks += f", each prompt in {timing.repeats} of them"
    return " · ".join(
        [
            f"{_things(row.num_prompts, 'prompt')} in {_things(len(report.tasks), 'task')}",
            depth_shown(report),
            "greedy" if sampling.temperature == 0 else drawn,
            f"at most {sampling.max_new_tokens} new tokens",
            f"batch {report.batch_size}",
            f"timed in {timing.dtype} on {timing.device}, {_things(timing.threads, 'thread')}, "
            f"{blocks}",
        ]
    )


def _tiles(report: Report) -> list[Tile]:
    row, check = report.drafting[report.drafter].summary, report.lossless
    ci95 = row.speedup.ci95
    interval = f"95 % interval {between(ci95)}" if ci95 else TOO_FEW
    length = row.acceptance_length
    bounds = f"; 95 % interval {between(length.ci95)}" if length.ci95 else ""
    exact = check.lossless and check.greedy_total and check.identical
    told = "greedy outputs not checked"
    if check.greedy_total:
        told = f"greedy outputs identical to plain decoding in {check.dtype}"
    unknown = check.lossless and not check.greedy_total
    return [
        Tile("Speedup", number(row.speedup.value), "\N{MULTIPLICATION SIGN}",
             f"{interval}; predicted {number(row.predicted_speedup)}"),
        Tile("Acceptance length", number(length.micro), "tokens",
             f"per target pass, bonus counted{bounds}; macro {number(length.macro)}"),
        Tile("Tokens per second", speed(row.tokens_per_second.speculative), "",
             f"{speed(row.tokens_per_second.autoregressive)} without the drafter; prefill "
             "included"),
        Tile("Lossless",
             f"{'✓ ' * bool(exact)}{check.greedy_identical}" if check.greedy_total else NOTHING,
             f"/ {check.greedy_total}" if check.greedy_total else "",
             f"{told}; {rule_statement(check.rule, check.lossless)}",
             "good" if exact else "" if unknown else "bad"),
    ]  # fmt: skip
