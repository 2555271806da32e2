"""The tables of a report, laid out once each: terminal, Markdown and HTML show the same cells."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from drafttrain.report.outputs import WRITERS
from drafttrain.report.phrases import (
    NOTHING,
    cell,
    count,
    drawn,
    memory,
    money,
    number,
    percent,
    sentence,
    speed,
    things,
)
from drafttrain.report.results import (
    Adaptation,
    AdaptationRow,
    AnswerTimes,
    Badge,
    Cell,
    Certificate,
    Check,
    Disagreement,
    Example,
    MethodRow,
    OutputBin,
    Point,
    Report,
    Table,
    TaskVerdict,
    TrainingCurves,
    TrainingSeries,
    WitnessRow,
    WitnessSection,
)
from drafttrain.report.verdict import bill, fastest_depth, grouped

LONGEST_CELL = 20  # letters; a longer cell, such as many positions, goes on in the next line
Line = TypeVar("Line")
Column = tuple[str, Callable[[Line], Cell]]  # its heading, and its cell for a line


def table(
    title: str,
    caption: str,
    first: str,
    columns: Sequence[Column[Line]],
    lines: Iterable[tuple[str, Line]],
    notes: Sequence[str] = (),
) -> Table:
    """Return the table of named lines; `first` heads the column of their names."""
    headings = [first, *(heading for heading, _ in columns)]
    rows = [[name, *(cell_of(line) for _, cell_of in columns)] for name, line in lines]
    return Table(title, caption, headings, rows, list(notes))


def texts(content: Table) -> list[list[str]]:
    """Return the rows of a table as texts."""
    return [[cell(value) for value in row] for row in content.rows]


Timed = MethodRow | WitnessRow
LENGTH: Column[MethodRow] = ("acceptance length, 95 %", lambda row: row.acceptance_length.estimate)
PLAIN_SPEED: Column[Timed] = (
    "tokens/s plain",
    lambda row: speed(row.tokens_per_second.autoregressive),
)
SPEED: Column[Timed] = ("tokens/s drafted", lambda row: speed(row.tokens_per_second.speculative))
SPEEDUP: Column[Any] = ("speedup, 95 %", lambda row: row.speedup)
PREDICTED: Column[MethodRow] = ("predicted speedup", lambda row: number(row.predicted_speedup))
REPEATS: Column[MethodRow] = ("text repeats", lambda row: percent(row.repetition_rate))

MEASURED: list[Column[MethodRow]] = [
    LENGTH,
    ("macro", lambda row: number(row.acceptance_length.macro)),
    ("per position", lambda row: row.acceptance_per_position),
    PLAIN_SPEED,
    SPEED,
    SPEEDUP,
]
BRIEF: list[Column[MethodRow]] = [
    ("accept. length", lambda row: number(row.acceptance_length.micro)),
    ("rate", lambda row: number(row.acceptance_rate)),
    ("acceptance per position", lambda row: row.acceptance_per_position),
    ("tok/s plain", PLAIN_SPEED[1]),
    ("tok/s with", SPEED[1]),
    SPEEDUP,
]
COUNTS: list[Column[MethodRow]] = [
    ("prompts", lambda row: count(row.num_prompts)),
    ("tokens", lambda row: count(row.num_output_tokens)),
    ("drafts", lambda row: count(row.num_drafts)),
    ("drafted", lambda row: count(row.num_draft_tokens)),
    ("accepted", lambda row: count(row.num_accepted_tokens)),
    ("acceptance rate", lambda row: number(row.acceptance_rate)),
    ("draft ms", lambda row: number(row.time_ms.draft)),
    ("verify ms", lambda row: number(row.time_ms.verify)),
    ("other ms", lambda row: number(row.time_ms.other)),
    ("prefill ms", lambda row: number(row.time_ms.prefill)),
    PREDICTED,
    REPEATS,
]
LENGTH_MINUS = "acceptance_length_difference_to_ngram"
TOKENS_MINUS = "tokens_per_pass_difference_to_ngram"
OUTSIDE: list[Column[MethodRow]] = [
    REPEATS,
    ("acceptance length outside, 95 %", lambda row: row.outside_repetition.estimate),
    ("acceptance rate outside", lambda row: number(row.outside_repetition.acceptance_rate)),
    ("share of drafts", lambda row: percent(row.outside_repetition.share_of_drafts)),
    ("acceptance length minus ngram's, 95 %", attrgetter(f"{LENGTH_MINUS}.all_text")),
    ("outside repetition, 95 %", attrgetter(f"{LENGTH_MINUS}.outside_repetition")),
    ("tokens per pass minus ngram's, 95 %", attrgetter(f"{TOKENS_MINUS}.all_text")),
    ("outside repetition, 95 %", attrgetter(f"{TOKENS_MINUS}.outside_repetition")),
]
OUTCOMES = {True: Badge("passed"), False: Badge("FAILED"), None: Badge("reported")}
CHECKED: list[Column[Check]] = [
    ("outcome", lambda check: OUTCOMES[check.passed]),
    ("measured", lambda check: check.text),
    ("bound", lambda check: check.bound),
]
ANSWERED: list[Column[AnswerTimes]] = [
    ("answers", lambda row: count(row.num_answers)),
    ("seconds, p50, p95, plain", lambda row: _both(row.plain.seconds, 2)),
    ("drafted", lambda row: _both(row.drafted.seconds, 2)),
    ("first token, ms, p50, p95, plain", lambda row: _both(row.plain.first_token_ms, 1)),
    ("drafted", lambda row: _both(row.drafted.first_token_ms, 1)),
    SPEEDUP,
]
ADAPTED: list[Column[AdaptationRow]] = [
    ("prompts", lambda row: str(row.num_prompts)),
    ("acceptance length before", lambda row: row.acceptance_length.before),
    ("after", lambda row: row.acceptance_length.after),
    ("difference [95 %]", lambda row: row.acceptance_length.difference),
    ("speedup before", lambda row: row.speedup.before),
    ("after", lambda row: row.speedup.after),
    ("difference [95 %]", lambda row: row.speedup.difference),
]
WITNESSED: list[Column[WitnessRow]] = [
    ("mean acceptance length, vLLM", lambda row: row.mean_acceptance_length),
    ("ours", lambda row: number(row.ours.mean_acceptance_length if row.ours else None)),
    ("per position, vLLM", lambda row: row.acceptance_per_position),
    PLAIN_SPEED,
    SPEED,
    ("speedup, vLLM, 95 %", lambda row: row.speedup),
    ("ours, 95 %", lambda row: row.ours.speedup if row.ours else NOTHING),
]


def depth_shown(report: Report) -> str:
    """Return the depth of the drafts, and the depths it was chosen from."""
    shown = fastest_depth(report.verdicts["all"])
    return f"{shown} ({report.tree})" if report.tree else shown


def summary_table(report: Report) -> Table:
    """Return the terminal's table: rows in all and by task, prompt lookup, losslessness."""
    (drafter, own), *others = report.drafting.items()
    lines = {f"all, {drafter}": own.summary, **own.tasks}
    lines |= {f"all, {method}": rows.summary for method, rows in others}
    notes = [report.verdict, *grouped(report.verdicts), *bill(report.verdicts["all"])]
    notes += [report.beats_ngram.statement, sentence(report.lossless.statement)]
    notes += [f"Flag: {flag.row}: {flag.text}." for flag in report.flags]
    title = f"{drafter} on {report.target}, {depth_shown(report)}"
    return table(title, "", "task", BRIEF, lines.items(), notes)


