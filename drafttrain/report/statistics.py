"""What the report counts and times per prompt, and intervals by bootstrap over prompts."""

import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from drafttrain.core.types import Counters, PromptResult
from drafttrain.report.repetition import outside_repetition, repeated_tokens

PLAIN = "autoregressive"
NGRAM = "ngram"
CONFIDENCE = 0.95
FEWEST_PROMPTS = 5  # of fewer, drawing them again says nothing about others
DISTURBED = 4.0  # times as long as the other methods' passes over the same prompt

Interval = list[float]
Values = np.ndarray | np.float64  # one per resample, or the statistic of the data itself
Key = tuple[str, str]  # task, prompt_id: the unit of the bootstrap


@dataclass(frozen=True)
class Resampling:
    """How often the bootstrap draws the prompts anew, and the seed of its draws."""

    resamples: int
    seed: int


@dataclass(frozen=True)
class Seconds:
    """Where the time of a prompt went: for each turn the median over its blocks, summed."""

    total: float
    prefill: float
    draft: float
    verify: float
    other: float


@dataclass(frozen=True)
class PromptTotals:
    """One prompt decoded by one method, its turns taken together.

    Outputs and counters are those of the first block; `num_unstable_turns` counts the turns whose
    output was another in a later block. A prompt may be timed in some blocks only:
    `block_seconds` has its total in each that timed it.
    """

    task: str
    prompt_id: str
    outputs: tuple[tuple[int, ...], ...]  # by turn
    num_target_passes: int
    trimmed: Counters
    untrimmed: Counters
    seconds: Seconds
    block_seconds: dict[int, float]
    num_unstable_turns: int
    # Of `trimmed` and the target passes, what began outside repetition; None: cycles not recorded.
    outside: tuple[Counters, int] | None
    num_repeated_tokens: int
    num_positions: int  # of the longest turn, prompt and output together
    disturbed: bool = False  # its seconds are what the other methods' passes promise

    @property
    def num_output_tokens(self) -> int:
        """Tokens that reached the output, over all turns."""
        return sum(len(output) for output in self.outputs)


Totals = dict[Key, PromptTotals]


def collect(results: Iterable[PromptResult]) -> dict[str, Totals]:
    """Return the totals of each method by prompt, in the order of the results.

    Raises ValueError when a measurement is there twice, when plain decoding is missing, or when a
    method did not decode what plain decoding did: such rows could not be compared as pairs.
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
        method: {key: _totals(key, prompts[key]) for key in measured[PLAIN]}
        for method, prompts in measured.items()
    }
    paces = {
        method: {
            key: (prompt.seconds.total - prompt.seconds.prefill) / max(prompt.num_target_passes, 1)
            for key, prompt in prompts.items()
        }
        for method, prompts in totals.items()
    }
    for method, promised in disturbed(paces).items():
        for key, pace in promised.items():
            totals[method][key] = _at_pace(totals[method][key], pace)
    return totals


Unit = TypeVar("Unit")


def disturbed(paces: Mapping[str, Mapping[Unit, float]]) -> dict[str, dict[Unit, float]]:
    """Return by method the units whose timing was disturbed, and the pace they would have had.

    paces: by method, the seconds of a target pass of each unit (a prompt, or a turn of it), without
    its prefill. The methods decode a unit one right after the other: where, each measured by its
    own median over the units, one of them took more than DISTURBED times as long as another,
    something else kept the machine busy. A long context slows all of them. None where there are
    fewer than FEWEST_PROMPTS units.
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


def _at_pace(prompt: PromptTotals, pace: float) -> PromptTotals:
    """Return a prompt as if each of its passes had taken so many seconds."""
    seconds = prompt.seconds
    spent = pace * max(prompt.num_target_passes, 1)
    share = spent / (seconds.total - seconds.prefill)
    settled = Seconds(
        total=seconds.prefill + spent,
        prefill=seconds.prefill,
        draft=share * seconds.draft,
        verify=share * seconds.verify,
        other=share * seconds.other,
    )
    return replace(prompt, seconds=settled, disturbed=True)


