"""Acceptance where the text does not repeat itself, and beside prompt lookup, with intervals."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drafttrain.core.types import Counters
from drafttrain.report.statistics import PromptTotals, Resampling, Values, interval, ratio

NOT_COMPARED = {"value": None, "ci95": None}

Pairs = list[tuple[int, int]]  # by prompt: tokens accepted, and the drafts or passes they came in


def _length(accepted: np.ndarray, of: np.ndarray, axis: int) -> Values:
    # Resampled prompts may hold no draft at all, where every pass yields one token.
    return 1 + accepted.sum(axis) / np.maximum(of.sum(axis), 1)


def _length_difference(
    accepted: np.ndarray,
    of: np.ndarray,
    other_accepted: np.ndarray,
    other_of: np.ndarray,
    axis: int,
) -> Values:
    return _length(accepted, of, axis) - _length(other_accepted, other_of, axis)


def _columns(pairs: Sequence[tuple[int, int]]) -> list[list[float]]:
    return [[float(value) for value in column] for column in zip(*pairs, strict=True)]


def _outside(prompts: Sequence[PromptTotals]) -> list[tuple[Counters, int]] | None:
    """Return what began outside repetition by prompt; None where cycles were not recorded."""
    outside = [prompt.outside for prompt in prompts if prompt.outside is not None]
    return outside if len(outside) == len(prompts) else None


def outside_row(prompts: Sequence[PromptTotals], resampling: Resampling) -> dict[str, Any]:
    """Return the counters, acceptance length with its interval, and rate outside repetition."""
    outside = _outside(prompts)
    if outside is None:
        keys = ("num_target_passes", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
        more = ("acceptance_length", "ci95", "acceptance_rate", "share_of_drafts")
        return dict.fromkeys((*keys, *more))
    total = sum((counters for counters, _ in outside), Counters())
    drafted = [
        (counters.num_accepted_tokens, counters.num_drafts)
        for counters, _ in outside
        if counters.num_drafts
    ]
    rate = ratio(total.num_accepted_tokens, total.num_drafts)
    return {
        "num_target_passes": sum(passes for _, passes in outside),
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "acceptance_length": None if rate is None else 1 + rate,
        "ci95": interval(_length, _columns(drafted), resampling) if drafted else None,
        "acceptance_rate": ratio(total.num_accepted_tokens, total.num_draft_tokens),
        "share_of_drafts": ratio(
            total.num_drafts, sum(prompt.trimmed.num_drafts for prompt in prompts)
        ),
    }


def length_difference(
    mine: Pairs | None, theirs: Pairs | None, resampling: Resampling
) -> dict[str, Any]:
    """Return 1 + accepted / drafts (or passes) minus the other method's, paired by prompt.

    A method that made no draft has length 1. None where neither did, or one was not recorded.
    """
    if mine is None or theirs is None:
        return dict(NOT_COMPARED)
    pairs = [pair for pair in zip(mine, theirs, strict=True) if pair[0][1] or pair[1][1]]
    if not pairs:
        return dict(NOT_COMPARED)
    columns = [column for side in zip(*pairs, strict=True) for column in _columns(side)]
    accepted, of, other_accepted, other_of = map(np.asarray, columns)
    value = _length_difference(accepted, of, other_accepted, other_of, axis=-1)
    return {"value": float(value), "ci95": interval(_length_difference, columns, resampling)}


def differences(
    prompts: Sequence[PromptTotals],
    others: Sequence[PromptTotals] | None,
    resampling: Resampling,
) -> dict[str, dict[str, Any]]:
    """Return acceptance length and tokens per pass, less those of another method.

    Each in all text and outside repetition; None where there is no other method.
    """

    def per_draft(side: Sequence[PromptTotals]) -> Pairs:
        return [(p.trimmed.num_accepted_tokens, p.trimmed.num_drafts) for p in side]

    def per_pass(side: Sequence[PromptTotals]) -> Pairs:
        return [(p.trimmed.num_accepted_tokens, p.num_target_passes) for p in side]

    def per_draft_outside(side: Sequence[PromptTotals]) -> Pairs | None:
        outside = _outside(side)
        if outside is None:
            return None
        return [(counters.num_accepted_tokens, counters.num_drafts) for counters, _ in outside]

    def per_pass_outside(side: Sequence[PromptTotals]) -> Pairs | None:
        outside = _outside(side)
        if outside is None:
            return None
        return [(counters.num_accepted_tokens, passes) for counters, passes in outside]

    def compared(count: Callable[[Sequence[PromptTotals]], Pairs | None]) -> dict[str, Any]:
        if others is None:
            return dict(NOT_COMPARED)
        return length_difference(count(prompts), count(others), resampling)

    return {
        "acceptance_length_difference_to_ngram": {
            "all_text": compared(per_draft),
            "outside_repetition": compared(per_draft_outside),
        },
        "tokens_per_pass_difference_to_ngram": {
            "all_text": compared(per_pass),
            "outside_repetition": compared(per_pass_outside),
        },
    }
