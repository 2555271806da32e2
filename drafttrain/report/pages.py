"""The pages of a report on disk."""

from pathlib import Path

from drafttrain.report.document import WRONG, Document, Listing, Outputs, Tile, flagged, notes
from drafttrain.report.outputs import WRITERS
from drafttrain.report.phrases import (
    NOTHING,
    bounds,
    flat,
    number,
    rule_statement,
    sentence,
    speed,
    things,
)
from drafttrain.report.plots import Figure, report_figures
from drafttrain.report.results import Report
from drafttrain.report.tables import (
    along_table,
    answers_table,
    depth_shown,
    examples_table,
    measured_tables,
    published_table,
    training_table,
    verdict_table,
)
from drafttrain.report.write import write_pages

REPORT_FILES = ("report.json", "report.md", "report.html")
# Kinds of flags that put no number in doubt: few timing blocks, a busy machine, and greedy outputs
# that rounding changed in the dtype of the timing (a check that failed is flagged itself).
MILD = ("timing", "busy", "outputs_differing")


def write_report(report: Report, folder: Path) -> list[Figure]:
    """Write report.json, report.md and report.html, each as a whole; return the figures."""
    figures = report_figures(report)
    write_pages(folder, "report", report_document(report), figures, report)
    return figures


def report_document(report: Report) -> Document:
    """Return the pages of a report as a document."""
    told = vars(examples_table(report.examples))
    outputs = Outputs(**told, writers=WRITERS, examples=report.examples)
    divergences = [
        ("", ", ".join(f"{key} {value}" for key, value in vars(divergence).items()))
        for divergence in report.lossless.divergences
    ]
    return Document(
        "speculative decoding, measured",
        f"{report.drafter} on {report.target}",
        [report.verdict, report.beats_ngram.statement, sentence(report.lossless.statement)],
        conditions_line(report),
        _tiles(report),
        [verdict_table(report), *flagged(report.flags, MILD)],
        [
            *([outputs] if report.examples else []),
            *([along_table(report.along_output)] if report.along_output else []),
            *measured_tables(report),
            *([answers_table(report.answer_times)] if report.answer_times else []),
            *report.tables,
            *([] if report.training is None else [training_table(report.training)]),
            *([published_table(report)] if report.published else []),
            notes("Notes", report.notes),
            Listing("Greedy divergences", divergences),
            Listing("Definitions", list(report.definitions.items())),
            # The counts of overlap by task are for programs; a sentence beside them sums them up.
            Listing("Prompts", flat({k: v for k, v in report.prompts.items() if k != "overlap"})),
            Listing("Provenance", flat(report.provenance)),
        ],
    )


def conditions_line(report: Report) -> str:
    """Return a line with what was measured, and how."""
    sampling, timing, row = report.sampling, report.timing, report.summary
    drawn = f"temperature {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}"
    blocks = things(timing.blocks, "interleaved block")
    if timing.repeats < timing.blocks:
        blocks += f", each prompt in {timing.repeats} of them"
    return " · ".join(
        [
            f"{things(row.num_prompts, 'prompt')} in {things(len(report.tasks), 'task')}",
            depth_shown(report),
            "greedy" if sampling.temperature == 0 else drawn,
            f"at most {sampling.max_new_tokens} new tokens",
            f"batch {report.batch_size}",
            f"timed in {timing.dtype} on {timing.device}, {things(timing.threads, 'thread')}, "
            f"{blocks}",
        ]
    )


def _tiles(report: Report) -> list[Tile]:
    row, check = report.summary, report.lossless
    length = row.acceptance_length
    of_length = f"; {bounds(length.ci95)}" if length.ci95 else ""
    exact = check.lossless and check.greedy_total and check.identical
    told = "greedy outputs not checked"
    if check.greedy_total:
        told = f"greedy outputs identical to plain decoding in {check.dtype}"
    failed = any(flag.kind in WRONG for flag in report.flags)
    return [
        Tile("Speedup", number(row.speedup.value), "\N{MULTIPLICATION SIGN}",
             f"{bounds(row.speedup.ci95)}; predicted {number(row.predicted_speedup)}"),
        Tile("Acceptance length", number(length.micro), "tokens",
             f"per draft, bonus counted{of_length}; macro {number(length.macro)}"),
        Tile("Tokens per second", speed(row.tokens_per_second.speculative), "",
             f"{speed(row.tokens_per_second.autoregressive)} without the drafter; prefill "
             "included"),
        Tile("Lossless",
             f"{'✓ ' * bool(exact)}{check.greedy_identical}" if check.greedy_total else NOTHING,
             f"/ {check.greedy_total}" if check.greedy_total else "",
             f"{told}; {rule_statement(check.rule, check.lossless)}",
             "bad" if failed else "good" if exact else "" if check.lossless else "fair"),
    ]  # fmt: skip
