"""Build one comparison from the reports of several runs: rows, differences, and conditions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from drafttrain.report.bootstrap import Resampling
from drafttrain.report.config import CompareSettings
from drafttrain.report.definitions import comparison_definitions
from drafttrain.report.metrics import ACCEPTANCE_LENGTH, SPEEDUP, Spread, mean_ratio
from drafttrain.report.pairs import at_pass_time, by_scope
from drafttrain.report.phrases import bounds, rule_statement, signed, speed
from drafttrain.report.results import ByTask, Change, Flag, Rates, Speeds, TimingInfo
from drafttrain.report.runs import (
    Method,
    RunReport,
    check_comparable,
    conditions,
    find_method,
    methods_of,
    shared_prompts,
    training_statement,
)
from drafttrain.report.totals import Key

SCHEMA_VERSION = 1
NAMED = 3  # runs that a flag names; more are counted
PLAIN_APART = 1.1  # times as fast: plain loops of the same target on the same prompts
SLOWER = (1, 3, 10)  # times the plain pass that was measured: targets of other sizes

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
class ComparedRun:
    """One run: what it was and where it came from."""

    name: str
    folder: str
    drafter: str
    depth: int
    seed: int | None
    drafter_parameters: int | None
    training_tokens: int | None
    lossless: str
    timing: TimingInfo
    provenance: Mapping[str, Any]


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


def build_comparison(
    runs: Sequence[RunReport], config: CompareSettings, provenance: Mapping[str, Any]
) -> Comparison:
    """Return the comparison of several runs.

    `config.baseline` is a run or a method, None for the first run's; every other row is compared
    with it and, with `config.all_pairs`, with each other. Raises ValueError if the runs did not
    decode the same prompts with the same target in the same way, or none is called `baseline`.
    """
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
        runs=[
            ComparedRun(
                name=run.name,
                folder=run.folder,
                drafter=run.report.drafter,
                depth=run.report.depth,
                seed=run.seed,
                drafter_parameters=run.parameters,
                training_tokens=run.training_tokens,
                lossless=run.report.lossless.statement,
                timing=run.report.timing,
                provenance=run.report.provenance,
            )
            for run in runs
        ],
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
    sizes = {run.parameters for run in own}
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
