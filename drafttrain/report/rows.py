"""The rows of a report: one method on one task, or on all of them, as plain numbers."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from drafttrain.core.types import Counters
from drafttrain.report.lengths import differences, outside_row
from drafttrain.report.statistics import (
    PromptTotals,
    Resampling,
    acceptance_length,
    ratio,
    speed,
    speedup,
)

Row = dict[str, Any]


def plain_row(prompts: Sequence[PromptTotals]) -> Row:
    """Return what is known of plain decoding: its speed, its step, its repetition."""
    return {
        **_sizes(prompts),
        "tokens_per_second": {"autoregressive": speed(prompts)},
        "time_ms": _times(prompts),
        "repetition_rate": _repetition(prompts),
    }


def method_row(
    prompts: Sequence[PromptTotals],
    plain: Sequence[PromptTotals],
    depth: int,
    resampling: Resampling,
    ngram: Sequence[PromptTotals] | None,
) -> Row:
    """Return every number of a drafting method beside plain decoding of the same prompts.

    ngram: prompt lookup on the same prompts; None where it is the method itself, or not there.
    Rates per position have `depth` entries. What has nothing to be computed from is None.
    """
    counters = sum((prompt.trimmed for prompt in prompts), Counters())
    untrimmed = sum((prompt.untrimmed for prompt in prompts), Counters())
    per_position = _pad(counters.num_accepted_tokens_per_position, depth)
    outputs = [
        (mine, theirs)
        for prompt, other in zip(prompts, plain, strict=True)
        for mine, theirs in zip(prompt.outputs, other.outputs, strict=True)
    ]
    times, plain_times = _times(prompts), _times(plain)
    return {
        **_sizes(prompts),
        "num_drafts": counters.num_drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "acceptance_length": acceptance_length(prompts, resampling),
        "acceptance_rate": ratio(counters.num_accepted_tokens, counters.num_draft_tokens),
        "acceptance_per_position": [
            ratio(accepted, counters.num_drafts) for accepted in per_position
        ],
        "conditional_acceptance": [
            ratio(accepted, before)
            for accepted, before in zip(
                per_position, [counters.num_drafts, *per_position], strict=False
            )
        ],
        "tokens_per_second": {"autoregressive": speed(plain), "speculative": speed(prompts)},
        "speedup": speedup(prompts, plain, resampling),
        "predicted_speedup": _predicted(prompts, counters, times, plain_times),
        "time_ms": times,
        "repetition_rate": _repetition(prompts),
        "outside_repetition": outside_row(prompts, resampling),
        **differences(prompts, ngram, resampling),
        "outputs_differing": {
            "num": sum(mine != theirs for mine, theirs in outputs),
            "of": len(outputs),
        },
        "untrimmed": {
            "num_drafts": untrimmed.num_drafts,
            "num_draft_tokens": untrimmed.num_draft_tokens,
            "num_accepted_tokens": untrimmed.num_accepted_tokens,
            "num_accepted_tokens_per_position": _pad(
                untrimmed.num_accepted_tokens_per_position, depth
            ),
            "acceptance_length": _length(untrimmed),
        },
    }


def _sizes(prompts: Sequence[PromptTotals]) -> Row:
    return {
        "num_prompts": len(prompts),
        "num_turns": sum(len(prompt.outputs) for prompt in prompts),
        "num_output_tokens": sum(prompt.num_output_tokens for prompt in prompts),
        "num_target_passes": sum(prompt.num_target_passes for prompt in prompts),
    }


def _pad(counts: list[int], depth: int) -> list[int]:
    return [count for count, _ in zip_longest(counts, range(depth), fillvalue=0)]


def _length(counters: Counters) -> float | None:
    rate = ratio(counters.num_accepted_tokens, counters.num_drafts)
    return None if rate is None else 1 + rate


def _times(prompts: Sequence[PromptTotals]) -> dict[str, float | None]:
    passes = sum(prompt.num_target_passes for prompt in prompts)
    turns = sum(len(prompt.outputs) for prompt in prompts)
    per_pass = {
        part: ratio(1000 * sum(getattr(prompt.seconds, part) for prompt in prompts), passes)
        for part in ("draft", "verify", "other")
    }
    prefill = ratio(1000 * sum(prompt.seconds.prefill for prompt in prompts), turns)
    return {**per_pass, "prefill": prefill}


def _repetition(prompts: Sequence[PromptTotals]) -> float | None:
    repeated = sum(prompt.num_repeated_tokens for prompt in prompts)
    return ratio(repeated, sum(prompt.num_output_tokens for prompt in prompts))


def _predicted(
    prompts: Sequence[PromptTotals],
    counters: Counters,
    times: dict[str, float | None],
    plain_times: dict[str, float | None],
) -> float | None:
    passes = sum(prompt.num_target_passes for prompt in prompts)
    draft, verify, step = times["draft"], times["verify"], plain_times["verify"]
    if draft is None or verify is None or step is None or draft + verify <= 0:
        return None
    # 1 + accepted / passes is the acceptance length where every pass had a draft, as it should.
    return (1 + counters.num_accepted_tokens / passes) * step / (draft + verify)
