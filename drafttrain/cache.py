"""The drafter's own key-value cache: preallocated, appended to, rolled back by position."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class KeyValues:
    """Keys and values of one attention layer; positions from `length` on are free."""

    keys: Float[Tensor, "batch kv_head capacity head_dim"]
    values: Float[Tensor, "batch kv_head capacity head_dim"]
    length: int = 0

    @classmethod
    def empty(
        cls,
        rows: int,
        num_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KeyValues":
        """Allocate room for `capacity` positions."""
        shape = (rows, num_heads, capacity, head_dim)
        return cls(
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device),
        )

    def append(
        self,
        keys: Float[Tensor, "batch kv_head new head_dim"],
        values: Float[Tensor, "batch kv_head new head_dim"],
    ) -> tuple[
        Float[Tensor, "batch kv_head total head_dim"], Float[Tensor, "batch kv_head total head_dim"]
    ]:
        """Write the new positions and return views of everything up to and with them."""
        stop = self.length + keys.shape[2]
        assert stop <= self.keys.shape[2], f"cache of {self.keys.shape[2]} positions needs {stop}"
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def rollback(self, length: int) -> None:
        """Forget everything from position `length` on."""
        assert 0 <= length <= self.length, f"cannot roll back from {self.length} to {length}"
        self.length = length
