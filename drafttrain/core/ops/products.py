"""Products of bfloat16 matrices with results in float32.

Hardware sums a product of bfloat16 matrices in float32; `torch.mm` then rounds the sums to the 8
bits of bfloat16. For logits this is too coarse: a logit of 20 is rounded to the next sixteenth,
which is more than what separates a good drafter's distribution from its target's.
"""

import threading

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

    Not differentiable. values and weight have one dtype, or the weight is a float32 copy, which a
    caller makes who multiplies by it many times on a CPU. fused: whether the device can multiply
    bfloat16 into float32; None asks it.
    """
    wide = wide_dtype(values)
    if values.dtype == wide:
        product = values @ weight.T
    elif weight.dtype == wide:
        product = _rounded_inside(values.to(wide), weight)
    elif multiplies_into_float32(values.device.type) if fused is None else fused:
        product = torch.mm(values, weight.T, out_dtype=wide)
    else:
        rows = max(1, BLOCK_ELEMENTS // weight.shape[1])
        copied = values.to(wide)
        parts = [_rounded_inside(copied, part.to(wide)) for part in weight.split(rows)]
        product = torch.cat(parts, dim=1)
    return product if bias is None else product.add_(bias)


def _rounded_inside(values: Tensor, weight: Tensor) -> Tensor:
    """Return values @ weight.T; a CPU may round both to bfloat16, but not the sums.

    oneDNN takes a CPU's bfloat16 units for float32 matrices if its global setting says so; where a
    CPU has none, it multiplies in float32. The lock is for threads that train at the same time.
    """
    setting = torch.backends.mkldnn.matmul
    with _PRECISION_LOCK:
        before = setting.fp32_precision
        setting.fp32_precision = "bf16"
        try:
            return values @ weight.T
        finally:
            setting.fp32_precision = before
