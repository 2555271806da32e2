"""From raw measurements to the report: rows, verdict, flags, and the conditions they hold under."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import Counters, PromptResult
from drafttrain.report.config import VerdictSettings
from drafttrain.report.definitions import definitions, verdict_definition
from drafttrain.report.rows import method_row, plain_row
from drafttrain.report.statistics import (
    NGRAM,
    PLAIN,
    PromptTotals,
    Resampling,
    Totals,
    collect,
    speedup_difference,
)
from drafttrain.report.tables import Table
from drafttrain.report.verdict import (
    ExtraMemory,
    disagreement,
    disturbance,
    handicap,
    headline,
    main_depth,
    verdicts_of,
)
from drafttrain.report.wording import TOO_FEW, between, number, rule_statement

SCHEMA_VERSION = 2
ENOUGH_BLOCKS = 5  # interleaved timing blocks; fewer leave the machine's moods in the ratio

Report = dict[str, Any]


@dataclass(frozen=True)
class LosslessCheck:
    """The verification rule, whether it is lossless by law, and greedy outputs against the oracle.

    `dtype` is that of the check. Each divergence is a plain mapping (prompt, position, gap ...).
    """

    rule: str
    lossless: bool
    dtype: str
    greedy_identical: int
    greedy_total: int
    divergences: list[dict[str, Any]]


@dataclass(frozen=True)
class TimingInfo:
    """What timings were taken with; in a block, all methods decode each prompt in turn."""

    dtype: str
    threads: int
    blocks: int
    device: str
    draft_dtype: str | None = None  # of the drafter, where it is not the target's


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
    certificate: Mapping[str, Any] | None,
    sweep: Sequence[Mapping[str, Any]],
    tables: Sequence[Table],
    timing: TimingInfo,
    provenance: Mapping[str, Any],
    prompts: Mapping[str, Any],
    notes: Sequence[str],
    resamples: int,
    seed: int,
    verdict: VerdictSettings,
    memory: ExtraMemory | None = None,
) -> Report:
    """Return everything a report says, as what JSON can hold: no NaN, no infinity.

    `results` has every prompt, turn and block by every method; `drafter` is the method whose rows
    head the report, all others but the plain loop stand under `methods`. `tables` are shown beside
    the report's own. Intervals are by bootstrap, with so many `resamples` drawn from `seed`.
    `memory` is what the drafter takes, where that is known. Raises ValueError when the results
    cannot be compared as pairs.
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
    ngram = totals.get(NGRAM)
    rows = {
        method: _method(
            totals[method], plain, depth, resampling, None if method == NGRAM else ngram
        )
        for method in totals
        if method != PLAIN
    }
    report: Report = {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        "drafter": drafter,
        "depth": depth,
        "sampling": {**asdict(sampling), "max_new_tokens": max_new_tokens},
        "draft_sampling": asdict(draft_sampling),
        "batch_size": batch_size,
        "summary": rows[drafter]["summary"],
        "tasks": rows[drafter]["tasks"],
        "methods": {
            PLAIN: _plain(plain),
            **{method: rows[method] for method in rows if method != drafter},
        },
        "lossless": {**asdict(lossless), "statement": _lossless_statement(lossless)},
        "certificate": None if certificate is None else dict(certificate),
        "sweep": list(sweep),
        "vllm": None,
        "tables": [asdict(table) for table in tables],
        "beats_ngram": _beats_ngram(totals, drafter, resampling),
        "timing": {
            **asdict(timing),
            "repeats": min(len(prompt.block_seconds) for prompt in plain.values()),
        },
        "prompts": dict(prompts),
        "notes": list(notes),
        "measurements": _measurements(totals),
        "definitions": {
            **definitions(resamples),
            "verdicts": verdict_definition(verdict.marginal_speedup),
        },
        "provenance": dict(provenance),
    }
    report["flags"] = _flags(report, totals, sampling, timing)
    report["verdicts"] = verdicts_of(report, _longest(totals[drafter]), verdict, memory)
    report["verdict"] = headline(report)
    if main_depth(report) != depth:
        report["beats_ngram"]["statement"] += f" Both at depth {depth}."
    return {key: _plain_value(value) for key, value in report.items()}


def _by_task(totals: Totals) -> dict[str, list[PromptTotals]]:
    tasks: dict[str, list[PromptTotals]] = {}
    for prompt in totals.values():
        tasks.setdefault(prompt.task, []).append(prompt)
    return tasks


def _method(
    totals: Totals, plain: Totals, depth: int, resampling: Resampling, ngram: Totals | None
) -> dict[str, Any]:
    mine, theirs, lookup = _by_task(totals), _by_task(plain), _by_task(ngram or {})
    everything = list(totals.values()), list(plain.values()), depth, resampling
    tasks = {
        task: method_row(mine[task], theirs[task], depth, resampling, lookup.get(task))
        for task in mine
    }
    return {
        "summary": method_row(*everything, None if ngram is None else list(ngram.values())),
        "tasks": tasks,
    }


def _plain(plain: Totals) -> dict[str, Any]:
    tasks = {task: plain_row(prompts) for task, prompts in _by_task(plain).items()}
    return {"summary": plain_row(list(plain.values())), "tasks": tasks}