def _totals(key: Key, cells: dict[tuple[int, int], PromptResult]) -> PromptTotals:
    turns: dict[int, list[PromptResult]] = defaultdict(list)
    for _, result in sorted(cells.items()):
        turns[result.turn].append(result)
    blocks: dict[int, float] = defaultdict(float)
    for (_, block), result in cells.items():
        blocks[block] += result.stats.total_s
    first = [results[0] for results in turns.values()]

    def seconds(part: str) -> float:
        return sum(
            statistics.median(getattr(result.stats, part) for result in results)
            for results in turns.values()
        )

    return PromptTotals(
        task=key[0],
        prompt_id=key[1],
        outputs=tuple(result.tokens for result in first),
        num_target_passes=sum(result.stats.num_target_passes for result in first),
        trimmed=sum((result.stats.trimmed for result in first), Counters()),
        untrimmed=sum((result.stats.untrimmed for result in first), Counters()),
        seconds=Seconds(
            total=seconds("total_s"),
            prefill=seconds("prefill_s"),
            draft=seconds("draft_s"),
            verify=seconds("verify_s"),
            other=seconds("other_s"),
        ),
        block_seconds=dict(blocks),
        num_unstable_turns=sum(
            any(result.tokens != results[0].tokens for result in results)
            for results in turns.values()
        ),
        outside=_outside(first),
        num_repeated_tokens=sum(repeated_tokens(result.tokens) for result in first),
        num_positions=max(result.num_prompt_tokens + len(result.tokens) for result in first),
    )


def _outside(results: Sequence[PromptResult]) -> tuple[Counters, int] | None:
    """Return what began outside repetition; None where an engine did not record its cycles."""
    total, num_target_passes = Counters(), 0
    for result in results:
        cycles, counters = result.stats.cycles, result.stats.trimmed
        if counters.num_drafts and not cycles:
            return None
        drafted = sum(num_draft_tokens for _, num_draft_tokens, _ in cycles)
        assert drafted == counters.num_draft_tokens, "the cycles are those of the trimmed counters"
        here, passes = outside_repetition(result.tokens, cycles)
        total, num_target_passes = total + here, num_target_passes + passes
    return total, num_target_passes


def ratio(numerator: int | float, denominator: int | float) -> float | None:
    """Return the quotient, or None where there is nothing to divide by."""
    return numerator / denominator if denominator > 0 else None