def verdict_table(report: Report) -> Table:
    """Return the table of verdicts by task: the decision, its gain and its cost."""
    verdicts = report.verdicts
    columns: list[Column[TaskVerdict]] = [
        ("verdict", lambda verdict: Badge(verdict.decision)),
        ("depth", lambda verdict: str(verdict.depth)),
        (SPEEDUP[0], lambda verdict: verdict.speedup),
        ("acceptance rate", lambda verdict: number(verdict.acceptance_rate)),
        ("acceptance length", lambda verdict: number(verdict.acceptance_length)),
        ("pays from length", lambda verdict: number(verdict.break_even_length)),
    ]
    currencies = [verdict.money.currency for verdict in verdicts.values() if verdict.money]
    if currencies:
        columns += [
            (f"{currencies[0]} per million tokens, plain", lambda verdict: money_cells(verdict)[0]),
            ("drafted", lambda verdict: money_cells(verdict)[1]),
            ("saving, 95 %", lambda verdict: money_cells(verdict)[2]),
        ]
    if any(verdict.extra_memory for verdict in verdicts.values()):
        columns.append(("extra memory", _extra_memory))
    notes = [report.definitions["verdicts"]]
    return table(
        "Verdict", " ".join(bill(verdicts["all"])), "task", columns, verdicts.items(), notes
    )


