"""Products of bfloat16 matrices with results in float32.

Hardware sums a product of bfloat16 matrices in float32; `torch.mm` then rounds the sums to the 8
bits of bfloat16. For logits this is too coarse: a logit of 20 is rounded to the next sixteenth,
which is more than what separates a good drafter's distribution from its target's.
"""

import threading
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from drafttrain.core.ops.layer_calls import wide_dtype

BLOCK_ELEMENTS = 1 << 22  # of a weight, copied to float32 at a time
_PRECISION_LOCK = threading.Lock()


def multiplies_into_float32(device_type: str) -> bool:
    """Whether the device has a product of bfloat16 matrices that returns float32."""
    return device_type == "cuda" and torch.version.hip is None


def wide_linear(
    values: Float[Tensor, "row width"],
    weight: Float[Tensor, "column width"],
    bias: Float[Tensor, " column"] | None = None,
    fused: bool | None = None,
) -> Float[Tensor, "row column"]:
    """Return values @ weight.T + bias, in float32 or in the dtype of the inputs if that is wider.

    values and weight have one dtype, or the weight is a float32 copy, which a caller makes who
    multiplies by it many times on a CPU. fused: whether the device can multiply bfloat16 into
    float32; None asks it.
    """
    product = _WideProduct.apply(values, weight, fused)
    return product if bias is None else product + bias


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, fused: bool | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        wide, device = wide_dtype(values), values.device.type
        with torch.autocast(device, enabled=False):
            if values.dtype == wide:
                return values @ weight.T
            if weight.dtype == wide:
                return _rounded_inside(values.to(wide), weight)
            if multiplies_into_float32(device) if fused is None else fused:
                return torch.mm(values, weight.T, out_dtype=wide)
            rows, copied = max(1, BLOCK_ELEMENTS // weight.shape[1]), values.to(wide)
            parts = [_rounded_inside(copied, part.to(wide)) for part in weight.split(rows)]
            return torch.cat(parts, dim=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        values, weight = ctx.saved_tensors
        grad = grad.to(values.dtype)
        of_weight = (grad.T @ values).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad @ weight.to(values.dtype), of_weight, None


def _rounded_inside(values: Tensor, weight: Tensor) -> Tensor:
    """Return values @ weight.T; a CPU may round both to bfloat16, but not the sums.

    oneDNN takes a CPU's bfloat16 units for float32 matrices if its global setting says so; where a
    CPU has none, it multiplies in float32. The lock is for threads that train at the same time.
    """
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _PRECISION_LOCK:
        before = setting.fp32_precision
        setting.fp32_precision = "bf16"
        try:
            return values @ weight.T
        finally:
            setting.fp32_precision = before
