"""The tables of a report, each laid out once: terminal, Markdown and HTML show the same cells."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from drafttrain.report.results import (
    Adaptation,
    AdaptationRow,
    Badge,
    Cell,
    Certificate,
    Change,
    Check,
    Disagreement,
    Estimate,
    MethodRow,
    Point,
    Report,
    Table,
    TaskVerdict,
    WitnessRow,
    WitnessSection,
)
from drafttrain.report.verdict import bill, fastest_depth, grouped
from drafttrain.report.wording import (
    NOTHING,
    cell,
    count,
    memory,
    money,
    number,
    percent,
    speed,
)

Line = TypeVar("Line")


@dataclass(frozen=True)
class Column(Generic[Line]):
    """One column: its heading, and its cell of a line."""

    heading: str
    cell: Callable[[Line], Cell]


def table(
    title: str,
    caption: str,
    first: str,
    columns: Sequence[Column[Line]],
    lines: Mapping[str, Line],
    notes: Sequence[str] = (),
) -> Table:
    """Return the table of lines by name; `first` heads the column of their names."""
    return Table(
        title,
        caption,
        [first, *(column.heading for column in columns)],
        [[name, *(column.cell(line) for column in columns)] for name, line in lines.items()],
        list(notes),
    )


def texts(content: Table) -> list[list[str]]:
    """Return the rows of a table as texts."""
    return [[cell(value) for value in row] for row in content.rows]


LENGTH = Column[MethodRow]("acceptance length, 95 %", lambda row: row.acceptance_length.estimate)
POSITIONS = Column[MethodRow]("per position", lambda row: row.acceptance_per_position)
PLAIN_SPEED = Column[MethodRow](
    "tokens/s plain", lambda row: speed(row.tokens_per_second.autoregressive)
)
SPEED = Column[MethodRow]("tokens/s drafted", lambda row: speed(row.tokens_per_second.speculative))
SPEEDUP = Column[MethodRow]("speedup, 95 %", lambda row: row.speedup)
PREDICTED = Column[MethodRow]("predicted speedup", lambda row: number(row.predicted_speedup))
REPEATS = Column[MethodRow]("text repeats", lambda row: percent(row.repetition_rate))

MEASURED = [
    LENGTH,
    Column[MethodRow]("macro", lambda row: number(row.acceptance_length.macro)),
    POSITIONS,
    PLAIN_SPEED,
    SPEED,
    SPEEDUP,
]
BRIEF = [
    Column[MethodRow]("accept. length", lambda row: number(row.acceptance_length.micro)),
    Column[MethodRow]("acceptance per position", POSITIONS.cell),
    Column[MethodRow]("tok/s plain", PLAIN_SPEED.cell),
    Column[MethodRow]("tok/s with", SPEED.cell),
    SPEEDUP,
]
COUNTS = [
    Column[MethodRow]("prompts", lambda row: count(row.num_prompts)),
    Column[MethodRow]("tokens", lambda row: count(row.num_output_tokens)),
    Column[MethodRow]("drafts", lambda row: count(row.num_drafts)),
    Column[MethodRow]("drafted", lambda row: count(row.num_draft_tokens)),
    Column[MethodRow]("accepted", lambda row: count(row.num_accepted_tokens)),
    Column[MethodRow]("rate", lambda row: number(row.acceptance_rate)),
    Column[MethodRow]("draft ms", lambda row: number(row.time_ms.draft)),
    Column[MethodRow]("verify ms", lambda row: number(row.time_ms.verify)),
    Column[MethodRow]("other ms", lambda row: number(row.time_ms.other)),
    Column[MethodRow]("prefill ms", lambda row: number(row.time_ms.prefill)),
    PREDICTED,
    REPEATS,
]


def _outside_length(row: MethodRow) -> Cell:
    return Estimate(row.outside_repetition.acceptance_length, row.outside_repetition.ci95)


def _beside(difference: Estimate) -> Cell:
    return Change(difference.value, difference.ci95)


OUTSIDE = [
    REPEATS,
    Column[MethodRow]("acceptance length outside, 95 %", _outside_length),
    Column[MethodRow]("rate outside", lambda row: number(row.outside_repetition.acceptance_rate)),
    Column[MethodRow](
        "share of drafts", lambda row: percent(row.outside_repetition.share_of_drafts)
    ),
    Column[MethodRow](
        "acceptance length minus ngram's, 95 %",
        lambda row: _beside(row.acceptance_length_difference_to_ngram.all_text),
    ),
    Column[MethodRow](
        "outside repetition, 95 %",
        lambda row: _beside(row.acceptance_length_difference_to_ngram.outside_repetition),
    ),
    Column[MethodRow](
        "tokens per pass minus ngram's, 95 %",
        lambda row: _beside(row.tokens_per_pass_difference_to_ngram.all_text),
    ),
    Column[MethodRow](
        "outside repetition, 95 %",
        lambda row: _beside(row.tokens_per_pass_difference_to_ngram.outside_repetition),
    ),
]


def depth_shown(report: Report) -> str:
    """Return the depth that the drafter is shown at, and of which it is the fastest."""
    shown = fastest_depth(report.verdicts["all"])
    at = report.depth
    return shown if report.main_depth == at else f"{shown} (ngram drafts at {at})"


def summary_table(report: Report) -> Table:
    """Return what the terminal shows: rows by task and in all, prompt lookup, losslessness."""
    (drafter, own), *others = report.drafting.items()
    lines = {f"all, {drafter}": own.summary, **own.tasks}
    lines |= {f"all, {method}": rows.summary for method, rows in others}
    notes = [report.verdict, *grouped(report.verdicts), *bill(report.verdicts["all"])]
    notes += [report.beats_ngram.statement, f"Lossless: {report.lossless.statement}."]
    notes += [f"Flag: {flag.row}: {flag.text}." for flag in report.flags]
    title = f"{drafter} on {report.target}, {depth_shown(report)}"
    return table(title, "", "task", BRIEF, lines, notes)


def verdict_table(report: Report) -> Table:
    """Return the verdict by task: what to do, what it brings, what it costs."""
    verdicts = report.verdicts
    columns = [
        Column[TaskVerdict]("verdict", lambda verdict: Badge(verdict.decision)),
        Column[TaskVerdict]("depth", lambda verdict: str(verdict.depth)),
        Column[TaskVerdict](SPEEDUP.heading, lambda verdict: verdict.speedup),
        Column[TaskVerdict]("acceptance rate", lambda verdict: number(verdict.acceptance_rate)),
    ]
    currencies = [verdict.money.currency for verdict in verdicts.values() if verdict.money]
    if currencies:
        price = f"{currencies[0]} per million tokens, plain"
        columns += [
            Column[TaskVerdict](price, lambda verdict: money_cells(verdict)[0]),
            Column[TaskVerdict]("drafted", lambda verdict: money_cells(verdict)[1]),
            Column[TaskVerdict]("saving, 95 %", lambda verdict: money_cells(verdict)[2]),
        ]
    if any(verdict.extra_memory for verdict in verdicts.values()):
        columns.append(Column[TaskVerdict]("extra memory", _extra_memory))
    caption = " ".join([report.definitions["verdicts"], *bill(verdicts["all"])])
    return table("Verdict", caption, "task", columns, verdicts)


def money_cells(verdict: TaskVerdict) -> tuple[str, str, str]:
    """Return the price per million tokens, plain and drafted, and the saving with its interval."""
    if verdict.money is None:
        return NOTHING, NOTHING, NOTHING
    price, saving = verdict.money.per_million_tokens, verdict.money.saving
    bounds = "" if saving.ci95 is None else f" [{', '.join(map(percent, saving.ci95))}]"
    return money(price.autoregressive), money(price.speculative), percent(saving.value) + bounds


def _extra_memory(verdict: TaskVerdict) -> Cell:
    return memory(verdict.extra_memory.total_bytes if verdict.extra_memory else None)


def measured_tables(report: Report) -> list[Table]:
    """Return what was measured of every method, its text outside repetition, and its counters."""
    found = []
    for method, rows in report.drafting.items():
        own = method == report.drafter
        found.append(
            table(
                f"{method}, task by task" if own else f"{method}, the reference",
                "Intervals: 95 %, bootstrap over prompts, paired with plain decoding."
                if own
                else "The same prompts, loop and blocks. A drafter that does not beat prompt "
                "lookup is not worth its cost.",
                "task",
                MEASURED,
                rows.by_name,
            )
        )
        outside = "Acceptance where the text says something new: text in loops is easy to draft."
        if own:
            outside += " Differences are paired by prompt."
        found.append(
            table(f"{method}: outside repetition, and beside prompt lookup", outside, "task",
                  OUTSIDE, rows.by_name)
        )  # fmt: skip
    own_rows = report.drafting[report.drafter].by_name
    found.append(table(f"{report.drafter}: counters and times", "", "task", COUNTS, own_rows))
    return found


def certificate_table(section: Certificate) -> Table:
    """Return the certificate as a table of the report."""
    outcome = {True: "passed", False: "FAILED", None: "reported"}
    columns = [
        Column[Check]("outcome", lambda check: outcome[check.passed]),
        Column[Check]("measured", lambda check: check.text),
        Column[Check]("bound", lambda check: check.bound),
    ]
    caption = (
        f"{section.statement[0].upper()}{section.statement[1:]}. Rule: {section.rule}; "
        f"checked in {section.dtype} on {section.num_prompts} prompts."
    )
    checks = {check.name: check for check in section.checks}
    return table("Certificate", caption, "check", columns, checks)


def adaptation_table(section: Adaptation) -> Table:
    """Return the section as a table: a row for all prompts and one per task."""
    columns = [
        Column[AdaptationRow]("prompts", lambda row: str(row.num_prompts)),
        Column[AdaptationRow]("acceptance length before", lambda row: row.acceptance_length.before),
        Column[AdaptationRow]("after", lambda row: row.acceptance_length.after),
        Column[AdaptationRow]("difference [95 %]", lambda row: row.acceptance_length.difference),
        Column[AdaptationRow]("speedup before", lambda row: row.speedup.before),
        Column[AdaptationRow]("after", lambda row: row.speedup.after),
        Column[AdaptationRow]("difference [95 %]", lambda row: row.speedup.difference),
    ]
    caption = f"{section.statement[0].upper()}{section.statement[1:]}. {section.definition}"
    return table("Before and after adapting", caption, "task", columns, section.rows)


def sweep_table(points: Sequence[Point], rules: Mapping[float, str]) -> Table:
    """Return the sweep as a table of the report; rules: by temperature, how drafts are accepted."""
    columns = ["temperature", "batch", "depth", "acceptance length, 95 %", PLAIN_SPEED.heading]
    columns += [SPEED.heading, "speedup, 95 %", PREDICTED.heading, "speedup of ngram"]
    rows: list[list[Cell]] = [
        [
            f"{point.temperature:g}",
            str(point.batch_size),
            str(point.depth),
            *(one.cell(point.summary) for one in (LENGTH, PLAIN_SPEED, SPEED, SPEEDUP, PREDICTED)),
            point.ngram.speedup if point.ngram else NOTHING,
        ]
        for point in points
    ]
    notes = [
        f"Fastest at temperature {temperature:g}, batch {size}: depth {best['all'].depth} in all; "
        "by task " + ", ".join(f"{task} {p.depth}" for task, p in best.items() if task != "all")
        + "."
        for (temperature, size), best in best_depths(points).items()
    ]  # fmt: skip
    if len(set(rules.values())) > 1:
        notes += [f"Rule at temperature {where:g}: {rule}." for where, rule in rules.items()]
    return Table(
        "Depth, temperature and batch",
        "Rows of a batch are decoded together and leave as they end; tokens per second are of the "
        "whole batch. Ngram drafts at the report's depth.",
        columns,
        rows,
        [*notes, *stops_paying(points)],
    )


def best_depths(points: Sequence[Point]) -> dict[tuple[float, int], dict[str, Point]]:
    """Return the fastest point of each temperature and batch size, in all and by task."""
    chosen: dict[tuple[float, int], dict[str, Point]] = {}
    for point in points:
        best = chosen.setdefault((point.temperature, point.batch_size), {})
        for name, row in point.by_name.items():
            speedup = best[name].by_name[name].speedup.value if name in best else None
            if name not in best or (row.speedup.value or 0.0) > (speedup or 0.0):
                best[name] = point
    return chosen


def stops_paying(points: Sequence[Point]) -> list[str]:
    """Say for each temperature at which measured batch size speculation no longer pays."""
    sentences = []
    best = {place: chosen["all"].summary.speedup for place, chosen in best_depths(points).items()}
    for temperature in dict.fromkeys(temperature for temperature, _ in best):
        here = {size: best[t, size] for t, size in sorted(best) if t == temperature}
        if len(here) < 2:
            continue
        pays = [size for size, speedup in here.items() if speedup.ci95 and speedup.ci95[0] > 1]
        others = [size for size in here if size not in pays]
        at = f"At temperature {temperature:g}, over batches of {', '.join(map(str, here))}"
        if not others:
            sentences.append(f"{at}, speculation pays at every size.")
        elif not pays:
            sentences.append(
                f"{at}, speculation pays at none (lower bound of the speedup above 1)."
            )
        elif min(others) < max(pays):  # no single size from which on it pays no more
            sentences.append(
                f"{at}, speculation pays at {', '.join(map(str, pays))} only: elsewhere the "
                "speedup of the best depth is not above 1 with 95 % confidence."
            )
        else:
            sentences.append(
                f"{at}, speculation stops paying at {min(others)}: there the speedup of the "
                "best depth is no longer above 1 with 95 % confidence."
            )
    return sentences


def witness_table(section: WitnessSection) -> Table:
    """Return vLLM's numbers beside ours as a table: a row per batch size."""
    columns = [
        Column[WitnessRow]("acceptance length, vLLM", lambda row: row.acceptance_length),
        Column[WitnessRow](
            "ours", lambda row: number(row.ours.acceptance_length if row.ours else None)
        ),
        Column[WitnessRow]("per position, vLLM", lambda row: row.acceptance_per_position),
        Column[WitnessRow](
            PLAIN_SPEED.heading, lambda row: speed(row.tokens_per_second.autoregressive)
        ),
        Column[WitnessRow](SPEED.heading, lambda row: speed(row.tokens_per_second.speculative)),
        Column[WitnessRow]("speedup, vLLM, 95 %", lambda row: row.speedup),
        Column[WitnessRow]("ours, 95 %", lambda row: row.ours.speedup if row.ours else NOTHING),
    ]
    temperature = section.sampling.temperature
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    turns = "in turns" if section.interleaved else "one after the other: memory holds but one"
    notes = [section.agreement.statement, *map(_disagreement, section.agreement.disagreements)]
    if section.prediction is not None:
        notes.append(section.prediction.statement)
    return table(
        "vLLM beside our loop",
        f"vLLM {section.vllm} with {section.drafter} at depth {section.depth}, {how}, "
        f"{section.dtype} on {section.device}, {section.threads} thread"
        f"{'s' if section.threads != 1 else ''}; {section.num_outputs} outputs, both engines "
        f"{turns}; drafts: {section.draft_sampling}. Tokens per second are vLLM's.",
        "batch",
        columns,
        {str(row.batch_size): row for row in section.batches},
        [*notes, *section.notes],
    )


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
