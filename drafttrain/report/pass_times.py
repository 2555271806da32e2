"""The time of a decoding, composed of its passes: each kind of pass counts at its median.

What is decoded, and in which passes, is the same every time; only times are noisy. So the passes
are counted, and timed over all prompts: a pass that something else on the machine delayed changes
nothing, and no prompt depends on when it happened to be decoded.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable

from drafttrain.core.types import MethodKey, PromptResult
from drafttrain.report.results import Seconds

ENOUGH_PASSES = 5  # of a kind, for a median
RANGES_PER_DOUBLING = 4  # of the context: within a range it grows by a fifth

Parts = tuple[float, ...]  # seconds of draft, verify, other; of the prefill alone
# Whether it is the prefill; rows; depth and nodes of the proposals, and who drafted them.
Kind = tuple[MethodKey, bool, int, int, int, str]


class PassTimes:
    """The median time of each kind of pass, by method, batch, proposal and range of contexts.

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
