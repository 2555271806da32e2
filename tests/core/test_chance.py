"""Random choices depend on their key alone, and never fall on what cannot happen."""

import numpy as np
import pytest
import torch

from drafttrain.core.chance import MANY_ROWS, SeededChance


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
def test_many_rows_get_the_uniforms_that_each_row_gets_alone(seed: int) -> None:
    chance = SeededChance(seed)
    rows = [*np.random.default_rng(0).integers(0, 2**62, 2 * MANY_ROWS).tolist(), -3, 2**64 - 1]
    starts = [index * 1_000_003 for index in range(len(rows))]
    alone = [chance.uniforms([row], [start], 5)[0] for row, start in zip(rows, starts, strict=True)]
    assert chance.uniforms(rows, starts, 5).tolist() == alone
    assert chance.uniforms(rows, starts, 6).tolist() != alone
    assert SeededChance(seed + 1).uniforms(rows, starts, 5).tolist() != alone


def test_uniforms_are_uniform() -> None:
    uniforms = SeededChance(0).uniforms(range(20_000), [3] * 20_000, 1)
    counts = np.histogram(uniforms, bins=20, range=(0, 1))[0]
    assert counts.sum() == 20_000
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, 0.1 %


def test_an_id_without_mass_is_never_chosen() -> None:
    class Last(SeededChance):
        def uniforms(self, rows, starts, draw):  # type: ignore[no-untyped-def]
            return np.full(len(rows), np.nextafter(1, 0))

    probs = torch.tensor([[0.5, 0.5, 0.0], [1e-30, 0.0, 0.0], [0.0, 0.3, 0.7], [0.1, 0.2, 0.0]])
    assert Last(0).choose(probs, range(4), [0] * 4, 0).tolist() == [1, 0, 2, 1]
    smallest = torch.tensor([[5e-324, 0.0]], dtype=torch.float64)  # u * total rounds up to total
    assert Last(0).choose(smallest, [0], [0], 0).tolist() == [0]
    chosen = SeededChance(0).choose(probs[:1].expand(500, 3), range(500), [0] * 500, 0)
    assert chosen.bincount(minlength=3).tolist()[2] == 0
    assert 200 < int((chosen == 0).sum()) < 300
