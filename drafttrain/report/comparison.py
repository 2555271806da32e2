"""A comparison of several runs: rows, differences and conditions, and the pages that show them."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from drafttrain.core.types import brief
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.config import CompareSettings
from drafttrain.report.definitions import comparison_definitions
from drafttrain.report.document import Document, Listing, flagged, notes
from drafttrain.report.metrics import ACCEPTANCE_LENGTH, SPEEDUP, Spread, at_pass_time, mean_ratio
from drafttrain.report.phrases import (
    NOTHING,
    bounds,
    cell,
    count,
    flat,
    number,
    rule_statement,
    signed,
    size,
    speed,
)
from drafttrain.report.plots import KINDS, MARKS, Figure, Series, dots
from drafttrain.report.results import NOT_COMPARED, ByTask, Cell, Change, Flag, Rates, Speeds, Table
from drafttrain.report.runs import (
    ComparedRun,
    Method,
    RunReport,
    check_comparable,
    conditions,
    find_method,
    methods_of,
    read_run,
    shared_prompts,
    training_statement,
)
from drafttrain.report.tables import Column, table
from drafttrain.report.totals import Key, by_scope
from drafttrain.report.write import as_data

SCHEMA_VERSION = 1
FILES = ("compare.json", "compare.md", "compare.html")
NAMED = 3  # runs that a flag names; more are counted
PLAIN_APART = 1.1  # times as fast: plain loops of the same target on the same prompts
SLOWER = (1, 3, 10)  # times the plain pass that was measured: targets of other sizes
QUANTITIES = ("acceptance_length", "speedup")
FIGURES = {  # unit and caption, by quantity
    "speedup": (
        "times plain decoding, 95 % interval",
        "Tokens per second over the plain loop's of the same run; the dashed line is no gain.",
    ),
    "acceptance_length": (
        "tokens per draft, 95 % interval",
        "Tokens per draft, bonus counted; the dashed line is plain decoding.",
    ),
}

Scopes = Mapping[str, list[Key]]  # the prompts of each task; those of all tasks under "all"


@dataclass(frozen=True)
class Numbers:
    """The measurements of a method on one task, or on all: means over its runs."""

    num_prompts: int
    acceptance_length: Spread
    speedup: Spread
    acceptance_rate: float | None
    acceptance_per_position: Rates
    tokens_per_second: Speeds
    draft_ms: float | None


@dataclass(frozen=True)
class AtPassTime:
    """A method's speedup beside a target whose passes take this long; None: drafting is free."""

    pass_ms: float | None
    speedup: Spread


@dataclass(frozen=True)
class RuleCheck:
    """Whether the runs of a method are lossless, as their reports state."""

    lossless: bool
    statement: str


@dataclass(frozen=True)
class ComparedMethod(ByTask[Numbers]):
    """One method: runs that differ in their seed alone, or a reference measured in several runs."""

    method: str
    reference: bool
    drafter: str
    depths: list[int]  # by run: those of a sweep choose their own
    runs: list[str]
    seeds: list[int | None]
    training: str
    drafter_parameters: int | None
    training_tokens: float | None
    training_seconds: float | None
    lossless: RuleCheck
    summary: Numbers
    tasks: dict[str, Numbers]
    slower_targets: list[AtPassTime]  # on all prompts


@dataclass(frozen=True)
class Both:
    """The differences in both quantities."""

    acceptance_length: Change
    speedup: Change


