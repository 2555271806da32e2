"""`tune`: the predicted speedup of each depth on this machine, and the measured one."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from drafttrain.core.types import Counters, PromptResult
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.template import Template
from drafttrain.evaluation.config import EvalConfig, TuneSettings
from drafttrain.evaluation.cost import BURST, Costs, measure_costs
from drafttrain.evaluation.evaluate import Parts
from drafttrain.evaluation.measure import PLAIN, DraftMethod, check_settings, measure
from drafttrain.evaluation.measurements import Measurements
from drafttrain.report.tuning import ChosenDepth, DepthPrediction, TunedChoice
from drafttrain.report.write import as_data
from drafttrain.runtime.disk import write_whole
from drafttrain.runtime.untrusted_input import Count, UntrustedError, read_typed, shown

TUNED = "tuned.json"
CHAIN = "eval.policy=chain"


def tune_drafter(
    parts: Parts,
    prompts: Sequence[Prompt],
    template: Template,
    config: EvalConfig,
    settings: TuneSettings,
    *,
    folder: Path,
    conditions: Mapping[str, Any],
    seed: int,
) -> tuple[list[DepthPrediction], Costs]:
    """Return the predicted, and if requested measured, speedup of every depth and batch size.

    The prompts are decoded one at a time at the greatest depth for the acceptance of all depths;
    with settings.measure also at every depth and batch size. A stopped measurement resumes.
    """
    timed, target = parts.timed_drafter, parts.target
    depths = settings.fitting(timed.max_depth)
    needed = max(settings.contexts) + (BURST + 1) * (depths[-1] + 1)
    if needed > target.spec.max_positions:
        raise ValueError(
            f"tune.contexts must leave room in the {target.spec.max_positions} positions of "
            f"{target.spec.name}, got {max(settings.contexts)}, which needs {needed}"
        )
    check_settings(prompts, target, timed, template, replace(config, depths=depths))
    policies = {depth: config.policy_at(depth) for depth in depths}
    costs = measure_costs(
        target,
        timed,
        policies,
        batches=sorted(settings.batch_sizes),
        contexts=sorted(settings.contexts),
        rounds=settings.rounds,
    )
    measured_depths = depths if settings.measure else depths[-1:]
    names = {depth: f"{parts.drafter_name}@{depth}" for depth in depths}
    point = {**conditions, **config.conditions, "depths": measured_depths}
    journals: list[Measurements] = []

    def results_at(batch_size: int) -> list[PromptResult]:
        journals.append(Measurements(folder, f"batch{batch_size}", point))
        return measure(
            target,
            [DraftMethod(names[depth], timed, policies[depth]) for depth in measured_depths],
            prompts,
            template,
            config,
            sampling=config.sampling,
            batch_size=batch_size,
            seed=seed,
            journal=journals[-1],
        )

    alone = results_at(1)
    predictions: list[DepthPrediction] = []
    for size in sorted(settings.batch_sizes):
        here = predict(in_order(alone, prompts), names[depths[-1]], costs, depths, size)
        if settings.measure:
            results = alone if size == 1 else results_at(size)
            here = [replace(p, measured=decoding_speedup(results, names[p.depth], p)) for p in here]
        predictions += here
    for journal in journals:  # only now: a tune that stops resumes from all that it measured
        journal.finish()
    return predictions, costs


def in_order(results: Sequence[PromptResult], prompts: Sequence[Prompt]) -> list[PromptResult]:
    """Return each turn once by every method, in the order of the prompts, which defines batches.

    Measurements come by timing block, and a prompt may be in several.
    """
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    once: dict[tuple[str, str, int], PromptResult] = {}
    for result in results:
        once.setdefault((result.method, result.prompt_id, result.turn), result)
    return sorted(once.values(), key=lambda result: places[result.prompt_id])


def acceptance_lengths(counters: Counters, depths: Sequence[int]) -> dict[int, float]:
    """Return the predicted acceptance length of each depth, from proposals of the deepest.

    One of depth d accepts what the first d levels of a deeper one would have accepted. (Cycles of
    another depth begin elsewhere in the text, and a shallower dynamic tree has more nodes on each
    level; this assumes that it makes no difference.)
    """
    per_position = counters.num_accepted_tokens_per_position
    drafts = max(counters.num_drafts, 1)
    return {depth: 1 + sum(per_position[:depth]) / drafts for depth in depths}


def predict(
    results: Sequence[PromptResult],
    deepest: str,
    costs: Costs,
    depths: Sequence[int],
    batch_size: int,
) -> list[DepthPrediction]:
    """Return the predicted speedup of every depth at a batch size, by task and in all.

    results: of the plain loop and of the drafter at the deepest depth, one prompt at a time, for
    the lengths of outputs and acceptance. predicted = t_plain / (t_draft + t_verify) per token,
    where the rows of a batch leave as they end: a plain batch costs one step for each token of its
    longest row, a speculative one a cycle for each acceptance_length tokens of each row.
    """
    plain = [result for result in results if result.method == PLAIN]
    drafted = [result for result in results if result.method == deepest]
    predictions = []
    totals = {depth: [0.0, 0.0] for depth in depths}
    for task in dict.fromkeys(result.task for result in plain):
        rows = [result for result in plain if result.task == task]
        chains = [result for result in drafted if result.task == task]
        lengths = acceptance_lengths(_accepted(chains), depths)
        for depth in depths:
            ours, theirs = _seconds(rows, chains, batch_size, depth, depths[-1], costs)
            totals[depth][0] += ours
            totals[depth][1] += theirs
            found = DepthPrediction(task, batch_size, depth, lengths[depth], theirs / ours, None)
            predictions.append(found)
    lengths = acceptance_lengths(_accepted(drafted), depths)
    predictions += [
        DepthPrediction("all", batch_size, depth, lengths[depth], theirs / ours, None)
        for depth, (ours, theirs) in totals.items()
    ]
    return predictions


def _accepted(results: Sequence[PromptResult]) -> Counters:
    return sum((result.stats.trimmed for result in results), Counters())


def _seconds(
    rows: Sequence[PromptResult],
    drafted: Sequence[PromptResult],
    batch_size: int,
    depth: int,
    deepest: int,
    costs: Costs,
) -> tuple[float, float]:
    """Return the predicted decoding seconds, speculative and plain, of a task's turns."""
    cycles = {}  # predicted for each output at this depth, from those of the deepest
    for result in drafted:
        lengths = acceptance_lengths(result.stats.trimmed, [depth, deepest])
        taken = result.stats.num_target_passes * lengths[deepest] / lengths[depth]
        cycles[result.prompt_id, result.turn] = taken
    speculative = plain = 0.0
    for turn in sorted({row.turn for row in rows}):
        here = [row for row in rows if row.turn == turn]
        for start in range(0, len(here), batch_size):
            group = here[start : start + batch_size]
            context = sum(row.num_prompt_tokens + len(row.tokens) / 2 for row in group) / len(group)
            # The first token comes with the prefill.
            steps = [float(max(len(row.tokens) - 1, 0)) for row in group]
            plain += _until_all_end(steps, partial(costs.plain_s, context=context))
            ours = [cycles[row.prompt_id, row.turn] for row in group]
            speculative += _until_all_end(ours, partial(costs.cycle_s, depth, context=context))
    return speculative, plain