def _lossless_statement(check: LosslessCheck) -> str:
    rule = rule_statement(check.rule, check.lossless)
    if not check.greedy_total:
        return f"{rule}; greedy outputs were not checked"
    counted = f"{check.greedy_identical} of {check.greedy_total} greedy outputs identical"
    return f"{rule}; {counted} to plain decoding in {check.dtype}"


def _beats_ngram(totals: dict[str, Totals], drafter: str, resampling: Resampling) -> dict[str, Any]:
    answer: dict[str, Any] = {"answer": None, "speedup_difference": {"value": None, "ci95": None}}
    if drafter == NGRAM or NGRAM not in totals:
        why = "the drafter is prompt lookup itself" if drafter == NGRAM else "it was not measured"
        return {**answer, "statement": f"Not compared with prompt lookup (ngram): {why}."}
    mine, theirs, plain = (list(totals[method].values()) for method in (drafter, NGRAM, PLAIN))
    difference = speedup_difference(mine, theirs, plain, resampling)
    value, ci95 = difference["value"], difference["ci95"]
    answer["speedup_difference"] = difference
    if value is None:
        return {**answer, "statement": "Not compared with prompt lookup (ngram): nothing timed."}
    if ci95 is None:
        which = TOO_FEW
    else:
        which = f"95 % interval {between(ci95)}"
        answer["answer"] = "yes" if ci95[0] > 0 else "no" if ci95[1] < 0 else "undecided"
    words = {
        "yes": f"{drafter} beats prompt lookup (ngram)",
        "no": f"{drafter} does not beat prompt lookup (ngram), which needs no training",
    }.get(answer["answer"], f"Whether {drafter} beats prompt lookup (ngram) is undecided")
    return {**answer, "statement": f"{words}: speedup difference {number(value)}, {which}."}


def _longest(totals: Totals) -> dict[str, int]:
    """Return the positions of the longest turn, in all and by task."""
    groups = {"all": list(totals.values()), **_by_task(totals)}
    return {name: max(p.num_positions for p in prompts) for name, prompts in groups.items()}


def _flags(
    report: Report, totals: dict[str, Totals], sampling: Sampling, timing: TimingInfo
) -> list[dict[str, str]]:
    drafted = {report["drafter"]: report, **report["methods"]}
    flags = []
    for method, rows in drafted.items():
        for name, row in {"all": rows["summary"], **rows["tasks"]}.items():
            if method == PLAIN:
                continue
            found = {"handicapped_baseline": handicap(row)}
            if method == report["drafter"]:  # the others were decoded beside it
                found["disturbed"] = disturbance(row)
            if name == "all":
                found["blocks_disagree"] = disagreement(row)
            flags += [
                {"kind": kind, "row": f"{method}: {name}", "text": text}
                for kind, text in found.items()
                if text
            ]
    lossless = report["lossless"]
    if not lossless["lossless"] or lossless["greedy_identical"] < lossless["greedy_total"]:
        flags.append({"kind": "lossless", "row": "all", "text": lossless["statement"]})
    if timing.blocks < ENOUGH_BLOCKS:
        text = (
            f"timing blocks: {timing.blocks}; fewer than {ENOUGH_BLOCKS} leave noise in the speedup"
        )
        flags.append({"kind": "timing", "row": "all", "text": text})
    for method, rows in drafted.items():
        row = f"{method}: all"
        unstable = sum(prompt.num_unstable_turns for prompt in totals[method].values())
        if unstable:
            text = f"{unstable} outputs were not the same in every timing block"
            flags.append({"kind": "unstable_output", "row": row, "text": text})
        differing = rows["summary"].get("outputs_differing")
        if sampling.greedy and differing and differing["num"]:
            text = (
                f"{differing['num']} of {differing['of']} greedy outputs differ from the plain "
                f"loop's in {timing.dtype}, the dtype of the timing"
            )
            if timing.dtype not in ("float32", "float64"):
                text += ": rounding decides between two tokens that are nearly tied"
            flags.append({"kind": "outputs_differing", "row": row, "text": text})
    return flags


def _measurements(totals: dict[str, Totals]) -> list[dict[str, Any]]:
    """Return one entry per prompt and method: enough to compute every summary again."""
    return [
        {
            "task": prompt.task,
            "prompt_id": prompt.prompt_id,
            "method": method,
            "num_output_tokens": prompt.num_output_tokens,
            "num_target_passes": prompt.num_target_passes,
            "num_drafts": prompt.trimmed.num_drafts,
            "num_draft_tokens": prompt.trimmed.num_draft_tokens,
            "num_accepted_tokens": prompt.trimmed.num_accepted_tokens,
            "num_repeated_tokens": prompt.num_repeated_tokens,
            "outside_repetition": _counts(prompt.outside),
            "seconds": asdict(prompt.seconds),
            "disturbed": prompt.disturbed,
        }
        for method, prompts in totals.items()
        for prompt in prompts.values()
    ]


def _counts(outside: tuple[Counters, int] | None) -> dict[str, int] | None:
    if outside is None:
        return None
    counters, num_target_passes = outside
    return {
        "num_target_passes": num_target_passes,
        "num_drafts": counters.num_drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
    }


def _plain_value(value: Any) -> Any:
    """Return what JSON can hold: non-finite numbers become None, other objects their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain_value(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str | int) or value is None:
        return value
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a report cannot hold {type(value).__name__}: {value!r}")
