"""Probabilities after temperature, top-k and top-p are what the definitions say, ties included."""

import pytest
import torch
from torch import Tensor

from drafttrain.core.sampling import most_likely, probabilities
from drafttrain.core.sampling_config import Sampling


def nucleus_by_definition(probs: Tensor, top_p: float) -> Tensor:
    """Walk the ids, likeliest first and lower before higher, until the mass is reached."""
    kept = torch.zeros_like(probs)
    ordered, order = probs.sort(stable=True, descending=True)
    before = ordered.cumsum(-1) - ordered
    for value, index, mass in zip(ordered, order, before, strict=True):
        if mass < top_p:
            kept[index] = value
    return kept / kept.sum()


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.usefixtures("seeded")
def test_top_p_keeps_the_likeliest_ids_and_of_tied_ones_the_lowest(
    dtype: torch.dtype, top_p: float
) -> None:
    rounded = (torch.randn(4, 200) * 2).round()  # nothing but ties
    for logits in (rounded.to(dtype), (torch.randn(4, 200) * 3).to(dtype), torch.zeros(1, 7)):
        probs = probabilities(logits, Sampling(0.8, 0, 1.0))
        expected = torch.stack([nucleus_by_definition(row, top_p) for row in probs])
        assert torch.equal(probabilities(logits, Sampling(0.8, 0, top_p)), expected)
    exactly = probabilities(torch.zeros(1, 4), Sampling(1.0, 0, 0.5))
    assert exactly.tolist() == [[0.5, 0.5, 0.0, 0.0]]


@pytest.mark.usefixtures("seeded")
def test_top_k_keeps_exactly_k_and_comes_before_top_p() -> None:
    logits = torch.randn(2, 3, 50).round()
    probs = probabilities(logits, Sampling(1.0, 5, 1.0))
    assert (probs > 0).sum(-1).eq(5).all()
    both = probabilities(logits, Sampling(1.0, 5, 0.5))
    again = [nucleus_by_definition(row, 0.5) for row in probs.reshape(-1, 50)]
    assert torch.equal(both.reshape(-1, 50), torch.stack(again))


def test_temperature_zero_is_the_first_of_the_largest() -> None:
    probs = probabilities(torch.tensor([[1.0, 3.0, 3.0]]), Sampling(0.0, 0, 0.5))
    assert probs.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.usefixtures("seeded")
def test_the_most_likely_token_is_the_one_of_argmax(dtype: torch.dtype) -> None:
    """Also among equals, at the ends of a row, beside NaN and where every logit is -inf."""
    logits = torch.randn(64, 5, 999).mul(3).round().to(dtype)  # nothing but ties
    logits[0, 0, 17] = torch.nan
    logits[1, 1] = -torch.inf
    logits[2, 2, -1], logits[3, 3, 0] = 99, 99
    assert torch.equal(most_likely(logits), logits.argmax(-1))
    assert torch.equal(most_likely(logits.transpose(1, 2)), logits.transpose(1, 2).argmax(-1))
