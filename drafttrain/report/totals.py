"""Compute totals by prompt from results: sums over its turns, times composed of its passes."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from drafttrain.core.types import Counters, PromptResult
from drafttrain.report.pass_times import PassTimes
from drafttrain.report.results import PLAIN, Measurement, OutsideCounts, Seconds

REPEATED_NGRAM = 4  # tokens; shorter ones recur in any text
FEWEST_PROMPTS = 5  # resampling fewer tells nothing about other prompts

Key = tuple[str, str]  # task, prompt_id: the unit of the bootstrap


@dataclass(frozen=True)
class PromptTotals:
    """One prompt decoded by one method: its measurement, and what only this evaluation needs.

    Outputs and counters are those of the first block; `num_unstable_turns` counts the turns whose
    output differed in a later block. `block_seconds` composes its time of the passes of each
    block alone, of whichever prompts. A prompt may be timed in some blocks only.
    """

    row: Measurement
    outputs: tuple[tuple[int, ...], ...]  # by turn
    trimmed: Counters
    untrimmed: Counters
    by_member: tuple[dict[str, Counters], ...]  # by turn
    block_seconds: dict[int, float]
    num_blocks: int  # that timed it
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
    every = [
        one for prompts in measured.values() for found in prompts.values() for one in found.values()
    ]
    whole = PassTimes(every)
    blocks = {
        block: PassTimes((one for one in every if one.block == block), whole)
        for block in sorted({one.block for one in every})
    }
    return {
        method: {key: _totals(prompts[key], whole, blocks) for key in measured[PLAIN]}
        for method, prompts in measured.items()
    }


def by_task(totals: Totals) -> dict[str, list[PromptTotals]]:
    """Return the prompts of each task."""
    tasks: dict[str, list[PromptTotals]] = {}
    for (task, _), prompt in totals.items():
        tasks.setdefault(task, []).append(prompt)
    return tasks


def _totals(
    cells: Mapping[tuple[int, int], PromptResult],
    whole: PassTimes,
    blocks: Mapping[int, PassTimes],
) -> PromptTotals:
    turns: dict[int, list[PromptResult]] = defaultdict(list)
    for (turn, _), result in sorted(cells.items()):
        turns[turn].append(result)
    first = [results[0] for results in turns.values()]
    trimmed = sum((result.stats.trimmed for result in first), Counters())
    # An engine that does not time its passes has times by turn: their median over the blocks.
    timed = [[whole.seconds(one) for one in results] for results in turns.values()]

    def seconds(part: str) -> float:
        return sum(statistics.median(getattr(one, part) for one in each) for each in timed)

    block_seconds = {
        block: sum(
            statistics.median(
                times.seconds(one).total
                for one in ([r for r in results if r.block == block] or results)
            )
            for results in turns.values()
        )
        for block, times in blocks.items()
    }
    row = Measurement(
        task=first[0].task,
        prompt_id=first[0].prompt_id,
        method=first[0].method,
        num_output_tokens=sum(len(result.tokens) for result in first),
        num_target_passes=sum(result.stats.num_target_passes for result in first),
        num_drafts=trimmed.num_drafts,
        num_draft_tokens=trimmed.num_draft_tokens,
        num_accepted_tokens=trimmed.num_accepted_tokens,
        num_repeated_tokens=sum(sum(repeats(result.tokens)) for result in first),
        outside_repetition=_outside(first),
        seconds=Seconds(**{part: seconds(part) for part in Seconds.__annotations__}),
        num_cut_drafts=trimmed.num_cut_drafts,
    )
    return PromptTotals(
        row,
        outputs=tuple(result.tokens for result in first),
        trimmed=trimmed,
        untrimmed=sum((result.stats.untrimmed for result in first), Counters()),
        by_member=tuple(result.stats.by_member for result in first),
        block_seconds=block_seconds,
        num_blocks=len({block for _, block in cells}),
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
        num_target_passes,
        total.num_drafts,
        total.num_draft_tokens,
        total.num_accepted_tokens,
        total.num_cut_drafts,
    )


def repeats(tokens: Sequence[int]) -> list[bool]:
    """Return for each token whether it ends an n-gram that occurred earlier in the sequence.

    This depends on the text alone, not on the drafter.
    """
    seen: set[tuple[int, ...]] = set()
    flags = [False] * min(len(tokens), REPEATED_NGRAM - 1)
    for end in range(REPEATED_NGRAM, len(tokens) + 1):
        gram = tuple(tokens[end - REPEATED_NGRAM : end])
        flags.append(gram in seen)
        seen.add(gram)
    return flags


def outside_repetition(
    tokens: Sequence[int], cycles: Sequence[tuple[int, int, int]]
) -> tuple[Counters, int]:
    """Return the counters and target passes that began where the output does not repeat itself.

    cycles: (output position of the cycle's first token, drafted, accepted), the latter two trimmed
    as in `Counters`; a cycle without drafted tokens is a pass, but not a draft. A cycle is outside
    repetition if the token at its first position does not end a 4-gram that occurred earlier in
    the output.
    """
    flags = repeats(tokens)
    counters, num_target_passes = Counters(), 0
    starts = [*(position for position, *_ in cycles), len(tokens)]
    for (position, num_draft_tokens, num_accepted_tokens), end in zip(
        cycles, starts[1:], strict=True
    ):
        if flags[position]:
            continue
        num_target_passes += 1
        if num_draft_tokens:
            cut = end - position == num_accepted_tokens
            counters.add(num_draft_tokens, num_accepted_tokens, cut=cut)
    return counters, num_target_passes
