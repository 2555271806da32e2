"""Build the report from raw measurements: rows, verdict, flags, and the conditions of validity."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from drafttrain.core.types import PromptResult
from drafttrain.drafters.base import LOOKUP
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.config import VerdictSettings
from drafttrain.report.definitions import ADAPTATION, definitions, verdict_definition
from drafttrain.report.metrics import (
    ACCEPTANCE_LENGTH,
    SPEEDUP,
    columns_of,
    measured_of,
    method_row,
    plain_row,
    rows_of,
)
from drafttrain.report.outputs import along_output, answer_times
from drafttrain.report.phrases import bounds, cell, number, percent, rule_statement
from drafttrain.report.results import (
    BEFORE,
    NOT_COMPARED,
    PLAIN,
    Adaptation,
    AdaptationRow,
    BeforeAfter,
    Certificate,
    Check,
    Evaluated,
    ExtraMemory,
    Flag,
    Measurement,
    MethodRow,
    MethodRows,
    NgramAnswer,
    PlainRows,
    Point,
    Report,
    TimingInfo,
)
from drafttrain.report.tables import adaptation_table
from drafttrain.report.totals import Key, Totals, by_scope, collect
from drafttrain.report.verdict import disagreement, handicap, headline, verdicts_of

BUSY_CORES = 0.25  # that other processes kept busy, from which a report flags it
BUSY_SHARE = 0.02  # of the time, or of the decodings
ENOUGH_BLOCKS = 5  # interleaved timing blocks; with fewer, the ratio contains the machine's noise


def build_report(
    results: Sequence[PromptResult],
    about: Evaluated,
    resampling: Resampling,
    settings: VerdictSettings,
    *,
    of_depths: Sequence[int] = (),
    adaptive: bool = False,
    memory: ExtraMemory | None = None,
) -> Report:
    """Return the report of an evaluation.

    results: every prompt, turn and block by every method. about: its drafter is the method whose
    rows come first; all others except the plain loop are under `methods`. of_depths: those that its
    depth was chosen from, on other prompts. adaptive: depths are maxima. ValueError if the results
    cannot be compared as pairs.
    """
    totals = collect(results)
    drafter, depth, lossless = about.drafter, about.depth, about.lossless
    if drafter not in totals or drafter == PLAIN:
        raise ValueError(
            f"the drafter of a report must be one of the drafting methods of its results, got "
            f"{drafter!r}; they have {sorted(set(totals) - {PLAIN})}"
        )
    plain = totals[PLAIN]
    blocks = len({block for prompt in plain.values() for block in prompt.block_seconds})
    if blocks != about.timing.blocks:
        raise ValueError(
            f"timing.blocks must be the number of blocks in the results, got {about.timing.blocks} "
            f"where the results have {blocks}"
        )
    drafting = [method for method in totals if method != PLAIN]
    rows = {method: method_rows(totals, method, depth, resampling) for method in drafting}
    scopes = by_scope(plain)
    longest = {
        name: max(totals[drafter][key].num_positions for key in keys)
        for name, keys in scopes.items()
    }
    plain_rows = {name: plain_row([plain[key] for key in keys]) for name, keys in scopes.items()}
    chosen_from = of_depths or [depth]
    verdicts = verdicts_of(
        rows[drafter], depth, chosen_from, about.batch_size, longest, settings, memory, adaptive
    )
    measurements = [row for prompts in totals.values() for row in rows_of(prompts.values())]
    adapted = _adaptation(measurements, drafter, resampling)
    told = "greedy outputs were not checked"
    if lossless.greedy_total:
        counted = f"{lossless.greedy_identical} of {lossless.greedy_total} greedy outputs identical"
        told = f"{counted} to plain decoding in {lossless.dtype}"
        if lossless.identical and lossless.divergences:
            told += ", the others but for choices within twice its rounding noise"
    rule = rule_statement(lossless.rule, lossless.lossless)
    about = replace(
        about,
        lossless=replace(lossless, statement=f"{rule}; {told}"),
        tables=[*about.tables, *([adaptation_table(adapted)] if adapted else [])],
        timing=replace(about.timing, repeats=min(prompt.num_blocks for prompt in plain.values())),
    )
    others = {method: rows[method] for method in rows if method != drafter}
    return Report(
        **vars(about),
        summary=rows[drafter].summary,
        tasks=rows[drafter].tasks,
        methods={PLAIN: PlainRows(plain_rows.pop("all"), plain_rows), **others},
        beats_ngram=_beats_ngram(totals, drafter, resampling),
        measurements=measurements,
        definitions={
            **definitions(resampling.resamples, about.batch_size),
            "verdicts": verdict_definition(settings.marginal_speedup),
        },
        flags=_flags(about, rows, totals),
        verdicts=verdicts,
        verdict=headline(verdicts["all"], about.target, drafter, lossless.lossless),
        adaptation=adapted,
        answer_times=answer_times(results, drafter, resampling),
        along_output=along_output(results, drafter, resampling),
    )


def method_rows(
    totals: Mapping[str, Totals], method: str, depth: int, resampling: Resampling
) -> MethodRows:
    """Return the rows of a method on all prompts and by task."""
    rows = {
        name: row_of(totals, method, depth, resampling, keys)
        for name, keys in by_scope(totals[PLAIN]).items()
    }
    return MethodRows(rows.pop("all"), rows)


def row_of(
    totals: Mapping[str, Totals],
    method: str,
    depth: int,
    resampling: Resampling,
    keys: Sequence[Key] | None = None,
) -> MethodRow:
    """Return the row of a method on some prompts, or on all, with its differences to ngram."""
    chosen = totals[PLAIN] if keys is None else keys
    prompts = {name: [found[key] for key in chosen] for name, found in totals.items()}
    ngram = None if method == LOOKUP else prompts.get(LOOKUP)
    return method_row(prompts[method], prompts[PLAIN], depth, resampling, ngram)


def sweep_point(
    results: Sequence[PromptResult],
    resampling: Resampling,
    *,
    drafter: str,
    depth: int,
    temperature: float,
    batch_size: int,
) -> Point:
    """Return the measurements of one point of a sweep, in all and by task."""
    totals = collect(results)
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


def _adaptation(
    rows: Iterable[Measurement], drafter: str, resampling: Resampling
) -> Adaptation | None:
    """Return acceptance and speedup before and after adapting, None where not measured."""
    measured = measured_of(rows)
    if BEFORE not in measured:
        return None
    found = {}
    for scope, keys in by_scope(measured[drafter].drafted).items():
        old, new = [measured[BEFORE].on(keys)], [measured[drafter].on(keys)]
        length, speedup = (
            BeforeAfter(
                quantity.mean(old, resampling).estimate,
                quantity.mean(new, resampling).estimate,
                quantity.difference(new, old, resampling),
            )
            for quantity in (ACCEPTANCE_LENGTH, SPEEDUP)
        )
        found[scope] = AdaptationRow(len(keys), length, speedup)
    length = found["all"].acceptance_length
    statement = (
        f"acceptance length {number(length.before.value)} before, {number(length.after.value)} "
        f"after adapting, on {found['all'].num_prompts} prompts"
    )
    answer = length.difference.decides("better", "worse", "not decided")
    told = f": {answer} ({cell(length.difference)}, 95 %)" if answer else f"; {bounds(None)}"
    return Adaptation(found, statement + told, ADAPTATION)


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
    about: Evaluated, rows: Mapping[str, MethodRows], totals: Mapping[str, Totals]
) -> list[Flag]:
    flags = []
    drafter, lossless, timing = about.drafter, about.lossless, about.timing
    certificate = about.certificate
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
        if about.sampling.greedy and differing and differing.num:
            text = (
                f"{differing.num} of {differing.of} greedy outputs differ from the plain "
                f"loop's in {timing.dtype}, the dtype of the timing"
            )
            if timing.dtype not in ("float32", "float64"):
                text += ": rounding decides between two tokens that are nearly tied"
            flags.append(Flag("outputs_differing", where, text))
    return flags