@dataclass(frozen=True)
class Pair(ByTask[Both]):
    """The differences of one method to another, and the conclusion."""

    method: str
    other: str
    summary: Both
    tasks: dict[str, Both]
    answer: str | None
    statement: str


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts that every run decoded."""

    num_prompts: int
    tasks: dict[str, int]
    by_run: dict[str, int]
    statement: str


@dataclass(frozen=True)
class Comparison:
    """The content of a comparison; compare.json has these fields in this order."""

    schema_version: int
    name: str
    evaluation: str
    target: str
    baseline: str
    conditions: dict[str, Any]
    prompts: SharedPrompts
    rows: list[ComparedMethod]
    differences: list[Pair]
    runs: list[ComparedRun]
    definitions: dict[str, str]
    provenance: Mapping[str, Any]
    flags: list[Flag]

    @property
    def versus(self) -> dict[str, Pair]:
        """The differences to the baseline, by method."""
        return {pair.method: pair for pair in self.differences if pair.other == self.baseline}


def compare_runs(config: CompareSettings, provenance: Mapping[str, Any]) -> Comparison:
    """Return the comparison of the evaluations of several runs.

    `config.baseline` is a run or a method, None for the first run's; every other row is compared
    with it and, with `config.all_pairs`, with each other. Raises ValueError in one line for a run
    without that evaluation or with a broken one, for runs that did not decode the same prompts
    with the same target in the same way, and for an unknown baseline.
    """
    places = [Path(run).resolve() for run in config.runs]
    short, root = [place.name for place in places], os.path.commonpath(places)
    runs = [
        read_run(
            Path(run),
            os.path.relpath(place, root) if short.count(place.name) > 1 else place.name,
            config.evaluation,
        )
        for run, place in zip(config.runs, places, strict=True)
    ]
    check_comparable(runs)
    keys = shared_prompts(runs)
    methods = methods_of(runs)
    base = find_method(methods, config.baseline)
    scopes = by_scope(keys)
    plain_ms = mean_ratio(base.columns(keys), "plain_verify_seconds", "plain_passes", scale=1000.0)
    batch_size = runs[0].report.batch_size
    # In a batch a row has but its share of a pass.
    passes = [times * plain_ms for times in SLOWER] if plain_ms and batch_size == 1 else []
    resampling = Resampling(config.resamples, config.seed)
    others = [method for method in methods if method is not base]
    pairs = [(method, base) for method in others]
    if config.all_pairs:
        pairs += [(later, one) for one, later in combinations(others, 2)]
    return Comparison(
        schema_version=SCHEMA_VERSION,
        name=config.name,
        evaluation=config.evaluation,
        target=runs[0].report.target,
        baseline=base.label,
        conditions=conditions(runs[0].report),
        prompts=SharedPrompts(
            len(keys),
            {task: len(scope) for task, scope in scopes.items() if task != "all"},
            {run.name: len(run.plain) for run in runs},
            _shared_statement(runs, keys),
        ),
        rows=[_row(method, scopes, passes, resampling) for method in methods],
        differences=[_difference(one, two, scopes, resampling) for one, two in pairs],
        runs=[run.summary for run in runs],
        definitions=comparison_definitions(config.resamples, batch_size),
        provenance=dict(provenance),
        flags=_flags(runs, methods, keys),
    )


def _shared_statement(runs: Sequence[RunReport], keys: Sequence[Key]) -> str:
    left = [
        f"{run.name} has {len(run.plain) - len(keys)} more"
        for run in runs
        if len(run.plain) > len(keys)
    ]
    used = f"{len(keys)} prompts, shared by all runs"
    return f"{used}; {', '.join(left)}, left out here" if left else used


def _row(
    method: Method, scopes: Scopes, passes: Sequence[float], resampling: Resampling
) -> ComparedMethod:
    numbers = {name: _numbers(method, name, keys, resampling) for name, keys in scopes.items()}
    own = [] if method.reference else method.runs
    tokens = [run.training_tokens for run in own if run.training_tokens is not None]
    curves = [run.report.training for run in own]
    seconds = [curve.seconds for curve in curves if curve is not None and curve.seconds is not None]
    columns = method.columns(scopes["all"])
    sizes = {run.drafter_parameters for run in own}
    return ComparedMethod(
        method=method.label,
        reference=method.reference,
        drafter=method.drafter,
        depths=[run.report.depth for run in method.runs],
        runs=[run.folder for run in method.runs],
        seeds=[run.seed for run in own],
        training=training_statement(method),
        drafter_parameters=sizes.pop() if len(sizes) == 1 else None,
        training_tokens=sum(tokens) / len(tokens) if tokens else None,
        training_seconds=sum(seconds) / len(seconds) if seconds else None,
        lossless=_lossless(method),
        summary=numbers.pop("all"),
        tasks=numbers,
        slower_targets=[
            AtPassTime(ms, at_pass_time(ms / 1000 if ms else math.inf).mean(columns, resampling))
            for ms in (*passes, None)
        ],
    )


def _per_position(method: Method, scope: str, keys: Sequence[Key]) -> Rates:
    """Return the mean over runs, [] if one drafted other depths or more prompts than these."""
    rows = [run.report.drafting[method.drafter].by_name.get(scope) for run in method.runs]
    told = [row.acceptance_per_position for row in rows if row and row.num_prompts == len(keys)]
    if len(told) < len(rows) or len({len(rates) for rates in told}) > 1:
        return []
    return [
        sum(known) / len(known) if (known := [r for r in rates if r is not None]) else None
        for rates in zip(*told, strict=True)
    ]


def _numbers(method: Method, scope: str, keys: Sequence[Key], resampling: Resampling) -> Numbers:
    columns = method.columns(keys)
    return Numbers(
        num_prompts=len(columns[0]["tokens"]),
        acceptance_length=ACCEPTANCE_LENGTH.mean(columns, resampling),
        speedup=SPEEDUP.mean(columns, resampling),
        acceptance_rate=mean_ratio(columns, "accepted", "drafted"),
        acceptance_per_position=_per_position(method, scope, keys),
        tokens_per_second=Speeds(
            mean_ratio(columns, "plain_tokens", "plain_seconds"),
            mean_ratio(columns, "tokens", "seconds"),
        ),
        draft_ms=mean_ratio(columns, "draft_seconds", "passes", scale=1000.0),
    )


def _lossless(method: Method) -> RuleCheck:
    """Return whether the runs are lossless; of a reference only the rule is known."""
    texts = {}
    for run in method.runs:
        check, certificate = run.report.lossless, run.report.certificate
        text = check.statement
        if method.reference:
            rule = rule_statement(check.rule, check.lossless)
            text = f"{rule}; outputs of this reference were not checked"
        elif certificate is not None and certificate.statement:
            text = f"{text}; certificate: {certificate.statement}"
        texts[run.name] = text
    statement = "; ".join(f"{name}: {text}" for name, text in texts.items())
    if len(set(texts.values())) == 1:
        statement = texts[method.runs[0].name]
    checks = [run.report.lossless for run in method.runs]
    return RuleCheck(all(check.lossless for check in checks), statement)


def _difference(one: Method, two: Method, scopes: Scopes, resampling: Resampling) -> Pair:
    found = {}
    for name, keys in scopes.items():
        sides = one.columns(keys), two.columns(keys)
        length = ACCEPTANCE_LENGTH.difference(*sides, resampling)
        found[name] = Both(length, SPEEDUP.difference(*sides, resampling))
    both = found.pop("all")
    apart = plain_loops_apart([*one.runs, *two.runs], scopes["all"])
    answer = both.speedup.decides("faster", "slower", "undecided")
    if apart and answer is not None:
        answer = "undecided"
    words = f"{one.label} is {answer} than {two.label}"
    if answer not in ("faster", "slower"):
        words = f"Whether {one.label} is faster than {two.label} is undecided"
    shown = [
        f"{name} difference {signed(change.value)}"
        + (f" ({bounds(change.ci95)})" if change.ci95 else " (no interval)")
        for name, change in (
            ("speedup", both.speedup),
            ("acceptance length", both.acceptance_length),
        )
    ]
    lossy = [method.label for method in (one, two) if not _lossless(method).lossless]
    warning = f"; NOT lossless: {', '.join(lossy)}" if lossy else ""
    if apart:
        warning += "; their plain loops ran at clearly different speeds"
    statement = f"{words}: {', '.join(shown)}{warning}."
    return Pair(one.label, two.label, both, found, answer, statement)


def _flags(runs: Sequence[RunReport], methods: Sequence[Method], keys: Sequence[Key]) -> list[Flag]:
    """Return the flags: lossy rows, different machines, different outputs, and the runs' own."""
    found = []

    def flag(kind: str, row: str, text: str) -> None:
        found.append(Flag(kind, row, text))

    for method in methods:
        lossless = _lossless(method)
        checked = [] if method.reference else [run.report for run in method.runs]
        if not lossless.lossless:
            flag("lossy", method.label, lossless.statement)
        elif any(one.certificate and not one.certificate.certified for one in checked):
            flag("certificate", method.label, lossless.statement)
        elif not all(report.lossless.identical for report in checked):
            flag("lossless", method.label, lossless.statement)
    for what, values in _machines(runs).items():
        if len(set(values.values())) > 1:
            listed = "; ".join(f"{name}: {value}" for name, value in values.items())
            flag("timing", "all", f"speeds were not measured with the same {what} ({listed})")
    apart = plain_loops_apart(runs, keys)
    if apart:
        flag("plain_loops", "all", apart)
    if runs[0].report.sampling.temperature == 0:
        first = runs[0].plain
        for run in runs[1:]:
            num = sum(first[k].num_output_tokens != run.plain[k].num_output_tokens for k in keys)
            if num:
                text = (
                    f"plain greedy decoding gave answers of another length than in "
                    f"{runs[0].name} on {num} of {len(keys)} prompts: not the same text was drafted"
                )
                flag("text", run.name, text)
    for method in methods:
        for other in methods[: methods.index(method)]:
            one, two = method.runs[0], other.runs[0]
            if not method.reference and one.identity is not None and one.identity == two.identity:
                text = f"configuration and seeds are those of {other.label}: not another seed"
                flag("repeated", method.label, text)
    own: dict[tuple[str, str], dict[str, str]] = {}  # by kind and row: texts by run
    for run in runs:
        for item in run.report.flags:
            if item.kind not in ("lossless", "lossy", "certificate"):  # flagged above
                own.setdefault((item.kind, item.row), {})[run.name] = item.text
    for (kind, row), texts in own.items():
        names, text = list(texts), next(iter(texts.values()))
        several = f"{len(names)} of {len(runs)} runs" if len(names) > NAMED else ", ".join(names)
        if len(set(texts.values())) > 1:
            text += f" (so in {names[0]}; the reports of the others have their numbers)"
        flag(kind, f"{several}: {row}", text)
    return found