def interval(
    statistic: Callable[..., Values], columns: Sequence[Sequence[float]], resampling: Resampling
) -> Interval | None:
    """Return the 95 % interval of a statistic of whole prompts, or None for too few of them.

    `columns` are values by prompt; prompts are resampled whole, so that columns stay paired, with
    bias correction and acceleration (BCa; Efron 1987). The statistic takes the columns and `axis`.
    """
    if len(columns[0]) < FEWEST_PROMPTS:
        return None
    # A second of importing, which commands that only lay out tables (plan, --help) do not pay.
    from scipy.stats import DegenerateDataWarning, bootstrap

    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    with warnings.catch_warnings():
        # All prompts alike: no acceleration can be estimated, and the interval is one point.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        warnings.filterwarnings("ignore", "invalid value|divide by zero", RuntimeWarning)
        result = bootstrap(
            arrays,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=resampling.resamples,
            batch=max(1, 100_000 // len(arrays[0])),
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(resampling.seed),
        )
    bounds = result.confidence_interval.low, result.confidence_interval.high
    if not np.isfinite(bounds).all():
        tail = (1 - CONFIDENCE) / 2
        drawn = result.bootstrap_distribution
        # Prompts drawn without a single draft have no acceptance length.
        bounds = np.quantile(drawn[np.isfinite(drawn)], [tail, 1 - tail])
    return [float(bound) for bound in bounds]


def length_statistic(accepted: np.ndarray, drafts: np.ndarray, axis: int) -> Values:
    """Return the acceptance length of resampled prompts, all their drafts taken together."""
    return 1 + accepted.sum(axis) / drafts.sum(axis)


def speedup_statistic(
    tokens: np.ndarray,
    seconds: np.ndarray,
    plain_tokens: np.ndarray,
    plain_seconds: np.ndarray,
    axis: int,
) -> Values:
    """Return tokens per second over the plain loop's, of resampled prompts."""
    plain = plain_tokens.sum(axis) / plain_seconds.sum(axis)
    return tokens.sum(axis) / seconds.sum(axis) / plain


def _difference(
    tokens: np.ndarray,
    seconds: np.ndarray,
    other_tokens: np.ndarray,
    other_seconds: np.ndarray,
    plain_tokens: np.ndarray,
    plain_seconds: np.ndarray,
    axis: int,
) -> Values:
    mine = speedup_statistic(tokens, seconds, plain_tokens, plain_seconds, axis)
    return mine - speedup_statistic(other_tokens, other_seconds, plain_tokens, plain_seconds, axis)


def acceptance_length(prompts: Sequence[PromptTotals], resampling: Resampling) -> dict[str, Any]:
    """Return micro and macro acceptance length, and the interval of the micro one."""
    drafted = [prompt for prompt in prompts if prompt.trimmed.num_drafts]
    accepted = [float(prompt.trimmed.num_accepted_tokens) for prompt in drafted]
    drafts = [float(prompt.trimmed.num_drafts) for prompt in drafted]
    if not drafted:
        return {"micro": None, "macro": None, "ci95": None}
    lengths = [1 + a / d for a, d in zip(accepted, drafts, strict=True)]
    return {
        "micro": 1 + sum(accepted) / sum(drafts),
        "macro": statistics.fmean(lengths),
        "ci95": interval(length_statistic, [accepted, drafts], resampling),
    }


def speed(prompts: Sequence[PromptTotals]) -> float | None:
    """Return tokens per second: all tokens over all seconds."""
    return ratio(
        sum(prompt.num_output_tokens for prompt in prompts),
        sum(prompt.seconds.total for prompt in prompts),
    )


def _columns(prompts: Sequence[PromptTotals]) -> list[list[float]]:
    return [
        [float(prompt.num_output_tokens) for prompt in prompts],
        [prompt.seconds.total for prompt in prompts],
    ]


def _timed(prompts: Sequence[PromptTotals]) -> bool:
    return all(prompt.num_output_tokens and prompt.seconds.total > 0 for prompt in prompts)


def speedup(
    prompts: Sequence[PromptTotals], plain: Sequence[PromptTotals], resampling: Resampling
) -> dict[str, Any]:
    """Return how many times as fast as plain decoding: value, interval, and value by block."""
    fast, slow = speed(prompts), speed(plain)
    if not (fast and slow and _timed(prompts) and _timed(plain)):
        return {"value": None, "ci95": None, "blocks": [], "num_disturbed": 0}
    numbers = sorted({block for prompt in plain for block in prompt.block_seconds})
    return {
        "value": fast / slow,
        "ci95": interval(speedup_statistic, [*_columns(prompts), *_columns(plain)], resampling),
        "blocks": [
            ratio(_block_speed(prompts, block) or 0.0, _block_speed(plain, block) or 0.0)
            for block in numbers
        ],
        "num_disturbed": sum(
            mine.disturbed or theirs.disturbed for mine, theirs in zip(prompts, plain, strict=True)
        ),
    }


def _block_speed(prompts: Sequence[PromptTotals], block: int) -> float | None:
    timed = [prompt for prompt in prompts if block in prompt.block_seconds]
    return ratio(
        sum(prompt.num_output_tokens for prompt in timed),
        sum(prompt.block_seconds[block] for prompt in timed),
    )


def speedup_difference(
    prompts: Sequence[PromptTotals],
    others: Sequence[PromptTotals],
    plain: Sequence[PromptTotals],
    resampling: Resampling,
) -> dict[str, Any]:
    """Return speedup minus the other method's speedup, paired by prompt."""
    groups = (prompts, others, plain)
    speeds = [speed(group) for group in groups]
    if not all(speeds) or not all(_timed(group) for group in groups):
        return {"value": None, "ci95": None}
    mine, theirs, slow = (value for value in speeds if value)

    columns = [column for group in groups for column in _columns(group)]
    return {"value": (mine - theirs) / slow, "ci95": interval(_difference, columns, resampling)}
