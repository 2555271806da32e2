"""Reordered copies of bfloat16 weights give what the weights themselves give, in every bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drafttrain.core.ops.layers import LentLinear
from drafttrain.core.ops.packed_weights import PackedLinear, pack, packed_linear

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU multiplies no bfloat16"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(48, 80)
        self.lent = LentLinear(80, 48, bias=False)
        self.head = nn.Linear(48, 200, bias=False)

    def forward(self, values: Any) -> Any:
        return self.head(self.lent(self.plain(values)))


def block() -> Block:
    torch.manual_seed(0)
    return Block().to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
def test_a_packed_model_gives_the_same_bits(rows: int) -> None:
    model, values = block(), torch.randn(2, rows, 48).to(torch.bfloat16)
    expected, head = model(values), model.head.weight.detach()
    assert pack(model, head)
    assert [type(model.plain), type(model.lent)] == [PackedLinear, LentLinear]
    assert torch.equal(model(values), expected)
    # One copy for a head and the layer that has the same weight.
    assert [hasattr(weight, "packed") for weight in (head, model.head.weight)] == [True, False]
    hidden = model.lent(model.plain(values))
    assert torch.equal(packed_linear(hidden, head), functional.linear(hidden, head))


def test_a_weight_that_changed_is_read_itself() -> None:
    model = block()
    assert pack(model)
    values = torch.randn(3, 48).to(torch.bfloat16)
    model.plain.weight.mul_(2)
    plain = model.plain
    assert torch.equal(plain(values), functional.linear(values, plain.weight, plain.bias))


def test_a_dtype_that_changed_is_read_itself() -> None:
    model = block()
    assert pack(model)
    model.to(torch.float32)
    values = torch.randn(3, 48)
    plain = model.plain
    assert torch.equal(plain(values), functional.linear(values, plain.weight, plain.bias))


def test_a_gradient_passes_through_a_packed_weight() -> None:
    model = block()
    pack(model)
    values = torch.randn(3, 48).to(torch.bfloat16).requires_grad_()
    model(values).sum().backward()
    assert values.grad is not None
    assert values.grad.abs().sum() > 0


@pytest.mark.parametrize("why", ["float32", "no memory"])
def test_what_would_gain_nothing_stays_as_it_is(why: str) -> None:
    model = block() if why == "no memory" else block().to(torch.float32)
    before = copy.deepcopy(model.state_dict())
    assert not pack(model, spare=100.0)
    assert type(model.plain) is nn.Linear
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_a_weight_of_another_class_keeps_its_own_product() -> None:
    class Quantised(nn.Parameter):
        pass

    model = block()
    model.plain.weight = Quantised(model.plain.weight.data, requires_grad=False)
    assert pack(model)
    assert type(model.plain) is nn.Linear
    assert not hasattr(model.plain.weight, "packed")