def money_cells(verdict: TaskVerdict) -> tuple[str, str, str]:
    """Return the price per million tokens, plain and drafted, and the saving with its interval."""
    if verdict.money is None:
        return NOTHING, NOTHING, NOTHING
    price, saving = verdict.money.per_million_tokens, verdict.money.saving
    bounds = "" if saving.ci95 is None else f" [{', '.join(map(percent, saving.ci95))}]"
    return money(price.autoregressive), money(price.speculative), percent(saving.value) + bounds


def _extra_memory(verdict: TaskVerdict) -> str:
    return memory(verdict.extra_memory.total_bytes) if verdict.extra_memory else NOTHING


def measured_tables(report: Report) -> list[Table]:
    """Return tables of every method's measurements and its acceptance outside repetition."""
    found = []
    for method, rows in report.drafting.items():
        title = f"{method}, the reference"
        caption = (
            "The same prompts, loop and blocks. A drafter that does not beat prompt lookup is not "
            "worth its cost."
        )
        outside = "Acceptance where the output does not repeat itself: loops are easy to draft."
        if method == report.drafter:
            title = f"{method}, task by task"
            caption = "Intervals: 95 %, bootstrap over prompts, paired with plain decoding."
            outside += " Differences are paired by prompt."
        lines = rows.by_name.items()
        found.append(table(title, caption, "task", MEASURED, lines))
        title = f"{method}: outside repetition, and beside prompt lookup"
        found.append(table(title, outside, "task", OUTSIDE, lines))
    own_rows = report.drafting[report.drafter].by_name.items()
    found.append(table(f"{report.drafter}: counters and times", "", "task", COUNTS, own_rows))
    return found


def examples_table(examples: Sequence[Example]) -> Table:
    """Return example outputs as a table, with the number of tokens by writer."""
    columns: list[Column[Example]] = [
        ("prompt", lambda example: example.prompt),
        ("output", lambda example: "".join(piece.text for piece in example.pieces)),
        *((writer, lambda example, by=writer: count(example.num_tokens(by))) for writer in WRITERS),
    ]
    caption = (
        "The first answers to the prompts on which drafts were accepted least, at the median, and "
        "most."
    )
    notes = [f"{writer}: {meaning}" for writer, meaning in WRITERS.items()]
    lines = [(f"{example.task}, {example.prompt_id}", example) for example in examples]
    return table("Example outputs", caption, "example", columns, lines, notes)


def _both(percentiles: Sequence[float], digits: int) -> str:
    return " / ".join(number(value, digits) for value in percentiles)


