"""Layers under autocast: the same dtypes whatever the lists of a device's autocast hold."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from drafttrain.core.ops.layers import Attention, LayerShape, RMSNorm, rms_norm, rotation
from drafttrain.core.ops.unrolled_attention import unrolled_attention

WIDTH, EPS = 32, 1e-6


@pytest.fixture
def as_on_cuda() -> Iterator[None]:
    """CPU autocast with CUDA's rule for norms: in float32 (aten/src/ATen/autocast_mode.h)."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")

    def wide(values: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        guard = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        )
        with guard:
            weight = None if weight is None else weight.float()
            return torch.rms_norm(values.float(), shape, weight, eps)

    library.impl("rms_norm", wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    library._destroy()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.mark.usefixtures("as_on_cuda")
def test_a_norm_keeps_the_dtype_of_its_input() -> None:
    values, weight = draw(2, 5, WIDTH).requires_grad_(), torch.ones(WIDTH, requires_grad=True)
    wide = torch.nn.functional.rms_norm(values, (WIDTH,), weight, EPS)
    assert wide.dtype == torch.float32, "the emulation must do what CUDA does"
    normed = rms_norm(values, weight, EPS)
    assert normed.dtype == values.dtype
    torch.testing.assert_close(normed, wide.to(normed.dtype), rtol=1e-2, atol=1e-2)
    normed.sum().backward()
    assert values.grad is not None
    assert weight.grad is not None


@pytest.mark.usefixtures("as_on_cuda")
def test_normed_queries_and_keys_meet_values_of_their_own_dtype() -> None:
    """The attention's kernels are called past autocast, which would bring them together."""
    shape = LayerShape(WIDTH, 2 * WIDTH, 4, 2, 8, EPS, 100.0, None, False, False, True)
    attention = Attention(shape, WIDTH)
    attention.requires_grad_(False)  # so that the norms take the way that they take on a GPU
    hidden = draw(2, 6, WIDTH).requires_grad_()
    turn = rotation(torch.arange(6)[None].expand(2, 6), 8, 100.0, hidden.dtype)
    queries, keys, values = attention.project(hidden, turn)
    assert queries.dtype == keys.dtype == values.dtype == torch.bfloat16
    unrolled_attention(queries, [(keys, values)], None).sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_training_on_a_cpu_has_the_same_dtype(dtype: torch.dtype) -> None:
    norm = RMSNorm(WIDTH, EPS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(draw(2, 5, WIDTH).to(dtype)).dtype == dtype