def plain_loops_apart(runs: Sequence[RunReport], keys: Sequence[Key]) -> str:
    """Return a sentence on how far the runs' plain loops differ in speed, "" if they agree.

    The same target decodes the same prompts: if it was much faster in one run, that run's drafter
    had less to gain, or the machine was a different one.
    """
    speeds = {}
    for run in runs:
        plain = [run.plain[key] for key in keys]
        seconds = sum(row.seconds.total for row in plain)
        if seconds > 0:
            speeds[run.name] = sum(row.num_output_tokens for row in plain) / seconds
    if not speeds or max(speeds.values()) <= PLAIN_APART * min(speeds.values()):
        return ""
    ends = [choose(speeds, key=speeds.__getitem__) for choose in (min, max)]
    apart = " to ".join(f"{speed(speeds[name])} in {name}" for name in ends)
    return (
        f"the plain loops ran at clearly different speeds (tokens per second: {apart}): the "
        "speedups are not of the same machine at rest, and their order may be chance; evaluate the "
        "runs again, one right after the other"
    )


def _machines(runs: Sequence[RunReport]) -> dict[str, dict[str, str]]:
    """Return, for each property that a speedup depends on besides the drafter, its value by run."""
    found = {
        key: {run.name: str(getattr(run.report.timing, key)) for run in runs}
        for key in ("device", "dtype", "draft_dtype", "threads")
    }
    for key in ("cpu", "gpus"):
        hardware = {run.name: run.report.provenance.get("hardware") or {} for run in runs}
        found[key] = {name: str(value.get(key)) for name, value in hardware.items()}
    return found


