"""The drafter's own key-value cache: preallocated, appended to, rolled back row by row."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass
class KeyValues:
    """Keys and values of one attention layer; positions of row r from lengths[r] on are free."""

    keys: Float[Tensor, "batch kv_head capacity head_dim"]
    values: Float[Tensor, "batch kv_head capacity head_dim"]
    lengths: list[int] = field(default_factory=list)

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
        """Allocate room for `capacity` positions in each row."""
        shape = (rows, num_heads, capacity, head_dim)
        # Zeros: what is garbage in one row is multiplied by a weight of zero, which NaN survives.
        return cls(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
            [0] * rows,
        )

    @property
    def even(self) -> bool:
        """Whether all rows are equally long."""
        return self.lengths.count(self.lengths[0]) == len(self.lengths)

    def places(self, new: int) -> Int[Tensor, "batch new"]:
        """Return the positions of the next `new` tokens of each row."""
        starts = torch.tensor(self.lengths, device=self.keys.device)
        return starts[:, None] + torch.arange(new, device=self.keys.device)

    def append(
        self,
        keys: Float[Tensor, "batch kv_head new head_dim"],
        values: Float[Tensor, "batch kv_head new head_dim"],
    ) -> tuple[
        Float[Tensor, "batch kv_head total head_dim"], Float[Tensor, "batch kv_head total head_dim"]
    ]:
        """Write the new positions of every row; return views of everything up to the longest."""
        new, past = keys.shape[2], max(self.lengths)
        stop = past + new
        assert stop <= self.keys.shape[2], f"cache of {self.keys.shape[2]} positions needs {stop}"
        if self.even:
            self.keys[:, :, past:stop] = keys
            self.values[:, :, past:stop] = values
        else:
            places = self.places(new)
            rows = torch.arange(len(places), device=places.device)[:, None].expand_as(places)
            self.keys[rows, :, places] = keys.transpose(1, 2)
            self.values[rows, :, places] = values.transpose(1, 2)
        self.lengths = [length + new for length in self.lengths]
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def visible(self, new: int) -> Bool[Tensor, "batch 1 new total"] | None:
        """Return what each of `new` tokens about to be appended sees; None where it is causal."""
        past = max(self.lengths)
        if self.even and (past == 0 or new == 1):
            return None
        if self.even:
            ones = torch.ones(new, past + new, dtype=torch.bool, device=self.keys.device)
            return ones.tril_(past)[None, None]
        queries = self.places(new)[:, None, :, None]
        return torch.arange(past + new, device=self.keys.device) <= queries

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget what stands past these lengths, one per row."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (
            f"cannot roll back from {self.lengths} to {list(lengths)}"
        )
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.keys.device)
        self.keys, self.values = self.keys[index], self.values[index]
        self.lengths = [self.lengths[row] for row in rows]
