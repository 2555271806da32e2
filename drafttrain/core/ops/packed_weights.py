"""Products with frozen bfloat16 weights on a CPU, which oneDNN reads in an order of its own.

`functional.linear` brings a weight into that order at every call. For the few tokens of a decoding
pass this takes longer than the product: a 1536 x 576 matrix times 5 rows takes 0.18 ms on one core
with AMX, and 0.11 ms with a copy of the weight that was reordered before. The results are equal in
every bit.
"""

from math import inf

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by the reordered copy of its weight."""

    def forward(self, values: Tensor) -> Tensor:
        return packed_linear(values, self.weight, self.bias)


def packed_linear(
    values: Float[Tensor, "*shape width"],
    weight: Float[Tensor, "column width"],
    bias: Float[Tensor, " column"] | None = None,
) -> Float[Tensor, "*shape column"]:
    """Return functional.linear(values, weight, bias), by the weight's reordered copy if it has one.

    The copy has no gradient, and is not used after the weight was changed in place.
    """
    version, packed = getattr(weight, "packed", (None, None))
    if packed is None or (values.requires_grad and torch.is_grad_enabled()):
        return functional.linear(values, weight, bias)
    if version != weight._version or weight.dtype != torch.bfloat16 or values.dtype != weight.dtype:
        return functional.linear(values, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(values, packed, bias, "none", [], "")


def pack(model: nn.Module, *tables: Tensor, spare: float = inf) -> bool:
    """Reorder the weights of a frozen model's linear layers, and `tables`; return whether it did.

    Only on a CPU that multiplies bfloat16 itself, and where the copies take at most `spare` bytes.
    """
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # Quantised weights are tensors of classes of their own, and have their own products.
    linears = [linear for linear in found if type(linear.weight) is nn.Parameter]
    weights = {table.data_ptr(): table for table in tables}
    for linear in linears:  # not once more where its weight is one of the tables
        weights.setdefault(linear.weight.data_ptr(), linear.weight)
    able = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    able = able and sum(weight.nbytes for weight in weights.values()) <= spare
    if not able or any(
        weight.device.type != "cpu" or weight.dtype != torch.bfloat16 for weight in weights.values()
    ):
        return False
    for weight in weights.values():
        reorder(weight)
    for linear in linears:
        if type(linear) is nn.Linear:  # in place: other modules refer to these layers
            linear.__class__ = PackedLinear
    return True


def reorder(weight: Float[Tensor, "column width"]) -> None:
    """Keep a reordered copy of a weight with it, which `packed_linear` finds there.

    The weight is in bfloat16, on a CPU that multiplies bfloat16 itself; see `pack`.
    """
    copy = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    vars(weight)["packed"] = weight._version, copy