def comparison_document(comparison: Comparison) -> Document:
    """Return the pages of a comparison as a document."""
    versus = list(comparison.versus.values())
    others = [pair.statement for pair in comparison.differences if pair not in versus]
    methods = [(row.method, row) for row in comparison.rows]
    return Document(
        "drafters compared",
        f"{comparison.name}: drafters of {comparison.target}",
        [pair.statement for pair in versus],
        conditions_line(comparison),
        first=[
            *flagged(comparison.flags),
            _numbers_table(comparison),
            table("Methods, on all prompts", "", "method", METHODS, methods),
            *_slower_targets_table(comparison),
        ],
        rest=[
            notes("Other differences", others),
            _runs_table(comparison),
            Listing("Definitions", list(comparison.definitions.items())),
            *(
                Listing(
                    f"Provenance of {run.name}",
                    [*flat(as_data(run.timing), "timing."), *flat(run.provenance)],
                )
                for run in comparison.runs
            ),
            Listing("Provenance of this page", flat(comparison.provenance)),
        ],
    )


def conditions_line(comparison: Comparison) -> str:
    """Return a line with the conditions under which all runs were evaluated."""
    told, prompts = comparison.conditions, comparison.prompts
    sampling = ", ".join(
        f"{key.removeprefix('eval.').replace('_', ' ')} {value}"
        for key, value in told.items()
        if key not in ("target fingerprint", "eval.prompts")
    )
    return (
        f"{prompts.statement}, in {len(prompts.tasks)} tasks of {told['eval.prompts']}; "
        f"{sampling}; target fingerprint {brief(str(told['target fingerprint']))}"
    )


