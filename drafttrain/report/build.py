"""Build the report from raw measurements: rows, verdict, flags, and the conditions of validity."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import PromptResult
from drafttrain.drafters.base import LOOKUP
from drafttrain.drafters.shared.publications import Published
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.config import VerdictSettings
from drafttrain.report.definitions import definitions, verdict_definition
from drafttrain.report.metrics import SPEEDUP, columns_of, method_row, plain_row, rows_of
from drafttrain.report.outputs import along_output, answer_times
from drafttrain.report.pairs import adaptation
from drafttrain.report.phrases import bounds, number, percent, rule_statement
from drafttrain.report.results import (
    NOT_COMPARED,
    PLAIN,
    SCHEMA_VERSION,
    Certificate,
    Check,
    ExtraMemory,
    Flag,
    LimitedSampling,
    LosslessCheck,
    MethodRow,
    MethodRows,
    NgramAnswer,
    PlainRows,
    Point,
    Report,
    Table,
    TimingInfo,
    TrainingCurves,
)
from drafttrain.report.tables import adaptation_table
from drafttrain.report.totals import Totals, by_task, collect
from drafttrain.report.verdict import disagreement, handicap, headline, verdicts_of

BUSY_CORES = 0.25  # that other processes kept busy, from which a report flags it
BUSY_SHARE = 0.02  # of the time, or of the decodings
ENOUGH_BLOCKS = 5  # interleaved timing blocks; with fewer, the ratio contains the machine's noise


def build_report(
    results: Sequence[PromptResult],
    *,
    target: str,
    drafter: str,
    depth: int,
    sampling: Sampling,
    draft_sampling: Sampling,
    batch_size: int,
    max_new_tokens: int,
    lossless: LosslessCheck,
    certificate: Certificate | None,
    sweep: Sequence[Point],
    tables: Sequence[Table],
    timing: TimingInfo,
    provenance: Mapping[str, Any],
    prompts: Mapping[str, Any],
    notes: Sequence[str],
    resamples: int,
    seed: int,
    verdict: VerdictSettings,
    tree: str = "",
    of_depths: Sequence[int] = (),
    adaptive: bool = False,
    memory: ExtraMemory | None = None,
    training: TrainingCurves | None = None,
    published: Sequence[Published] = (),
) -> Report:
    """Return the report of an evaluation.

    results: every prompt, turn and block by every method. drafter: the method whose rows come
    first; all others except the plain loop are under `methods`. of_depths: those that `depth` was
    chosen from, on other prompts. adaptive: depths are maxima. tables: shown in addition to the
    report's own. ValueError if the results cannot be compared as pairs.
    """
    totals = collect(results)
    if drafter not in totals or drafter == PLAIN:
        raise ValueError(
            f"the drafter of a report must be one of the drafting methods of its results, got "
            f"{drafter!r}; they have {sorted(set(totals) - {PLAIN})}"
        )
    plain = totals[PLAIN]
    blocks = len({block for prompt in plain.values() for block in prompt.block_seconds})
    if blocks != timing.blocks:
        raise ValueError(
            f"timing.blocks must be the number of blocks in the results, got {timing.blocks} where "
            f"the results have {blocks}"
        )
    resampling = Resampling(resamples, seed)
    drafting = [method for method in totals if method != PLAIN]
    rows = {method: method_rows(totals, method, depth, resampling) for method in drafting}
    prompts_by_name = {"all": list(totals[drafter].values()), **by_task(totals[drafter])}
    longest = {name: max(p.num_positions for p in of) for name, of in prompts_by_name.items()}
    chosen_from = of_depths or [depth]
    verdicts = verdicts_of(
        rows[drafter], depth, chosen_from, batch_size, longest, verdict, memory, adaptive
    )
    beats_ngram = _beats_ngram(totals, drafter, resampling)
    measurements = [row for prompts in totals.values() for row in rows_of(prompts.values())]
    adapted = adaptation(measurements, drafter, resampling)
    told = "greedy outputs were not checked"
    if lossless.greedy_total:
        counted = f"{lossless.greedy_identical} of {lossless.greedy_total} greedy outputs identical"
        told = f"{counted} to plain decoding in {lossless.dtype}"
        if lossless.identical and lossless.divergences:
            told += ", the others but for choices within twice its rounding noise"
    rule = rule_statement(lossless.rule, lossless.lossless)
    lossless = replace(lossless, statement=f"{rule}; {told}")
    repeats = min(prompt.num_blocks for prompt in plain.values())
    return Report(
        schema_version=SCHEMA_VERSION,
        target=target,
        drafter=drafter,
        depth=depth,
        tree=tree,
        sampling=LimitedSampling(**asdict(sampling), max_new_tokens=max_new_tokens),
        draft_sampling=draft_sampling,
        batch_size=batch_size,
        summary=rows[drafter].summary,
        tasks=rows[drafter].tasks,
        methods={
            PLAIN: PlainRows(
                plain_row(list(plain.values())),
                {task: plain_row(prompts) for task, prompts in by_task(plain).items()},
            ),
            **{method: rows[method] for method in rows if method != drafter},
        },
        lossless=lossless,
        certificate=certificate,
        sweep=list(sweep),
        tables=[*tables, *([adaptation_table(adapted)] if adapted else [])],
        beats_ngram=beats_ngram,
        timing=replace(timing, repeats=repeats),
        prompts=dict(prompts),
        notes=list(notes),
        measurements=measurements,
        definitions={
            **definitions(resamples, batch_size),
            "verdicts": verdict_definition(verdict.marginal_speedup),
        },
        provenance=dict(provenance),
        flags=_flags(drafter, rows, lossless, certificate, totals, sampling, timing),
        verdicts=verdicts,
        verdict=headline(verdicts["all"], target, drafter, lossless.lossless),
        adaptation=adapted,
        answer_times=answer_times(results, drafter, resampling),
        along_output=along_output(results, drafter, resampling),
        training=training,
        published=list(published),
    )


def method_rows(
    totals: Mapping[str, Totals], method: str, depth: int, resampling: Resampling
) -> MethodRows:
    """Return the rows of a method on all prompts and by task."""
    tasks = by_task(totals[method])
    rows = {task: row_of(totals, method, depth, resampling, task) for task in tasks}
    return MethodRows(row_of(totals, method, depth, resampling), rows)


def row_of(
    totals: Mapping[str, Totals],
    method: str,
    depth: int,
    resampling: Resampling,
    task: str | None = None,
) -> MethodRow:
    """Return the row of a method on one task, or on all, with its differences to prompt lookup."""
    prompts = {
        name: [prompt for (own, _), prompt in found.items() if task in (None, own)]
        for name, found in totals.items()
    }
    ngram = None if method == LOOKUP else prompts.get(LOOKUP)
    return method_row(prompts[method], prompts[PLAIN], depth, resampling, ngram)


def sweep_point(
    results: Sequence[PromptResult],
    *,
    drafter: str,
    depth: int,
    temperature: float,
    batch_size: int,
    resamples: int,
    seed: int,
) -> Point:
    """Return the measurements of one point of a sweep, in all and by task."""
    totals, resampling = collect(results), Resampling(resamples, seed)
    rows = method_rows(totals, drafter, depth, resampling)
    beside = LOOKUP in totals and drafter != LOOKUP
    ngram = row_of(totals, LOOKUP, depth, resampling) if beside else None
    tasks = {task: rows.tasks[task] for task in sorted(rows.tasks)}
    return Point(depth, temperature, batch_size, rows.summary, tasks, ngram)


def certified(
    checks: Sequence[Check], *, rule: str, lossless: bool, dtype: str, num_prompts: int
) -> Certificate:
    """Return the certificate that follows from the checks."""
    judged = [check for check in checks if check.passed is not None]
    failed = [check.name for check in judged if not check.passed]
    if not lossless:
        statement = (
            f"the rule, {rule}, changes the target's distribution; its distance stands below"
        )
    elif failed:
        statement = f"NOT certified: {', '.join(failed)} failed"
    else:
        passed = f"{len(judged)} of {len(judged)} checks passed"
        statement = f"certified: {passed} on {num_prompts} prompts"
    sound = lossless and not failed
    return Certificate(statement, rule, lossless, sound, dtype, num_prompts, list(checks))


def _beats_ngram(totals: Mapping[str, Totals], drafter: str, resampling: Resampling) -> NgramAnswer:
    unknown = "Not compared with prompt lookup (ngram)"
    if drafter == LOOKUP or LOOKUP not in totals:
        why = "the drafter is prompt lookup itself" if drafter == LOOKUP else "it was not measured"
        return NgramAnswer(None, NOT_COMPARED, f"{unknown}: {why}.")
    mine, theirs, plain = (rows_of(totals[method].values()) for method in (drafter, LOOKUP, PLAIN))
    one, two = ([columns_of(rows, plain)] for rows in (mine, theirs))
    difference = SPEEDUP.difference(one, two, resampling)
    if difference.value is None:
        return NgramAnswer(None, difference, f"{unknown}: nothing timed.")
    answer = difference.decides("yes", "no", "undecided")
    words = {
        "yes": f"{drafter} beats prompt lookup (ngram)",
        "no": f"{drafter} does not beat prompt lookup (ngram), which needs no training",
    }.get(answer or "", f"Whether {drafter} beats prompt lookup (ngram) is undecided")
    told = f"speedup difference {number(difference.value)}, {bounds(difference.ci95)}"
    statement = f"{words}: {told}."
    return NgramAnswer(answer, difference, statement)


def busy(timing: TimingInfo) -> str:
    """Return what kept the machine busy while it measured, "" if nothing did."""
    others, stolen, delayed = timing.others_cores or 0.0, timing.stolen or 0.0, timing.delayed
    told = [
        f"other processes used {number(others)} cores" if others > BUSY_CORES else "",
        f"the host took {percent(stolen)} of its time" if stolen > BUSY_SHARE else "",
        f"{percent(delayed)} of the decodings were delayed" if delayed > BUSY_SHARE else "",
    ]
    what = " and ".join(filter(None, told))
    return f"the machine was busy: {what}; the times are medians by kind of pass" if what else ""


def _flags(
    drafter: str,
    rows: Mapping[str, MethodRows],
    lossless: LosslessCheck,
    certificate: Certificate | None,
    totals: Mapping[str, Totals],
    sampling: Sampling,
    timing: TimingInfo,
) -> list[Flag]:
    flags = []
    others = [method for method in totals if method not in (drafter, PLAIN)]
    for method in (drafter, *others):
        for name, row in rows[method].by_name.items():
            found = {"handicapped_baseline": handicap(row)}
            if name == "all":
                found["blocks_disagree"] = disagreement(row)
            where = f"{method}: {name}"
            flags += [Flag(kind, where, text) for kind, text in found.items() if text]
    if certificate is not None and certificate.lossless and not certificate.certified:
        flags.append(Flag("certificate", "all", certificate.statement))
    if not lossless.lossless or not lossless.identical:
        kind = "lossless" if lossless.lossless else "lossy"
        flags.append(Flag(kind, "all", lossless.statement))
    if told := busy(timing):
        flags.append(Flag("busy", "all", told))
    if timing.blocks < ENOUGH_BLOCKS:
        text = f"fewer than {ENOUGH_BLOCKS} leave noise in the speedup"
        flags.append(Flag("timing", "all", f"timing blocks: {timing.blocks}; {text}"))
    for method in (drafter, PLAIN, *others):
        where = f"{method}: all"
        unstable = sum(prompt.num_unstable_turns for prompt in totals[method].values())
        if unstable:
            text = f"{unstable} outputs were not the same in every timing block"
            flags.append(Flag("unstable_output", where, text))
        differing = rows[method].summary.outputs_differing if method != PLAIN else None
        if sampling.greedy and differing and differing.num:
            text = (
                f"{differing.num} of {differing.of} greedy outputs differ from the plain "
                f"loop's in {timing.dtype}, the dtype of the timing"
            )
            if timing.dtype not in ("float32", "float64"):
                text += ": rounding decides between two tokens that are nearly tied"
            flags.append(Flag("outputs_differing", where, text))
    return flags
