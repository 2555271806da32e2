"""Noise is uniform, a conversation's own, and the same wherever it is computed."""

import pytest
import torch
from scipy import stats

from drafttrain.training.loop import uniforms

DOCUMENTS = torch.arange(64)[:, None].repeat(1, 128)


def test_numbers_are_uniform() -> None:
    drawn = uniforms(5, DOCUMENTS, 32)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    assert stats.kstest(drawn.flatten().numpy(), "uniform").pvalue > 0.001


@pytest.mark.parametrize("apart", ["conversation", "place", "channel", "seed", "all three"])
def test_no_number_tells_of_another(apart: str) -> None:
    drawn = uniforms(5, DOCUMENTS, 32) - 0.5
    one, other = {
        "conversation": (drawn[1:], drawn[:-1]),
        "place": (drawn[:, 1:], drawn[:, :-1]),
        "channel": (drawn[..., 1:], drawn[..., :-1]),
        "seed": (drawn, uniforms(6, DOCUMENTS, 32) - 0.5),
        "all three": (drawn[1:, 1:, 1:], drawn[:-1, :-1, :-1]),
    }[apart]
    correlation = float((one * other).mean()) * 12
    assert abs(correlation) * one.numel() ** 0.5 < 4  # standard deviations
    # Nor do the sums of two rows and two columns, as they would for keys that are merely added.
    square = drawn[1:, :, 1:] * drawn[:-1, :, 1:] * drawn[1:, :, :-1] * drawn[:-1, :, :-1]
    assert abs(float(square.mean())) * 144 * square.numel() ** 0.5 < 4


def test_numbers_stay_what_they_are() -> None:
    """A resumed run, on any device, draws those of the run that was interrupted."""
    document = torch.tensor([[3, 3, 8, -1], [900, 900, 900, 900]])
    drawn = uniforms(-7, document, 2)
    assert not drawn[0, 3].any()
    recorded = [
        [[15119885, 7715362], [1108637, 15905284], [14383335, 688439], [0, 0]],
        [[5195270, 4445297], [4204143, 7552469], [4153622, 10360372], [12246742, 154842]],
    ]
    assert (drawn.double() * 2**24).long().tolist() == recorded
