"""What outputs show besides their totals: acceptance along them, and examples of who wrote what."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from drafttrain.core.types import Decoded, MethodKey, PromptResult
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.decode.stream import ACCEPTED, BONUS, CORRECTED, UNDRAFTED, pieces_of
from drafttrain.report.bootstrap import Resampling, interval
from drafttrain.report.metrics import SPEEDUP
from drafttrain.report.results import (
    PLAIN,
    AnswerTimes,
    Estimate,
    Example,
    OutputBin,
    TokensByTime,
    Waits,
    WrittenText,
)
from drafttrain.report.totals import PassTimes

WRITERS = {
    ACCEPTED: "drafted, and accepted by the target",
    CORRECTED: "the target's own, in place of a rejected draft",
    BONUS: "the target's own, after a draft that was accepted whole",
    UNDRAFTED: "the target's own, where nothing was drafted",
}
MOST_BINS = 12
NARROWEST_BIN = 4  # positions
SHORTEST_ANSWER = 16  # tokens, a power of two


def first_blocks(results: Iterable[PromptResult]) -> list[PromptResult]:
    """Return each turn of each prompt once by every method: in the block that came first."""
    found: dict[tuple[MethodKey, str, str, int], PromptResult] = {}
    for result in results:
        found.setdefault((result.key, result.task, result.prompt_id, result.turn), result)
    return list(found.values())


def along_output(
    results: Iterable[PromptResult], drafter: str, resampling: Resampling
) -> list[OutputBin]:
    """Return the accepted tokens per draft by the position at which drafts began, in bins.

    Bins are equally wide; those without a draft are left out. Intervals are by bootstrap over
    prompts. Counts are trimmed: the last draft of an output counts as far as it reached it.
    """
    mine = [result for result in first_blocks(results) if result.method == drafter]
    width = NARROWEST_BIN
    while width * MOST_BINS < max((len(result.tokens) for result in mine), default=0):
        width *= 2
    bins: dict[int, dict[tuple[str, str], list[int]]] = {}  # accepted and drafts, by prompt
    for result in mine:
        for position, num_draft_tokens, num_accepted_tokens in result.stats.cycles:
            if num_draft_tokens:
                prompts = bins.setdefault(position // width, {})
                counts = prompts.setdefault((result.task, result.prompt_id), [0, 0])
                counts[0] += num_accepted_tokens
                counts[1] += 1

    found = []
    for place, prompts in sorted(bins.items()):
        accepted, drafts = zip(*prompts.values(), strict=True)
        ci95 = interval(np.divide, [accepted, drafts], resampling, least=0.0)
        counted = sum(drafts), sum(accepted)
        measured = Estimate(counted[1] / counted[0], ci95)
        found.append(OutputBin(place * width, (place + 1) * width - 1, *counted, measured))
    return found


def answer_times(
    results: Sequence[PromptResult], drafter: str, resampling: Resampling
) -> list[AnswerTimes]:
    """Return how long answers take, plain and drafted: all, and by the plain answer's length."""
    times = PassTimes(results)
    answers: dict[tuple[str, str, int], dict[str, PromptResult]] = {}
    for one in first_blocks(results):
        answers.setdefault((one.task, one.prompt_id, one.turn), {})[one.method] = one
    bins: dict[int, list[tuple[PromptResult, PromptResult]]] = {}  # by the longest; 0: all
    for each in answers.values():  # in the order of the summary, whose interval is the same
        most = 1 << max(len(each[PLAIN].tokens) - 1, SHORTEST_ANSWER - 1).bit_length()
        for key in (0, most):
            bins.setdefault(key, []).append((each[PLAIN], each[drafter]))
    found = []
    for most, pairs in sorted(bins.items()):
        prompts: dict[tuple[str, str], np.ndarray] = {}  # the columns of SPEEDUP
        waits = np.array([[times.waits(one) for one in pair] for pair in pairs])
        for (plain, mine), (before, after) in zip(pairs, waits, strict=True):
            sums = np.array([len(mine.tokens), after[1], len(plain.tokens), before[1]])
            prompt = plain.task, plain.prompt_id
            prompts[prompt] = prompts.get(prompt, np.zeros(4)) + sums
        columns = dict(zip(SPEEDUP.columns, np.stack([*prompts.values()]).T.tolist(), strict=True))
        first, last = np.percentile(waits, [50, 95], axis=0).transpose(2, 1, 0)
        alone, ours = (Waits(last[i].tolist(), (1000 * first[i]).tolist()) for i in (0, 1))
        speedup = SPEEDUP.mean([columns], resampling).estimate
        found.append(AnswerTimes(most, len(pairs), alone, ours, speedup))
    return found


def examples_of(
    results: Sequence[PromptResult], drafter: str, prompts: Sequence[Prompt], tokenizer: Any
) -> list[Example]:
    """Return the first answers to three prompts: least accepted, median, and most accepted.

    Answers whose passes were not recorded, or that were decoded plainly, are left out.
    """
    texts = {(prompt.task, prompt.id): prompt.turns[0] for prompt in prompts}
    first = [result for result in first_blocks(results) if result.turn == 0]
    plain = {(r.task, r.prompt_id): r for r in first if r.method == PLAIN}
    mine = [result for result in first if result.method == drafter]
    mine = [result for result in mine if result.stats.passes and result.stats.cycles]
    mine.sort(key=_accepted_per_draft)
    places = sorted({0, len(mine) // 2, len(mine) - 1}) if mine else []
    found = []
    for result in (mine[place] for place in places):
        key = (result.task, result.prompt_id)
        pieces = pieces_of(Decoded(result.tokens, result.stats), tokenizer)
        written = [WrittenText(each.writer, each.text, len(each.tokens)) for each in pieces]
        times = _by_time(result), _by_time(plain[key])
        found.append(Example(*key, texts[key], written, *times))
    return found


def _accepted_per_draft(result: PromptResult) -> float:
    counted = result.stats.trimmed
    return counted.num_accepted_tokens / max(counted.num_drafts, 1)


def _by_time(result: PromptResult) -> TokensByTime:
    """Return the tokens after the prefill and after each pass; a plain pass yields one."""
    starts = [position for position, _, _ in result.stats.cycles]
    tokens = [*starts, len(result.tokens)] if starts else range(1, len(result.tokens) + 1)
    # A row waits for the whole pass, of which its stats have its share.
    shares = zip(result.stats.passes, result.stats.pass_s, strict=True)
    seconds = accumulate((rows * share for (rows, *_), share in shares), initial=0.0)
    return TokensByTime(list(seconds), list(tokens))
