"""In bfloat16 training no rounding of logits reaches a loss: against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.losses import TokenLossConfig
from drafttrain.core.ops.chunked_losses import OutputHead, TargetProbs, chunked_losses
from drafttrain.core.ops.products import wide_linear
from drafttrain.core.readout import Readout
from drafttrain.drafters.dspark import ConfidenceHead

VOCAB, WIDTH, POSITIONS = 32768, 512, 32
EVERY = torch.arange(POSITIONS)


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """A head, the target's states, and a drafter's close to them, in numbers of bfloat16."""
    torch.manual_seed(0)
    final = torch.randn(POSITIONS, WIDTH)
    states = final + 0.02 * torch.randn(POSITIONS, WIDTH)
    head = 3 * torch.randn(VOCAB, WIDTH) / WIDTH**0.5
    return head.bfloat16(), final.bfloat16(), states.bfloat16()


def losses(
    loss: str, dtype: torch.dtype, inputs: tuple[Tensor, Tensor, Tensor], **head: Any
) -> tuple[Tensor, list[Tensor]]:
    """The losses' sum, and the gradients of the states and of the drafter's own head and bias."""
    config = TokenLossConfig(losses={loss: 1.0}, jsd_beta=0.5, lk_eta=3.0, top_k=10)
    half = dtype == torch.bfloat16
    table, final, states = (tensor.to(dtype) for tensor in inputs)
    own = inputs[0].to(torch.float32 if half else dtype).requires_grad_()
    bias = torch.linspace(-1, 1, VOCAB, dtype=own.dtype).requires_grad_()
    states = states.to(own.dtype).requires_grad_()
    readout = Readout(table, table, None, bias.detach(), 1.0, *head.values())
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        sums, *_ = chunked_losses(
            config, [1.0], [replace(OutputHead.of(readout), weight=own, bias=bias)], [states],
            EVERY[None], torch.zeros_like(EVERY), TargetProbs(readout, final, EVERY, None),
        )  # fmt: skip
    sums.sum().backward()
    grads = [tensor.grad for tensor in (states, own, bias)]
    return sums.detach().sum(), [g.double() for g in grads if g is not None]


@pytest.mark.parametrize("head", [{}, {"logit_scale": 0.75, "soft_cap": 30.0}], ids=["", "capped"])
@pytest.mark.parametrize("loss", ["forward_kl", "total_variation"])
def test_gradients_of_bfloat16_training_are_within_a_hundredth_of_float64(
    loss: str, head: dict[str, float], inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    # The bias is no number of bfloat16: it is not rounded either.
    exact, expected = losses(loss, torch.float64, inputs, **head)
    found, gradients = losses(loss, torch.bfloat16, inputs, **head)
    assert float(exact) / POSITIONS < 0.03, "drafter and target agree on almost everything"
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0.0)
    assert len(gradients) == 3
    for gradient, right in zip(gradients, expected, strict=True):
        assert float((gradient - right).norm() / right.norm()) < 1e-2


def test_a_readouts_logits_for_a_loss_are_not_rounded(
    inputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    head, final, _ = inputs
    readout = Readout(head, head, None, torch.linspace(-1, 1, VOCAB), soft_cap=30.0)
    exact = replace(readout.to(torch.float64), head_bias=torch.linspace(-1, 1, VOCAB).double())
    expected = exact.logits(final.double())
    tokens = torch.randint(VOCAB, (POSITIONS, 5))
    states = final.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = readout.float32_logits(states)
        some = readout.logits_of(tokens, states.to(head.dtype))
    assert found.dtype == some.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(some.double(), expected.gather(1, tokens), rtol=1e-5, atol=1e-5)
    slope = torch.randn(POSITIONS, VOCAB)
    (found * slope).sum().backward()
    assert states.grad is not None
    curve = 1 - (expected / 30).square()
    right = (slope * curve) @ head.double()
    assert float((states.grad - right).norm() / right.norm()) < 1e-2


def test_a_float32_product_has_the_gradient_of_a_plain_one() -> None:
    values, weight = torch.randn(4, 3).double(), torch.randn(5, 3).double()
    tensors = [values.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(lambda v, w: wide_linear(v, w), tensors)


def test_a_product_leaves_the_precision_of_others_as_it_was() -> None:
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    values, weight = torch.randn(8, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    found = wide_linear(values, weight)
    assert setting.fp32_precision == before
    torch.testing.assert_close(found, values.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


def test_a_confidence_is_not_rounded_before_its_loss() -> None:
    torch.manual_seed(0)
    head = ConfidenceHead(64)
    states, embedded = torch.randn(9, 48).bfloat16(), torch.randn(9, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = head(states, embedded)
    read = torch.cat([states, embedded], dim=-1).double()
    expected = read @ head.proj.weight[0].double() + head.proj.bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_a_head_are_copied_once_and_again_when_it_changes() -> None:
    head, bias = torch.randn(9, 4), torch.randn(9)
    readout = Readout(torch.randn(9, 4), head, head_bias=bias, logit_scale=2.0, soft_cap=3.0)
    ids, hidden = torch.tensor([1, 4, 8]), torch.randn(2, 5, 4)
    rows = readout.with_rows(ids)
    torch.testing.assert_close(rows.logits(hidden), readout.logits(hidden)[..., ids])
    assert readout.with_rows(ids) is rows
    other = readout.with_rows(torch.tensor([0, 4, 8]))
    torch.testing.assert_close(other.logits(hidden), readout.logits(hidden)[..., [0, 4, 8]])
    head.mul_(2)
    changed = readout.with_rows(ids).logits(hidden)
    torch.testing.assert_close(changed, readout.logits(hidden)[..., ids])
    assert not torch.equal(changed, rows.logits(hidden))
    head.mul_(2)
    with torch.inference_mode():
        readout.with_rows(ids)
    readout.with_rows(ids).logits(
        hidden.requires_grad_()
    ).sum().backward()  # validated, then trained
    assert hidden.grad is not None