def _until_all_end(passes: Sequence[float], seconds: Callable[[int], float]) -> float:
    """Return the seconds of a batch whose rows take `passes` each and leave as they end."""
    total = done = 0.0
    for place, ends in enumerate(sorted(passes)):
        total += (ends - done) * seconds(len(passes) - place)
        done = ends
    return total


def decoding_speedup(results: Sequence[PromptResult], method: str, point: DepthPrediction) -> float:
    """Return the measured speedup of decoding on the point's task, prefill left out."""
    chosen = [result for result in results if point.task in ("all", result.task)]

    def per_token(name: str) -> float:
        mine = [result for result in chosen if result.method == name]
        seconds = sum(r.stats.total_s - r.stats.prefill_s for r in mine)
        return seconds / max(sum(len(r.tokens) - 1 for r in mine), 1)

    return per_token(PLAIN) / per_token(method)


def choose(predictions: Sequence[DepthPrediction]) -> dict[str, TunedChoice]:
    """Return the fastest depth for every batch size, by task and in all.

    A measured speedup takes precedence over a predicted one.
    """
    chosen: dict[str, TunedChoice] = {}
    for size in dict.fromkeys(prediction.batch_size for prediction in predictions):
        best: dict[str, ChosenDepth] = {}
        for p in predictions:
            speedup = p.predicted if p.measured is None else p.measured
            if p.batch_size == size and (p.task not in best or speedup > best[p.task].speedup):
                best[p.task] = ChosenDepth(p.depth, speedup, speedup > 1)
        chosen[str(size)] = TunedChoice(best.pop("all"), best)
    return chosen


