"""`tune`: the predicted speedup of each depth on this machine, and the measured one."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from drafttrain.core.types import Counters, PromptResult
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.decode.costs import Costs
from drafttrain.decode.policy import Policy
from drafttrain.decode.rows import context_of
from drafttrain.drafters.base import Drafter, draft_vocab_size
from drafttrain.evaluation.config import TuneSettings
from drafttrain.evaluation.cost import BURST, measure_costs
from drafttrain.evaluation.evaluate import Setup
from drafttrain.evaluation.measure import PLAIN, DraftMethod, first_turn, measure
from drafttrain.evaluation.measurements import Measurements
from drafttrain.evaluation.optimal_tree import (
    OptimalTree,
    Times,
    count_ranks,
    fastest_trees,
    predicted_times,
    samples,
)
from drafttrain.report.outputs import first_blocks
from drafttrain.report.totals import PassTimes
from drafttrain.report.tune import ChosenDepth, DepthPrediction, TunedChoice
from drafttrain.report.write import as_data
from drafttrain.runtime.disk import digest_of, write_whole
from drafttrain.runtime.settings import require
from drafttrain.runtime.untrusted_input import read_typed

TreesBySize = dict[int, dict[int, OptimalTree]]  # by batch size and depth


@dataclass(frozen=True)
class Tuning:
    """What `tune` found: speedups, the costs behind them, and what was accepted.

    trees: by batch size and depth, under eval.policy=optimal_tree. acceptance: of each position,
    where the one before it was.
    """

    predictions: list[DepthPrediction]
    costs: Costs
    trees: TreesBySize
    acceptance: list[float]


def tune_drafter(setup: Setup, settings: TuneSettings) -> Tuning:
    """Predict, and if requested measure, the speedup of every depth and batch size.

    The prompts are decoded one at a time at the greatest depth for the acceptance of all depths;
    with settings.measure also at every depth and batch size. A stopped measurement resumes.
    """
    config, prompts, template, seed = setup.settings, setup.prompts, setup.template, setup.seed
    parts, folder = setup.parts, setup.folder / "tune"
    timed, target = parts.timed_drafter, parts.target
    depths = settings.fitting(timed.max_depth)
    why = ", which takes what `tune` finds of chains"
    config.require("policy", config.policy != "adaptive", "be chain for `tune`", why)
    why = "be at least 2 for `tune`: an answer's first token comes with the prefill"
    config.require("max_new_tokens", config.max_new_tokens > 1, why)
    if config.policy == "optimal_tree" and type(timed).propose is not Drafter.propose:
        raise ValueError(
            f"eval.policy must not be optimal_tree for drafter={parts.drafter_name}, which finds "
            "its proposals in a shape of their own; use chain or dynamic_tree"
        )
    needed = max(settings.contexts) + (BURST + 1) * (depths[-1] + 1)
    positions, who = context_of(target.spec, [timed])
    room, longest = f"leave room in the {positions} positions of {who}", max(settings.contexts)
    require(needed <= positions, "tune.contexts", room, longest, f", which needs {needed}")
    sizes = sorted(settings.batch_sizes)
    point = {"setup": setup.conditions, "eval": config.conditions, "depths": depths}
    trees: TreesBySize = {}
    told = point | {"tune": {**vars(settings), "name": "", "overwrite": False}}
    mark = digest_of(told)[:8]
    kept = folder / f"trees.{mark}.partial.json"  # for a `tune` that is stopped and resumes
    if config.policy == "optimal_tree":
        timed_at = sorted({1, *sizes})  # acceptance is measured at batch size 1
        trees = kept_trees(kept, depths, timed_at) or optimal_trees(
            setup, settings, depths, timed_at
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps({"trees": as_data(trees)}) + "\n")

    def policies(size: int) -> dict[int, Policy]:
        if not trees:
            return {depth: config.policy_at(depth) for depth in depths}
        return {depth: found.tree for depth, found in trees[size].items()}

    costs = measure_costs(target, timed, policies, sizes, config, settings)
    measured_depths = depths if settings.measure else depths[-1:]
    journals: list[Measurements] = []

    def results_at(batch_size: int) -> list[PromptResult]:
        shapes = {depth: found.paths for depth, found in trees.get(batch_size, {}).items()}
        told = point | {"depths": measured_depths} | ({"trees": shapes} if shapes else {})
        journals.append(Measurements(folder, f"batch{batch_size}", told))
        here = policies(batch_size)
        return measure(
            target,
            [
                DraftMethod(parts.drafter_name, depth, timed, here[depth])
                for depth in measured_depths
            ],
            prompts,
            template,
            config,
            sampling=config.sampling,
            batch_size=batch_size,
            seed=seed,
            journal=journals[-1],
        ).results

    alone = results_at(1)
    predictions: list[DepthPrediction] = []
    for size in sizes:
        expected = {depth: found.lengths for depth, found in trees.get(size, {}).items()}
        decoded = in_order(alone, prompts)
        here = predict(decoded, costs, depths, size, expected)
        if settings.measure:
            results = alone if size == 1 else results_at(size)
            here = [replace(p, measured=decoding_speedup(results, p)) for p in here]
        shapes = policies(size)
        predictions += [replace(p, nodes=shapes[p.depth].nodes_told) for p in here]
    for journal in journals:  # only now: a tune that stops resumes from all that it measured
        journal.finish()
    kept.unlink(missing_ok=True)
    found = _accepted([result for result in alone if result.depth == depths[-1]])
    reached = [found.num_drafts, *found.num_accepted_tokens_per_position]
    acceptance = [after / before if before else 0.0 for before, after in pairwise(reached)]
    return Tuning(predictions, costs, trees, acceptance)


def optimal_trees(
    setup: Setup, settings: TuneSettings, depths: Sequence[int], sizes: Sequence[int]
) -> TreesBySize:
    """Return the best tree of each depth at each batch size, by acceptance and costs.

    With tune.trees=longest a cycle is taken to cost the same whatever its tree: Sequoia's tree of
    eval.tree_nodes, which accepts most.
    """
    config, target, drafter = setup.settings, setup.parts.target, setup.parts.timed_drafter
    deepest, most = depths[-1], config.tree_nodes
    counts = count_ranks(setup, deepest)
    known = draft_vocab_size(drafter)
    kinds = samples(deepest, most, known)
    numbered = dict(enumerate(kinds.values()))
    costs = measure_costs(target, drafter, lambda _: numbered, sizes, config, settings)
    lengths = [len(first_turn(prompt, target, setup.template)) for prompt in setup.prompts]
    context = sum(lengths) / len(lengths) + config.max_new_tokens / 2

    def seconds(size: int) -> Times:
        if settings.trees == "longest":
            return lambda tree: 1.0
        return predicted_times(costs, list(kinds), size, context)

    return {size: fastest_trees(counts, seconds(size), depths, most) for size in sizes}


@dataclass(frozen=True)
class _Trees:
    trees: TreesBySize


def kept_trees(file: Path, depths: Sequence[int], sizes: Sequence[int]) -> TreesBySize | None:
    """Return the trees that a stopped `tune` kept; None if some are missing."""
    try:
        found = read_typed(_Trees, file).trees
        whole = all(found[size][depth].tree.depth == depth for size in sizes for depth in depths)
    except (ValueError, KeyError, OSError):
        return None
    return found if whole else None


def in_order(results: Sequence[PromptResult], prompts: Sequence[Prompt]) -> list[PromptResult]:
    """Return each turn once by every method, in the order of the prompts, which defines batches.

    Measurements come by timing block, and a prompt may be in several.
    """
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    return sorted(first_blocks(results), key=lambda result: places[result.prompt_id])


def whole_lengths(counters: Counters, depths: Sequence[int]) -> dict[int, float]:
    """Return the predicted tokens of an uncut draft of each depth, from proposals of the deepest.

    One of depth d accepts what the first d levels of a deeper one would have accepted. (Cycles of
    another depth begin elsewhere in the text, and a shallower dynamic tree has more nodes on each
    level; this assumes that it makes no difference.)
    """
    per_position = counters.num_accepted_tokens_per_position
    drafts = max(counters.num_drafts, 1)
    return {depth: 1 + sum(per_position[:depth]) / drafts for depth in depths}


def predict(
    results: Sequence[PromptResult],
    costs: Costs,
    depths: Sequence[int],
    batch_size: int,
    expected: Mapping[int, Mapping[str, float]] | None = None,
) -> list[DepthPrediction]:
    """Return the predicted speedup of every depth at a batch size, by task and in all.

    results: of the plain loop and of the drafter at the deepest depth, one prompt at a time, for
    the lengths of outputs and acceptance. predicted = t_plain / (t_draft + t_verify) per token,
    where the rows of a batch leave as they end: a plain batch costs one step for each token of its
    longest row, a speculative one a cycle for each acceptance_length tokens of each row.
    expected: the tokens of an uncut draft by depth and task, where they are known otherwise. A task
    whose answers all end with the prefill's token has no speedup, and is left out; ValueError if
    all do.
    """

    def lengths_of(results: Sequence[PromptResult], task: str) -> dict[int, float]:
        # The text is the same at every depth: longer drafts are fewer.
        told = _accepted(results)
        whole = whole_lengths(told, depths)
        share = (told.acceptance_length or 1.0) / whole[depths[-1]]
        return {d: share * (expected[d][task] if expected else whole[d]) for d in depths}

    plain = [result for result in results if result.method == PLAIN]
    drafted = [result for result in results if result.depth == depths[-1]]
    predictions = []
    totals = {depth: [0.0, 0.0] for depth in depths}
    for task in dict.fromkeys(result.task for result in plain):
        rows = [result for result in plain if result.task == task]
        chains = [result for result in drafted if result.task == task]
        if not all(any(len(result.tokens) > 1 for result in each) for each in (rows, chains)):
            continue
        lengths = lengths_of(chains, task)
        for depth in depths:
            length = expected[depth][task] if expected else None
            ours, theirs = _seconds(rows, chains, batch_size, depth, depths[-1], costs, length)
            totals[depth][0] += ours
            totals[depth][1] += theirs
            found = DepthPrediction(task, batch_size, depth, lengths[depth], theirs / ours, None)
            predictions.append(found)
    if not predictions:
        raise ValueError(
            "eval.prompts must have an answer of more than one token for `tune`, got none: the "
            "first comes with the prefill, and nothing is drafted for it"
        )
    lengths = lengths_of(drafted, "all")
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
    expected: float | None,
) -> tuple[float, float]:
    """Return the predicted decoding seconds, speculative and plain, of a task's turns.

    expected: the tokens of an uncut draft; None: of each output by itself.
    """
    cycles = {}  # predicted for each output at this depth, from those of the deepest
    for result in drafted:
        lengths = whole_lengths(result.stats.trimmed, [depth, deepest])
        taken = result.stats.num_target_passes * lengths[deepest] / (expected or lengths[depth])
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


def decoding_speedup(results: Sequence[PromptResult], point: DepthPrediction) -> float:
    """Return the measured speedup of decoding on the point's task, prefill left out."""
    chosen = [result for result in results if point.task in ("all", result.task)]

    times = PassTimes(results)

    def per_token(depth: int) -> float:
        mine = [result for result in chosen if result.depth == depth]
        timed = map(times.seconds, mine)
        seconds = sum(each.total - each.prefill for each in timed)
        return seconds / max(sum(len(r.tokens) - 1 for r in mine), 1)

    return per_token(0) / per_token(point.depth)


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
                best[p.task] = ChosenDepth(p.depth, speedup, speedup > 1, p.nodes)
        chosen[str(size)] = TunedChoice(best.pop("all"), best)
    return chosen
