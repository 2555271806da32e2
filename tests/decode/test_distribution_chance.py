"""Seeded chance is what the replay takes it for: uniform, independent over keys; and end to end.

Seeds are fixed, so nothing here is flaky; the p values that pass lie far from the bounds.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from distribution_support import Case, Distribution, Small, drafter_for, target_distribution
from scipy import stats

from drafttrain.core.chance import Purpose, SeededChance, draw_of
from drafttrain.decode import loop
from drafttrain.decode.loop import speculative_decode_batch

COUNT = 20_000


def uniforms(seed: int, rows: Sequence[int], starts: Sequence[int], draw: int) -> np.ndarray:
    return SeededChance(seed).uniforms(rows, starts, draw)


@pytest.mark.parametrize("axis", ["row", "start", "draw", "seed"])
def test_uniforms_along_every_part_of_the_key_are_uniform(axis: str) -> None:
    if axis == "row":
        values = uniforms(0, range(COUNT), [7] * COUNT, 4)
    elif axis == "start":
        values = uniforms(0, [7] * COUNT, range(COUNT), 4)
    else:
        few = range(COUNT // 10)
        values = np.array(
            [
                uniforms(i if axis == "seed" else 0, [7], [9], i if axis == "draw" else 4)[0]
                for i in few
            ]
        )
    assert stats.kstest(values, "uniform").pvalue > 0.01
    # Neighbouring keys: no correlation, in ranks.
    assert stats.spearmanr(values[:-1], values[1:]).pvalue > 0.01


def dependence(one: np.ndarray, other: np.ndarray) -> float:
    """The p value of independence: chi-square of a table of 8 by 8."""
    table = np.histogram2d(one, other, bins=8, range=((0, 1), (0, 1)))[0]
    return float(stats.chi2_contingency(table).pvalue)


def test_choices_of_one_cycle_and_of_neighbouring_keys_are_independent() -> None:
    rows, starts = [*range(100)] * 200, np.repeat(np.arange(1000, 1200), 100).tolist()
    accept, emit = draw_of(0, Purpose.ACCEPT), draw_of(0, Purpose.EMIT)
    one = uniforms(0, rows, starts, accept)
    others = {
        "the draft": uniforms(0, rows, starts, draw_of(0, Purpose.DRAFT)),
        "the bonus": uniforms(0, rows, starts, emit),
        "the next node": uniforms(0, rows, starts, draw_of(1, Purpose.ACCEPT)),
        "the next row": uniforms(0, [row + 1 for row in rows], starts, accept),
        "the next start": uniforms(0, rows, [start + 1 for start in starts], accept),
        "row and start exchanged": uniforms(0, starts, rows, accept),
        "the next seed": uniforms(1, rows, starts, accept),
    }
    for name, other in others.items():
        assert dependence(one, other) > 0.01, name
    assert dependence(one, one) < 1e-9
    assert dependence(one, (one + 0.02 * others["the bonus"]) % 1) < 1e-9


def test_answers_have_the_probabilities_that_were_asked_for() -> None:
    rows, starts = range(COUNT), [3] * COUNT
    distribution = torch.tensor([0.05, 0.0, 0.3, 0.25, 0.4], dtype=torch.float64)
    chosen = SeededChance(0).choose(distribution.expand(COUNT, 5), rows, starts, 2)
    counts = chosen.bincount(minlength=5).numpy()
    assert counts[1] == 0
    kept = [0, 2, 3, 4]
    assert stats.chisquare(counts[kept], COUNT * distribution.numpy()[kept]).pvalue > 0.01
    for p in (0.02, 0.5, 0.97):
        yes = SeededChance(0).accept(torch.full((COUNT,), p), rows, starts, 1).sum()
        assert stats.binomtest(int(yes), COUNT, p).pvalue > 0.01


# --- end to end: the loop with seeded chance, against the exact distribution ---


def emitted_by_seeded_chance(small: Small, name: str, case: Case, count: int) -> Counter[object]:
    """How often each output comes out of so many rows of one prompt."""
    decoded = speculative_decode_batch(
        small.target,
        drafter_for(name, small),
        case.prompts * count,
        policy=case.depth,
        sampling=case.sampling,
        max_new_tokens=case.limit,
        chance=SeededChance(0),
        rows=range(count),
    )
    return Counter((row.tokens,) for row in decoded)


def fit(counts: Counter[object], distribution: Distribution) -> float:
    """The p value of counts under a distribution; what is expected too rarely is one class."""
    total = counts.total()
    often = [key for key, p in distribution.items() if p * total >= 5]
    seen = [counts[key] for key in often]
    expected = [distribution[key] * total for key in often]
    rest = total - sum(expected)
    if rest >= 5:
        seen.append(total - sum(seen))
        expected.append(rest)
    else:
        expected = [value * sum(seen) / sum(expected) for value in expected]
    return float(stats.chisquare(seen, expected).pvalue)


@pytest.mark.parametrize("name", ["eagle3", "ngram"])
def test_the_seeded_loop_samples_the_exact_distribution(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, case = Small.make(tmp_path, 4), Case()
    distribution = target_distribution(small, case)
    sample = partial(emitted_by_seeded_chance, small, name, case, 6000)
    assert len(distribution) > 30
    assert fit(sample(), distribution) > 0.01
    monkeypatch.setattr(loop, "probabilities", lambda logits, sampling: (1.2 * logits).softmax(-1))
    assert fit(sample(), distribution) < 1e-6