def _to_baseline(comparison: Comparison, row: ComparedMethod, task: str, quantity: str) -> Cell:
    pair = comparison.versus.get(row.method)
    if pair is None:
        return "baseline"
    difference: Cell = getattr(pair.by_name[task], quantity)
    return difference


def comparison_summary(comparison: Comparison) -> Table:
    """Return the terminal's table: two lines per method, its numbers and its differences."""
    notes = [pair.statement for pair in comparison.differences]
    checked: dict[str, list[str]] = {}
    for row in comparison.rows:
        checked.setdefault(row.lossless.statement, []).append(row.method)
    notes += [f"{', '.join(methods)}: {text}." for text, methods in checked.items()]
    notes += [f"Flag: {flag.row}: {flag.text}." for flag in comparison.flags]
    notes += [f"{conditions_line(comparison)}.", "Intervals: 95 %, paired by prompt."]
    notes.append("Size: the drafter's parameters.")

    def both(row: ComparedMethod, quantity: str) -> str:
        difference = _to_baseline(comparison, row, "all", quantity)
        return f"{cell(getattr(row.summary, quantity))}\n{cell(difference)}"

    columns: list[Column[ComparedMethod]] = [
        ("accept. length, 95 %\ndifference", lambda row: both(row, "acceptance_length")),
        ("speedup, 95 %\ndifference", lambda row: both(row, "speedup")),
        ("draft\nms", lambda row: number(row.summary.draft_ms)),
        ("size", lambda row: size(row.drafter_parameters)),
        ("lossless", lambda row: "yes" if row.lossless.lossless else "NO"),
    ]
    lines = []
    for row in comparison.rows:
        seeds = len(row.seeds)
        training = f"{seeds} seeds" if seeds > 1 else "single run" if seeds else "reference"
        lines.append((f"{row.method}\n{training}", row))
    title = f"{comparison.target}: differences to {comparison.baseline}"
    return table(title, "", "method\ntraining", columns, lines, notes)


def _numbers_table(comparison: Comparison) -> Table:
    """Return both quantities of every method with their differences, task by task."""
    columns = ["task", "method", "prompts"]
    for name in ("acceptance length", "speedup"):
        columns += [f"{name}, 95 %", "range", f"minus {comparison.baseline}, 95 %"]
    columns.append("per position")
    rows: list[list[Cell]] = []
    for task in ("all", *comparison.prompts.tasks):
        for row in comparison.rows:
            numbers = row.by_name[task]
            line: list[Cell] = [task, row.method, count(numbers.num_prompts)]
            for quantity in QUANTITIES:
                measured: Spread = getattr(numbers, quantity)
                several = len(measured.by_run) > 1 and measured.range is not None
                spread = " to ".join(map(number, measured.range or [])) if several else NOTHING
                line += [measured, spread, _to_baseline(comparison, row, task, quantity)]
            rows.append([*line, numbers.acceptance_per_position])
    caption = (
        "Intervals: 95 %, bootstrap over prompts; differences are paired by prompt. range: over "
        "training seeds, or over the runs beside which a reference was measured. per position: "
        "acceptance, mean over runs."
    )
    return Table("Methods, task by task", caption, columns, rows)


def _slower_targets_table(comparison: Comparison) -> list[Table]:
    """Return the speedups beside slower targets; nothing if no pass was timed."""
    times = [at.pass_ms for at in comparison.rows[0].slower_targets]
    if len(times) == 1:
        return []
    shown = [None if ms is None else f"{ms:,.{0 if ms >= 100 else 1}f} ms" for ms in times]
    columns = ["method", *(each or "free drafting" for each in shown)]
    rows: list[list[Cell]] = [
        [row.method, *(at.speedup.estimate for at in row.slower_targets)] for row in comparison.rows
    ]
    caption = (
        "Speedup if a pass of the target took this long, by the passes counted and the drafter's "
        "time measured here; the first is the pass of this target. A pass that checks a draft is "
        "taken to last as long as a plain one."
    )
    return [Table("At the cost of slower targets", caption, columns, rows)]