def answers_table(rows: Sequence[AnswerTimes]) -> Table:
    """Return how long answers take, plain and drafted, in all and by length."""
    caption = (
        "By the length of the plain answer, up to so many tokens. As one waits who asks: an answer "
        "of a batch takes as long as the batch's passes. Median and 95th percentile."
    )
    lines = [(str(row.most_tokens or "all"), row) for row in rows]
    return table("Seconds per answer", caption, "length", ANSWERED, lines)


def along_table(bins: Sequence[OutputBin]) -> Table:
    """Return acceptance by the position in the output at which a draft began."""
    columns: list[Column[OutputBin]] = [
        ("drafts", lambda one: count(one.num_drafts)),
        ("accepted tokens per draft, 95 %", lambda one: one.accepted_per_draft),
    ]
    caption = "By the position of a draft's first token; the last draft counts as far as it got."
    lines = [(f"{one.first} to {one.last}", one) for one in bins]
    return table("Acceptance along the output", caption, "position", columns, lines)


def published_table(report: Report) -> Table:
    """Return the family's published measurements below this report's, with what differs."""
    row = report.summary
    shape = report.tree or f"chain of {report.verdicts['all'].depth}"
    hardware = f"{report.timing.device}, {report.timing.dtype}"
    prompts = f"{things(row.num_prompts, 'prompt')}, {drawn(report.sampling.temperature)}"
    prompts += f", batch {report.batch_size}"
    ours: list[Cell] = [report.target, shape, "see Provenance", prompts, hardware]
    rows = [["this report", *ours, row.speedup, row.acceptance_length.estimate]]
    rows += [
        [
            one.source,
            *(one.target, one.drafts, one.trained_on, one.prompts, one.hardware),
            number(one.speedup),
            number(one.acceptance_length),
        ]
        for one in report.published
    ]
    caption = (
        "Quoted, not measured here. Target, drafts, data, prompts and hardware differ as listed, "
        "and each source has its own definition of acceptance length: compare orders, not digits."
    )
    columns = ["source", "target", "drafts", "trained on", "prompts", "hardware"]
    columns += ["speedup", "acceptance length"]
    return Table("Published for this family, beside this report", caption, columns, rows)


def training_table(curves: TrainingCurves) -> Table:
    """Return the first and the last values of each curve, and the best of the validation."""
    columns: list[Column[TrainingSeries]] = [
        ("unit", lambda one: one.unit),
        ("first", lambda one: f"{number(one.values[0])} at step {one.steps[0]:,}"),
        ("last", lambda one: f"{number(one.values[-1])} at step {one.steps[-1]:,}"),
        ("tokens", lambda one: count(one.tokens[-1])),
    ]
    lines = [(one.name, one) for one in curves.series]
    return table("Training", sentence(curves.statement), "curve", columns, lines)


def certificate_table(section: Certificate) -> Table:
    """Return the certificate as a table of the report."""
    caption = (
        f"{sentence(section.statement)} Rule: {section.rule}; "
        f"checked in {section.dtype} on {section.num_prompts} prompts."
    )
    checks = [(check.name, check) for check in section.checks]
    return table("Certificate", caption, "check", CHECKED, checks)


def adaptation_table(section: Adaptation) -> Table:
    """Return the section as a table: a row for all prompts and one per task."""
    caption = f"{sentence(section.statement)} {section.definition}"
    return table("Before and after adapting", caption, "task", ADAPTED, section.rows.items())


