"""From the reports of several runs to one comparison: rows, differences, and what they hold for."""

from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.report.definitions import comparison_definitions
from drafttrain.report.pairs import QUANTITIES, Columns, mean_ratio
from drafttrain.report.runs import (
    Method,
    RunReport,
    check_comparable,
    conditions,
    find_method,
    methods_of,
    prompts_of,
    shared_prompts,
    training_statement,
)
from drafttrain.report.statistics import Key, Resampling
from drafttrain.report.wording import between, rule_statement, signed, speed

SCHEMA_VERSION = 1
PLAIN_APART = 1.1  # times as fast: plain loops of the same target on the same prompts

Comparison = dict[str, Any]
Scopes = dict[str | None, list[Key]]  # the prompts of each task; None: of all


def build_comparison(
    runs: Sequence[RunReport],
    *,
    name: str,
    evaluation: str,
    baseline: str | None,
    all_pairs: bool,
    resamples: int,
    seed: int,
    provenance: Mapping[str, Any],
) -> Comparison:
    """Return everything a comparison says, as what JSON can hold.

    `baseline` is a run or a method, None for the first run's; every other row is compared with it,
    and with `all_pairs` with each other. Raises ValueError when the runs did not decode the same
    prompts of the same target in the same way, or nothing is called `baseline`.
    """
    check_comparable(runs)
    keys = shared_prompts(runs)
    methods = methods_of(runs)
    base = find_method(methods, baseline)
    scopes: Scopes = {None: keys}
    for key in keys:
        scopes.setdefault(key[0], []).append(key)
    resampling = Resampling(resamples, seed)
    rows = [_row(method, scopes, resampling) for method in methods]
    pairs = [(method, base) for method in methods if method is not base]
    if all_pairs:
        others = [method for method in methods if method is not base]
        pairs += [(later, one) for i, one in enumerate(others) for later in others[i + 1 :]]
    first = runs[0].report
    comparison: Comparison = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "evaluation": evaluation,
        "target": first["target"],
        "baseline": base.label,
        "conditions": conditions(first),
        "prompts": {
            "num_prompts": len(keys),
            "tasks": {task: len(scope) for task, scope in scopes.items() if task is not None},
            "by_run": {run.name: len(prompts_of(run)) for run in runs},
            "statement": _shared_statement(runs, keys),
        },
        "rows": rows,
        "differences": [_difference(one, two, scopes, resampling) for one, two in pairs],
        "runs": [_run(run) for run in runs],
        "definitions": comparison_definitions(resamples),
        "provenance": dict(provenance),
    }
    comparison["flags"] = _flags(runs, methods, keys)
    return comparison


def _shared_statement(runs: Sequence[RunReport], keys: Sequence[Key]) -> str:
    left = [
        f"{run.name} has {len(prompts_of(run)) - len(keys)} more"
        for run in runs
        if len(prompts_of(run)) > len(keys)
    ]
    used = f"{len(keys)} prompts, shared by all runs"
    return f"{used}; {', '.join(left)}, left out here" if left else used


def _row(method: Method, scopes: Scopes, resampling: Resampling) -> dict[str, Any]:
    numbers = {name: _numbers(method.columns(keys), resampling) for name, keys in scopes.items()}
    summary = numbers.pop(None)
    tokens = [run.training_tokens for run in method.runs if run.training_tokens is not None]
    sizes = {run.parameters for run in method.runs}
    known = not method.reference
    return {
        "method": method.label,
        "reference": method.reference,
        "drafter": method.drafter,
        "depth": method.runs[0].report["depth"],
        "runs": [run.folder for run in method.runs],
        "seeds": [run.seed for run in method.runs] if known else [],
        "training": training_statement(method),
        "drafter_parameters": sizes.pop() if known and len(sizes) == 1 else None,
        "training_tokens": sum(tokens) / len(tokens) if known and tokens else None,
        "lossless": _lossless(method),
        "summary": summary,
        "tasks": numbers,
    }


def _numbers(columns: Sequence[Columns], resampling: Resampling) -> dict[str, Any]:
    return {
        "num_prompts": len(columns[0]["tokens"]),
        **{name: one.mean(columns, resampling) for name, one in QUANTITIES.items()},
        "acceptance_rate": mean_ratio(columns, "accepted", "drafted"),
        "tokens_per_second": {
            "autoregressive": mean_ratio(columns, "plain_tokens", "plain_seconds"),
            "speculative": mean_ratio(columns, "tokens", "seconds"),
        },
        "draft_ms": mean_ratio(columns, "draft_seconds", "passes", scale=1000.0),
    }


def _lossless(method: Method) -> dict[str, Any]:
    """Return what the runs say of their losslessness; of a reference only the rule is known."""
    checks = [run.report["lossless"] for run in method.runs]
    texts = []
    for run, check in zip(method.runs, checks, strict=True):
        text = check["statement"]
        certificate = run.report.get("certificate") or {}
        if method.reference:
            rule = rule_statement(check["rule"], check["lossless"])
            text = f"{rule}; outputs of this reference were not checked"
        elif certificate.get("statement"):
            text = f"{text}; certificate: {certificate['statement']}"
        texts.append(text)
    same = len(set(texts)) == 1
    named = [f"{run.name}: {text}" for run, text in zip(method.runs, texts, strict=True)]
    return {
        "lossless": all(check["lossless"] for check in checks),
        "statement": texts[0] if same else "; ".join(named),
    }


