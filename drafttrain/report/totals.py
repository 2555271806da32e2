"""Compute totals by prompt from results: sums over its turns, medians over its blocks."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from drafttrain.core.types import Counters, PromptResult
from drafttrain.report.repetition import outside_repetition, repeated_tokens
from drafttrain.report.results import PLAIN, Measurement, OutsideCounts, Seconds

FEWEST_PROMPTS = 5  # resampling fewer says nothing about other prompts
DISTURBED = 4.0  # times as long as the other methods' passes over the same prompt

Key = tuple[str, str]  # task, prompt_id: the unit of the bootstrap
Unit = TypeVar("Unit")


@dataclass(frozen=True)
class PromptTotals:
    """One prompt decoded by one method: its measurement, and what only this evaluation needs.

    Outputs and counters are those of the first block; `num_unstable_turns` counts the turns whose
    output differed in a later block. A prompt may be timed in some blocks only: `block_seconds`
    has its total in each of these.
    """

    row: Measurement
    outputs: tuple[tuple[int, ...], ...]  # by turn
    trimmed: Counters
    untrimmed: Counters
    block_seconds: dict[int, float]
    num_unstable_turns: int
    num_positions: int  # of the longest turn, prompt and output together


Totals = dict[Key, PromptTotals]


def collect(results: Iterable[PromptResult]) -> dict[str, Totals]:
    """Return the totals of each method by prompt, in the order of the results.

    Raises ValueError if a measurement occurs twice, if plain decoding is missing, or if a method
    did not decode what plain decoding did: such rows could not be compared as pairs.
    """
    measured: dict[str, dict[Key, dict[tuple[int, int], PromptResult]]] = {}
    for result in results:
        prompts = measured.setdefault(result.method, {})
        cells = prompts.setdefault((result.task, result.prompt_id), {})
        if (result.turn, result.block) in cells:
            raise ValueError(
                f"a report must have each measurement once, got turn {result.turn} of "
                f"{result.prompt_id!r} by {result.method} twice in block {result.block}"
            )
        cells[result.turn, result.block] = result
    if PLAIN not in measured:
        raise ValueError(
            f"a report must have results of method {PLAIN!r} to compare with, got "
            f"{sorted(measured) or 'no results at all'}"
        )
    wanted = {(key, cell) for key, cells in measured[PLAIN].items() for cell in cells}
    for method, prompts in measured.items():
        odd = wanted ^ {(key, cell) for key, cells in prompts.items() for cell in cells}
        if odd:
            (_, prompt_id), (turn, block) = min(odd)
            raise ValueError(
                f"every method must decode the same prompts, turns and blocks as {PLAIN}, but "
                f"{method} differs in {len(odd)} of them, such as turn {turn} of {prompt_id!r} in "
                f"block {block}"
            )
    totals = {
        method: {key: _totals(prompts[key]) for key in measured[PLAIN]}
        for method, prompts in measured.items()
    }
    paces: dict[str, dict[Key, float]] = {method: {} for method in totals}
    for method, found in totals.items():
        for key, prompt in found.items():
            seconds, passes = prompt.row.seconds, max(prompt.row.num_target_passes, 1)
            paces[method][key] = (seconds.total - seconds.prefill) / passes
    for method, promised in disturbed(paces).items():
        for key, pace in promised.items():
            prompt = totals[method][key]
            totals[method][key] = replace(prompt, row=_at_pace(prompt.row, pace))
    return totals


def by_task(totals: Totals) -> dict[str, list[PromptTotals]]:
    """Return the prompts of each task."""
    tasks: dict[str, list[PromptTotals]] = {}
    for (task, _), prompt in totals.items():
        tasks.setdefault(task, []).append(prompt)
    return tasks


def disturbed(paces: Mapping[str, Mapping[Unit, float]]) -> dict[str, dict[Unit, float]]:
    """Return by method the units whose timing was disturbed, and the pace expected of them.

    paces: by method, the seconds per target pass of each unit (a prompt, or a turn of it), without
    prefill. The methods decode a unit in direct succession. If one of them took more than DISTURBED
    times as long as another, each relative to its own median over units, something else kept the
    machine busy (a long context slows all of them). Empty for fewer than FEWEST_PROMPTS units.
    """
    found: dict[str, dict[Unit, float]] = {}
    if len(paces) < 2 or any(len(units) < FEWEST_PROMPTS for units in paces.values()):
        return found
    medians = {method: statistics.median(units.values()) for method, units in paces.items()}
    if not all(medians.values()):
        return found
    for unit in next(iter(paces.values())):
        relative = {method: paces[method][unit] / medians[method] for method in paces}
        least = min(relative.values())
        for method, value in relative.items():
            if value > DISTURBED * least > 0:
                found.setdefault(method, {})[unit] = least * medians[method]
    return found


def disturbed_turns(results: Iterable[PromptResult]) -> set[tuple[int, str, int]]:
    """Return block, prompt and turn of the measurements in which a method was disturbed."""
    paces: dict[str, dict[tuple[int, str, int], float]] = {}
    for result in results:
        seconds = result.stats.total_s - result.stats.prefill_s
        paces.setdefault(result.method, {})[result.block, result.prompt_id, result.turn] = (
            seconds / max(result.stats.num_target_passes, 1)
        )
    return {unit for units in disturbed(paces).values() for unit in units}


def _at_pace(row: Measurement, pace: float) -> Measurement:
    """Return a prompt as if each of its passes had taken `pace` seconds."""
    seconds = row.seconds
    spent = pace * max(row.num_target_passes, 1)
    share = spent / (seconds.total - seconds.prefill)
    parts = (share * part for part in (seconds.draft, seconds.verify, seconds.other))
    settled = Seconds(seconds.prefill + spent, seconds.prefill, *parts)
    return replace(row, seconds=settled, disturbed=True)


def _totals(cells: Mapping[tuple[int, int], PromptResult]) -> PromptTotals:
    turns: dict[int, list[PromptResult]] = defaultdict(list)
    blocks: dict[int, float] = defaultdict(float)
    for (turn, block), result in sorted(cells.items()):
        turns[turn].append(result)
        blocks[block] += result.stats.total_s
    first = [results[0] for results in turns.values()]
    trimmed = sum((result.stats.trimmed for result in first), Counters())

    def seconds(part: str) -> float:
        return sum(
            statistics.median(getattr(result.stats, part) for result in results)
            for results in turns.values()
        )

    row = Measurement(
        task=first[0].task,
        prompt_id=first[0].prompt_id,
        method=first[0].method,
        num_output_tokens=sum(len(result.tokens) for result in first),
        num_target_passes=sum(result.stats.num_target_passes for result in first),
        num_drafts=trimmed.num_drafts,
        num_draft_tokens=trimmed.num_draft_tokens,
        num_accepted_tokens=trimmed.num_accepted_tokens,
        num_repeated_tokens=sum(repeated_tokens(result.tokens) for result in first),
        outside_repetition=_outside(first),
        seconds=Seconds(*(seconds(f"{part}_s") for part in Seconds.__annotations__)),
        disturbed=False,
    )
    return PromptTotals(
        row,
        outputs=tuple(result.tokens for result in first),
        trimmed=trimmed,
        untrimmed=sum((result.stats.untrimmed for result in first), Counters()),
        block_seconds=dict(blocks),
        num_unstable_turns=sum(
            any(result.tokens != results[0].tokens for result in results)
            for results in turns.values()
        ),
        num_positions=max(result.num_prompt_tokens + len(result.tokens) for result in first),
    )


def _outside(results: Sequence[PromptResult]) -> OutsideCounts | None:
    """Return the counts outside repetition; None if an engine did not record its cycles."""
    total, num_target_passes = Counters(), 0
    for result in results:
        cycles, counters = result.stats.cycles, result.stats.trimmed
        if counters.num_drafts and not cycles:
            return None
        drafted = sum(num_draft_tokens for _, num_draft_tokens, _ in cycles)
        assert drafted == counters.num_draft_tokens, "the cycles are those of the trimmed counters"
        here, passes = outside_repetition(result.tokens, cycles)
        total, num_target_passes = total + here, num_target_passes + passes
    return OutsideCounts(
        num_target_passes, total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens
    )