METHODS: list[Column[ComparedMethod]] = [
    ("drafter", lambda row: row.drafter),
    ("depth", lambda row: ", ".join(map(str, sorted({*row.depths})))),
    ("training", lambda row: row.training),
    ("parameters", lambda row: size(row.drafter_parameters)),
    ("training tokens", lambda row: size(row.training_tokens)),
    ("training minutes", lambda row: number(row.training_seconds and row.training_seconds / 60)),
    ("rate", lambda row: number(row.summary.acceptance_rate)),
    ("draft ms", lambda row: number(row.summary.draft_ms)),
    ("tokens/s plain", lambda row: speed(row.summary.tokens_per_second.autoregressive)),
    ("tokens/s drafted", lambda row: speed(row.summary.tokens_per_second.speculative)),
    ("losslessness", lambda row: row.lossless.statement),
]


def _runs_table(comparison: Comparison) -> Table:
    own = {
        folder: [number(getattr(row.summary, quantity).by_run[place]) for quantity in QUANTITIES]
        for row in comparison.rows
        if not row.reference
        for place, folder in enumerate(row.runs)
    }

    columns: list[Column[ComparedRun]] = [
        ("drafter", lambda run: run.drafter),
        ("depth", lambda run: count(run.depth)),
        ("seed", lambda run: count(run.seed)),
        ("acceptance length", lambda run: own[run.folder][0]),
        ("speedup", lambda run: own[run.folder][1]),
        ("parameters", lambda run: size(run.drafter_parameters)),
        ("training tokens", lambda run: size(run.training_tokens)),
        ("losslessness", lambda run: run.lossless),
    ]
    lines = [(run.folder, run) for run in comparison.runs]
    return table("Runs", "Each run by itself, on the shared prompts.", "run", columns, lines)


def comparison_table(
    comparison: Comparison,
) -> tuple[Sequence[str], list[list[str | float | None]]]:
    """Return the columns and rows of a comparison for the tracker: a row per method and task."""
    columns = ["method", "training", "task", "num_prompts"]
    for name in QUANTITIES:
        for kind in (name, f"{name}_difference"):
            columns += [kind, f"{kind}_low", f"{kind}_high"]
    columns += ["draft_ms", "drafter_parameters", "training_tokens", "lossless"]
    rows: list[list[str | float | None]] = []
    for row in comparison.rows:
        pair = comparison.versus.get(row.method)
        for task, part in row.by_name.items():
            cells: list[str | float | None] = [row.method, row.training, task]
            cells.append(float(part.num_prompts))
            for name in QUANTITIES:
                for side in (part, pair.by_name[task] if pair else None):
                    found = getattr(side, name) if side else NOT_COMPARED
                    cells += [found.value, *(found.ci95 or (None, None))]
            sizes = (row.drafter_parameters, row.training_tokens)
            cells += [part.draft_ms, *(None if size is None else float(size) for size in sizes)]
            cells.append(row.lossless.statement)
            rows.append(cells)
    return columns, rows


def comparison_figures(comparison: Comparison) -> list[Figure]:
    """Return the figures: both quantities of every row, and their differences to the baseline."""
    looks = {
        pair.method: (KINDS[i % len(KINDS)], MARKS[i // len(KINDS) % len(MARKS)])
        for i, pair in enumerate(comparison.versus.values())
    }
    found: list[Figure] = []
    for quantity, (unit, caption) in FIGURES.items():
        title = quantity.replace("_", " ").capitalize()
        values = {row.method: getattr(row.summary, quantity) for row in comparison.rows}
        if any(value.value is not None for value in values.values()):
            runs = {method: value.by_run for method, value in values.items()}
            several = {method: each for method, each in runs.items() if len(each) > 1}
            series = [Series("mean over runs", "drafter", "o", values, several)]
            found.append(dots(title, caption, series, unit, even=1.0, lesser="single runs"))
        differences = []
        for pair in comparison.versus.values():
            of_tasks = {task: getattr(part, quantity) for task, part in pair.by_name.items()}
            known = {task: value for task, value in of_tasks.items() if value.value is not None}
            differences.append(Series(pair.method, *looks[pair.method], known))
        if any(one.values for one in differences):
            against = f"difference to {comparison.baseline}"
            title, unit = f"{title}: {against}", f"{against}, 95 % interval"
            caption = "By task; an interval that crosses the dashed line decides nothing."
            found.append(dots(title, caption, differences, unit, even=0.0))
    return found