def _difference(one: Method, two: Method, scopes: Scopes, resampling: Resampling) -> dict[str, Any]:
    found = {
        scope: {
            name: quantity.difference(one.columns(keys), two.columns(keys), resampling)
            for name, quantity in QUANTITIES.items()
        }
        for scope, keys in scopes.items()
    }
    summary = found.pop(None)
    return {
        "method": one.label,
        "other": two.label,
        "summary": summary,
        "tasks": found,
        **_answer(one, two, summary, scopes[None]),
    }


def _answer(
    one: Method, two: Method, summary: Mapping[str, Any], keys: Sequence[Key]
) -> dict[str, Any]:
    ci95 = summary["speedup"]["ci95"]
    apart = plain_loops_apart([*one.runs, *two.runs], keys)
    answer = None
    if ci95 is not None:
        answer = "faster" if ci95[0] > 0 else "slower" if ci95[1] < 0 else "undecided"
        answer = "undecided" if apart else answer
    words = f"{one.label} is {answer} than {two.label}"
    if answer not in ("faster", "slower"):
        words = f"Whether {one.label} is faster than {two.label} is undecided"
    shown = [
        f"{name.replace('_', ' ')} difference {signed(value['value'])}"
        + (f" (95 % interval {between(value['ci95'])})" if value["ci95"] else " (no interval)")
        for name, value in reversed(list(summary.items()))
    ]
    lossy = [method.label for method in (one, two) if not _lossless(method)["lossless"]]
    warning = f"; NOT lossless: {', '.join(lossy)}" if lossy else ""
    if apart:
        warning += "; their plain loops ran at clearly different speeds"
    return {"answer": answer, "statement": f"{words}: {', '.join(shown)}{warning}."}


def _run(run: RunReport) -> dict[str, Any]:
    report = run.report
    return {
        "name": run.name,
        "folder": run.folder,
        "drafter": report["drafter"],
        "depth": report["depth"],
        "seed": run.seed,
        "drafter_parameters": run.parameters,
        "training_tokens": run.training_tokens,
        "lossless": report["lossless"]["statement"],
        "timing": dict(report["timing"]),
        "provenance": dict(report["provenance"]),
    }


def _flags(
    runs: Sequence[RunReport], methods: Sequence[Method], keys: Sequence[Key]
) -> list[dict[str, str]]:
    """Return what to read with care: lossy rows, unlike machines, unlike texts, the runs' own."""
    found = []

    def flag(kind: str, row: str, text: str) -> None:
        found.append({"kind": kind, "row": row, "text": text})

    for method in methods:
        lossless = _lossless(method)
        checked = [] if method.reference else [run.report for run in method.runs]
        checks = [report["lossless"] for report in checked]
        certificates = [report.get("certificate") for report in checked]
        if not lossless["lossless"]:
            flag("lossy", method.label, lossless["statement"])
        elif any(one is not None and not one["certified"] for one in certificates):
            flag("certificate", method.label, lossless["statement"])
        elif any(check["greedy_identical"] < check["greedy_total"] for check in checks):
            flag("lossless", method.label, lossless["statement"])
    if any(len(prompts_of(run)) > len(keys) for run in runs):
        flag("prompts", "all", _shared_statement(runs, keys))
    for what, values in _machines(runs).items():
        if len(set(values.values())) > 1:
            listed = "; ".join(f"{name}: {value}" for name, value in values.items())
            flag("timing", "all", f"speeds were not measured with the same {what} ({listed})")
    apart = plain_loops_apart(runs, keys)
    if apart:
        flag("plain_loops", "all", apart)
    if runs[0].report["sampling"]["temperature"] == 0:
        for run in runs[1:]:
            num = _texts_differing(runs[0], run, keys)
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
    own: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        for item in run.report["flags"]:
            if item["kind"] != "lossless":  # said above
                own.setdefault((item["kind"], item["row"], item["text"]), []).append(run.name)
    for (kind, row, text), names in own.items():
        flag(kind, f"{', '.join(names)}: {row}", text)
    return found


def plain_loops_apart(runs: Sequence[RunReport], keys: Sequence[Key]) -> str:
    """Return by how much the plain loops of the runs differ in speed, or nothing if they agree.

    The same target decodes the same prompts: where it was much faster in one run, that run's
    drafter had less to gain, or the machine was another.
    """
    speeds = {}
    for run in runs:
        plain = [next(iter(run.measured.values())).plain[key] for key in keys]
        seconds = sum(row.seconds for row in plain)
        if seconds > 0:
            speeds[run.name] = sum(row.tokens for row in plain) / seconds
    if not speeds or max(speeds.values()) <= PLAIN_APART * min(speeds.values()):
        return ""
    listed = ", ".join(f"{name} {speed(value)}" for name, value in speeds.items())
    return (
        f"the plain loops ran at clearly different speeds (tokens per second: {listed}): the "
        "speedups are not of the same machine at rest, and their order may be chance; evaluate the "
        "runs again, one right after the other"
    )


def _machines(runs: Sequence[RunReport]) -> dict[str, dict[str, str]]:
    """Return by run what a speedup depends on besides the drafter."""
    found: dict[str, dict[str, str]] = {
        "engine": {run.name: str(run.report.get("engine", "drafttrain")) for run in runs}
    }
    for key in ("device", "dtype", "draft_dtype", "threads"):
        found[key] = {run.name: str(run.report["timing"].get(key)) for run in runs}
    for key in ("cpu", "gpus"):
        hardware = {run.name: run.report["provenance"].get("hardware") or {} for run in runs}
        found[key] = {name: str(value.get(key)) for name, value in hardware.items()}
    return found


def _texts_differing(one: RunReport, two: RunReport, keys: Sequence[Key]) -> int:
    first, second = (next(iter(run.measured.values())).plain for run in (one, two))
    return sum(first[key].tokens != second[key].tokens for key in keys)