def write_tuned(
    folder: Path,
    predictions: Sequence[DepthPrediction],
    costs: Costs,
    conditions: Mapping[str, Any],
    *,
    policy: str,
    weights: str,
) -> Path:
    """Write the choice and the data behind it where `evaluate` and `export` find it.

    policy: its settings, as on the command line. weights: names those of the drafter.
    """
    file, names = folder / TUNED, ("depth", "batch", "context")
    record = {
        "policy": policy,
        "weights": weights,
        "batches": as_data(choose(predictions)),
        "predictions": [asdict(p) | {"error": p.error} for p in predictions],
        "costs_ms": {
            "plain": _cells(costs.plain, names[1:]),
            "verify": _cells(costs.verify, names),
            "draft": _cells(costs.draft, names),
        },
        "conditions": dict(conditions),
    }
    write_whole(file, json.dumps(record, indent=2) + "\n")
    return file


def _cells(values: Mapping[Any, float], names: Sequence[str]) -> list[dict[str, int | float]]:
    return [dict(zip((*names, "ms"), (*key, 1000 * s), strict=True)) for key, s in values.items()]


SIZE = re.compile(r"[1-9]\d{0,8}", re.ASCII)


@dataclass(frozen=True)
class _Choice:
    depth: Count


@dataclass(frozen=True)
class _Choices:
    all: _Choice  # over all tasks


@dataclass(frozen=True)
class _Tuned:
    batches: dict[str, _Choices]  # by batch size
    policy: str = CHAIN
    weights: str | None = None  # older versions did not say


def tuned_depth(
    run: Path, batch_size: int, *, policy: str = CHAIN, weights: str | None = None
) -> int | None:
    """Return the depth that `tune` chose for a run at a batch size (or the nearest one tried).

    ValueError if it was chosen under another policy, or for other weights (None: not known yet).
    """
    file = run / TUNED
    if not file.is_file():
        return None
    try:
        found = read_typed(_Tuned, file)
        batches = found.batches
        sizes = {int(size): choices for size, choices in batches.items() if SIZE.fullmatch(size)}
        if not sizes:
            raise UntrustedError("it must hold a depth by batch size")
        depth = sizes[min(sizes, key=lambda size: abs(size - batch_size))].all.depth
    except UntrustedError as error:
        raise ValueError(
            f"{file} must be what `tune` wrote, but cannot be read ({error}); run tune again, or "
            "remove it"
        ) from error
    for what, chosen, here in (
        ("under", found.policy, policy),
        ("for the weights of", found.weights, weights),
    ):
        if chosen is not None and here is not None and chosen != here:
            raise ValueError(
                f"{file} must hold a depth chosen {what} {here}, but it was chosen {what} "
                f"{shown(chosen)}; run tune again"
            )
    return depth
