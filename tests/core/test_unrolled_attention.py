"""Attention over branches by kernels against one softmax over all scores."""

import pytest
import torch
from plain_training import attention

from drafttrain.core.ops.layers import MLP, RMSNorm, document_mask, rotate, rotation
from drafttrain.core.ops.unrolled_attention import unrolled_attention


def heads(depths: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [4, *[kv_heads] * (2 * depths)]
    # Strided as a layer's heads are: the heads of a position beside each other.
    drawn = [torch.randn(2, 11, heads, 8, dtype=dtype).transpose(1, 2) for heads in shapes]
    return [tensor.requires_grad_() for tensor in drawn]


def past(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[1::2], tensors[2::2], strict=True))


PACKED = torch.tensor([[0] * 4 + [1] * 7, [2] * 5 + [3] * 3 + [-1] * 3])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("depths", [1, 2, 7])
def test_branches_are_attended_as_by_one_softmax(depths: int, kv_heads: int, packed: bool) -> None:
    tensors = heads(depths, kv_heads)
    mask = document_mask(PACKED) if packed else None
    expected = attention(tensors[0], past(tensors), mask)
    found = unrolled_attention(tensors[0], past(tensors), mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_branches_of_some_positions_see_the_keys_up_to_theirs() -> None:
    """Fewer queries than keys: chains that follow positions 2, 7 and 4, on slices of the heads."""
    drawn, after = heads(3, 2), torch.tensor([2, 7, 4])
    tensors = [tensor if i in (1, 2) else tensor[:, :, 1:4] for i, tensor in enumerate(drawn)]
    mask = (torch.arange(11) <= after[:, None]).expand(2, 1, -1, -1)
    found = unrolled_attention(tensors[0], past(tensors), mask)
    expected = torch.zeros_like(found)
    for chain, position in enumerate(after.tolist()):
        for head in range(4):
            rows = [part[:, head // 2, : position + 1] for part in tensors[1:3]]
            own = [part[:, head // 2, chain, None] for part in tensors[3:]]
            keys = torch.cat([rows[0], *own[0::2]], dim=1)
            values = torch.cat([rows[1], *own[1::2]], dim=1)
            scores = (keys @ tensors[0][:, head, chain, :, None] / 8**0.5).softmax(1)
            expected[:, head, chain] = (scores * values).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(found)
    one, other = (torch.autograd.grad((each * weight).sum(), drawn) for each in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_the_gradient_is_that_of_the_value() -> None:
    tensors = [tensor[:1, :, :5].detach().requires_grad_() for tensor in heads(3, 2)]
    assert torch.autograd.gradcheck(
        lambda *given: unrolled_attention(given[0], past(list(given)), None), tensors
    )


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_in_less_precision_it_is_as_near_to_the_truth(dtype: torch.dtype, near: float) -> None:
    tensors = heads(4, 2, dtype)
    found = unrolled_attention(tensors[0], past(tensors), None)
    assert found.dtype == dtype
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = attention(wide[0], past(wide), None)
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)
    grads = torch.autograd.grad(found.square().sum(), tensors)
    truths = torch.autograd.grad(expected.square().sum(), wide)
    for one, other in zip(grads, truths, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4 * near, atol=4 * near)


def test_no_scores_of_all_pairs_are_made() -> None:
    from test_chunked_losses import _Largest

    torch.manual_seed(0)
    shape = (1, 2, 300, 8)
    tensors = [torch.randn(shape).requires_grad_() for _ in range(7)]
    with _Largest() as seen:
        unrolled_attention(tensors[0], past(tensors), None).sum().backward()
    assert seen.elements < 300 * 300, seen.elements


def test_rotation_and_gate_have_the_gradient_of_their_values() -> None:
    torch.manual_seed(0)
    given = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    turn = rotation(torch.arange(3)[None] + 5, 8, 100.0, torch.float64)
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, turn), given)
    first, second = given.detach().chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    defined = given.detach() * turn.cos[:, None] + swapped * turn.sin[:, None]
    torch.testing.assert_close(rotate(given, turn), defined)
    mlp = MLP(8, 12).double()
    assert torch.autograd.gradcheck(mlp, given)
    with torch.no_grad():
        plain = mlp(given)
    torch.testing.assert_close(mlp(given), plain)


def test_norm_has_the_value_and_gradient_of_its_definition() -> None:
    torch.manual_seed(0)
    given = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(8, 1e-2).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
        by_torch = norm(given)
    defined = given * (given.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * norm.weight
    torch.testing.assert_close(norm(given), defined)
    torch.testing.assert_close(by_torch, defined)
    weight = norm.weight
    assert torch.autograd.gradcheck(lambda values, _: norm(values), (given, weight))
    (alone,) = torch.autograd.grad(norm(given.detach()).sum(), weight)  # of what has no gradient
    torch.testing.assert_close(alone, torch.autograd.grad(defined.sum(), weight)[0])


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_norm_in_less_precision_is_as_near_to_the_truth(dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(0)
    given = torch.randn(50, 64, dtype=dtype, requires_grad=True)
    norm, wide = RMSNorm(64, 1e-5), RMSNorm(64, 1e-5).double()
    truth = given.detach().double().requires_grad_()
    found, expected = norm(given), wide(truth)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)
    grad = torch.randn_like(found)
    (d_truth,) = torch.autograd.grad(expected, truth, grad.double())
    (d_found,) = torch.autograd.grad(found, given, grad)
    assert d_found.dtype == dtype
    torch.testing.assert_close(d_found.double(), d_truth, rtol=4 * near, atol=4 * near)
