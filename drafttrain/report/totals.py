"""Compute totals by prompt from results: sums over its turns, times composed of its passes."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from drafttrain.core.types import Counters, MethodKey, PromptResult
from drafttrain.report.results import PLAIN, Measurement, OutsideCounts, Seconds

REPEATED_NGRAM = 4  # tokens; shorter ones recur in any text
FEWEST_PROMPTS = 5  # resampling fewer tells nothing about other prompts
ENOUGH_PASSES = 5  # of a kind, for a median
RANGES_PER_DOUBLING = 4  # of the context: within a range it grows by a fifth

Key = tuple[str, str]  # task, prompt_id: the unit of the bootstrap
Parts = tuple[float, ...]  # seconds of draft, verify, other; of the prefill alone
# Whether it is the prefill; rows; depth and nodes of the proposals, and who drafted them.
Kind = tuple[MethodKey, bool, int, int, int, str]


class PassTimes:
    """The median time of each kind of pass, by method, batch, proposal and range of contexts.

    What is decoded, and in which passes, is the same every time; only times are noisy. So passes
    are counted, and timed over all prompts: a pass that something else on the machine delayed
    changes nothing, and no prompt depends on when it happened to be decoded.

    whole: takes the place of kinds that these results timed too rarely.
    """

    def __init__(self, results: Iterable[PromptResult], whole: "PassTimes | None" = None) -> None:
        self.whole = whole
        self._timed: dict[Kind, dict[int, list[Parts]]] = defaultdict(lambda: defaultdict(list))
        self._medians: dict[tuple[Kind, int], Parts] = {}
        for result in results:
            for kind, contexts, parts in _passes(result):
                self._timed[kind][contexts].append(parts)

    def seconds(self, result: PromptResult) -> Seconds:
        """Return the time of a decoding by stage; as it was measured if its passes were not."""
        stats = result.stats
        parts = {"prefill": stats.prefill_s}
        parts |= {"draft": stats.draft_s, "verify": stats.verify_s, "other": stats.other_s}
        untimed = parts["draft"] + parts["verify"] + parts["other"]
        if stats.passes or not untimed:
            (prefill,), *passes = [self._median(kind, where) for kind, where, _ in _passes(result)]
            sums = [sum(column) for column in zip(*passes, strict=True)] or [0.0] * 3
            parts = dict(zip(parts, [prefill, *sums], strict=True))
        return Seconds(total=sum(parts.values()), **parts)

    def waits(self, result: PromptResult) -> tuple[float, float]:
        """Return the seconds until the first and the last token, with those of a batch's others."""
        stats = result.stats
        if not stats.passes and stats.total_s > stats.prefill_s:  # its passes were not timed
            return stats.prefill_s, stats.total_s
        each = [kind[2] * sum(self._median(kind, where)) for kind, where, _ in _passes(result)]
        return each[0], sum(each)

    def delay(self, result: PromptResult) -> float:
        """Return how many times as long a decoding took as its passes do in the median."""
        usual = self.seconds(result).total
        return result.stats.total_s / usual if usual > 0 else 1.0

    def _median(self, kind: Kind, contexts: int) -> Parts:
        """Return the median of a kind near a range of contexts: in it, if it has enough."""
        if (kind, contexts) in self._medians:
            return self._medians[kind, contexts]
        timed, near = self._timed.get(kind, {}), []
        for each in sorted(timed, key=lambda each: abs(each - contexts)):
            near += timed[each]
            if len(near) >= ENOUGH_PASSES:
                break
        if len(near) < ENOUGH_PASSES and self.whole is not None:
            return self.whole._median(kind, contexts)
        parts = tuple(map(statistics.median, zip(*near, strict=True)))
        self._medians[kind, contexts] = parts
        return parts


def _passes(result: PromptResult) -> Iterable[tuple[Kind, int, Parts]]:
    """Yield the kind, range of contexts and seconds of the prefill, then of each pass."""
    stats, context = result.stats, result.num_prompt_tokens
    rows = stats.passes[0][0] if stats.passes else 1
    yield (result.key, True, rows, 0, 0, ""), _range(context), (stats.prefill_s,)
    starts = [start for start, *_ in stats.cycles] or range(1, len(stats.passes) + 1)
    drafters = iter(stats.drafters)
    for start, (rows, depth, nodes, *seconds) in zip(starts, stats.passes, strict=False):
        who = next(drafters, "") if nodes else ""
        yield (result.key, False, rows, depth, nodes, who), _range(context + start), tuple(seconds)


def _range(context: int) -> int:
    return int(RANGES_PER_DOUBLING * math.log2(context))


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


def by_scope(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """Return the prompts of all tasks, under "all", and of each."""
    tasks: dict[str, list[Key]] = {}
    for key in (every := list(keys)):
        tasks.setdefault(key[0], []).append(key)
    return {"all": every, **tasks}


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
    counts = []
    for result in results:
        cycles, counters = result.stats.cycles, result.stats.trimmed
        if counters.num_drafts and not cycles:
            return None
        drafted = sum(num_draft_tokens for _, num_draft_tokens, _ in cycles)
        assert drafted == counters.num_draft_tokens, "the cycles are those of the trimmed counters"
        counts.append(outside_repetition(result.tokens, cycles))
    return OutsideCounts(*(sum(column) for column in zip(*map(astuple, counts), strict=True)))


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
) -> OutsideCounts:
    """Return the counts of drafts and passes that began where the output does not repeat itself.

    cycles: (output position of the cycle's first token, drafted, accepted), the latter two trimmed
    as in `Counters`; a cycle without drafted tokens is a pass, but not a draft. A cycle is outside
    repetition if the token at its first position does not end a 4-gram that occurred earlier in
    the output.
    """
    flags = repeats(tokens)
    starts = [*(position for position, *_ in cycles), len(tokens)]
    passes = [
        (drafted, accepted, end - position == accepted)  # cut: no token of its own came last
        for (position, drafted, accepted), end in zip(cycles, starts[1:], strict=True)
        if not flags[position]
    ]
    drafts = [one for one in passes if one[0]]
    drafted, accepted, cut = (sum(one[part] for one in drafts) for part in range(3))
    return OutsideCounts(len(passes), len(drafts), drafted, accepted, cut)