def sweep_table(points: Sequence[Point], rules: Mapping[float, str]) -> Table:
    """Return the sweep as a table of the report; rules: the verification rule by temperature."""
    of_summary = (LENGTH, PLAIN_SPEED, SPEED, SPEEDUP, PREDICTED)
    columns: list[Column[Point]] = [
        ("batch", lambda point: str(point.batch_size)),
        ("depth", lambda point: str(point.depth)),
        *((heading, lambda point, of=of: of(point.summary)) for heading, of in of_summary),
        ("speedup of ngram", lambda point: point.ngram.speedup if point.ngram else NOTHING),
    ]
    notes = []
    for (temperature, size), best in best_depths(points).items():
        by_task = ", ".join(f"{task} {p.depth}" for task, p in best.items() if task != "all")
        ci95 = best["all"].summary.speedup.ci95
        pays = "pays" if ci95 is not None and ci95[0] > 1 else "may not pay"
        notes.append(
            f"Fastest at temperature {temperature:g}, batch {size}: depth {best['all'].depth} in "
            f"all, where speculation {pays}; by task {by_task}."
        )
    if len(set(rules.values())) > 1:
        notes += [f"Rule at temperature {where:g}: {rule}." for where, rule in rules.items()]
    caption = (
        "Rows of a batch are decoded together and leave as they end; tokens per second are of the "
        "whole batch. Ngram drafts as deep. Speculation pays where the speedup's lower bound is "
        "above 1."
    )
    lines = [(f"{point.temperature:g}", point) for point in points]
    return table("Depth, temperature and batch", caption, "temperature", columns, lines, notes)


def best_depths(points: Sequence[Point]) -> dict[tuple[float, int], dict[str, Point]]:
    """Return the fastest point of each temperature and batch size, in all and by task."""
    chosen: dict[tuple[float, int], dict[str, Point]] = {}
    for point in points:
        best = chosen.setdefault((point.temperature, point.batch_size), {})
        for name, row in point.by_name.items():
            fastest = best.setdefault(name, point).by_name[name].speedup.value
            if (row.speedup.value or 0.0) > (fastest or 0.0):
                best[name] = point
    return chosen


def witness_table(section: WitnessSection) -> Table:
    """Return a table of vLLM's numbers and ours: a row per batch size."""
    turns = "in turns" if section.interleaved else "one after the other: memory holds but one"
    caption = (
        f"vLLM {section.vllm} with {section.drafter} at depth {section.depth}, "
        f"{drawn(section.sampling.temperature)}, {section.dtype} on {section.device}, "
        f"{things(section.threads, 'thread')}; "
        f"{section.num_outputs} outputs, both engines {turns}; drafts: {section.draft_sampling}. "
        "Tokens per second are vLLM's."
    )
    notes = [section.agreement.statement, *map(_disagreement, section.agreement.disagreements)]
    if section.prediction is not None:
        notes.append(section.prediction.statement)
    lines = [(str(row.batch_size), row) for row in section.batches]
    notes += section.notes
    return table("vLLM beside our loop", caption, "batch", WITNESSED, lines, notes)


def with_witness(report: Report, section: WitnessSection) -> Report:
    """Return the report with the section and its table added."""
    return replace(report, vllm=section, tables=[*report.tables, witness_table(section)])


def _disagreement(one: Disagreement) -> str:
    if one.position is None:
        counted = "; ".join(
            f"{name}: {side.num_drafts} drafts, {side.num_accepted_tokens} accepted"
            for name, side in (("ours", one.ours), ("vLLM", one.theirs))
        )
        return f"{one.name}: the same text, other counters ({counted})"
    gap = "" if one.gap is None else f", where the target's two best logits are {one.gap:.2g} apart"
    judged = "a near tie" if one.tie else "no tie"
    return f"{one.name}: other text from token {one.position}{gap}: {judged}"


def rich_table(content: Table) -> RichTable:
    """Return a table for the terminal, with headings no wider than their columns."""
    shown = RichTable(
        title=Text(content.title),
        caption=Text("\n".join(content.notes)),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    rows = texts(content)
    for place, column in enumerate(content.columns):
        cells = [line for row in rows for line in row[place].split("\n")]
        width = max((len(cell) for cell in cells), default=1) or 1
        heading = textwrap.fill(column, width, break_long_words=False) or column
        shown.add_column(
            heading,
            justify="right" if place else "left",
            no_wrap=0 < place and width <= LONGEST_CELL,
            overflow="fold",  # a name that is too long is broken, not cut
        )
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown
