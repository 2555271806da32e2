"""The shape of a tree of drafted tokens: which node follows which, and what each one sees.

A tree follows the last committed token, which is not a node. Nodes come in any order in which each
comes after its parent. A chain is a tree too, but the loop needs no shape for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Branches:
    """Tokens of a tree for one pass of a decoder, after those of the tree that its cache holds.

    seen: which tokens of the tree each one attends to, itself included; what precedes the tree is
    visible to all. depth: how many positions each is after the first one of the tree. `rows` is 1
    where all rows share the shape.
    """

    seen: Bool[Tensor, "rows new opened"]
    depth: Int[Tensor, "rows new"]

    @property
    def num_before(self) -> int:
        """How many tokens of the tree are in the cache already."""
        return self.seen.shape[2] - self.seen.shape[1]

    @classmethod
    def level(cls, last: "Branches | None", parents: Int[Tensor, "rows new"]) -> "Branches":
        """Return the next level of a tree: node i follows node parents[i] of the last level.

        last: None for the first level, all of whose nodes follow the last token.
        """
        rows, width = parents.shape
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(rows, -1, -1)
        if last is None:
            return cls(own, torch.zeros_like(parents))
        inherited = last.seen.expand(rows, -1, -1).gather(
            1, parents[..., None].expand(-1, -1, last.seen.shape[2])
        )
        return cls(torch.cat([inherited, own], dim=2), last.depth[:, :1].expand(rows, width) + 1)


@dataclass(frozen=True)
class Tree:
    """The shape of a proposal. `rows` is 1 where all rows share it.

    parents: of each node; -1: the last token. depth: 1 for its children. seen: a node's
    ancestors and itself. deepest: no node is deeper; widest: none has more children.
    """

    parents: Int[Tensor, "rows node"]
    depth: Int[Tensor, "rows node"]
    seen: Bool[Tensor, "rows node node"]
    deepest: int
    widest: int

    @classmethod
    def of(cls, parents: Int[Tensor, "rows node"], deepest: int, widest: int) -> "Tree":
        """Return the shape in which each node follows its parent."""
        order = torch.arange(parents.shape[1], device=parents.device)
        seen = (order == order[:, None]).expand(len(parents), -1, -1)
        climbing = parents
        for _ in range(deepest - 1):
            seen = seen | (order == climbing[..., None])
            climbing = torch.where(climbing >= 0, parents.gather(1, climbing.clamp(min=0)), -1)
        return cls(parents, seen.sum(-1), seen, deepest, widest)

    @cached_property
    def with_root(self) -> Branches:
        """The tokens of a verification: the last committed one, which all others see, and these."""
        seen = functional.pad(self.seen, (1, 0, 1, 0))
        seen[:, :, 0] = True
        return Branches(seen, functional.pad(self.depth, (1, 0)))

    @cached_property
    def children(self) -> Int[Tensor, "rows place child"]:
        """The nodes that follow the last token (place 0) and node j (place j + 1), then -1."""
        parents = self.parents
        rows, num_nodes = parents.shape
        room = (num_nodes + 1) * self.widest
        rank = (parents[:, :, None] == parents[:, None, :]).tril(-1).sum(-1)
        # A row's padding also follows the last token: what has no room there has a last spot.
        spots = torch.where(rank < self.widest, (parents + 1) * self.widest + rank, room)
        order = torch.arange(num_nodes, device=parents.device).expand(rows, -1)
        filled = parents.new_full((rows, room + 1), -1).scatter_(1, spots, order)
        return filled[:, :room].unflatten(1, (num_nodes + 1, self.widest))

    def path_to(self, nodes: Int[Tensor, " batch"]) -> Int[Tensor, "batch depth"]:
        """Return each row's path from the last token to its node, that included, padded with 0."""
        rows, num_nodes = len(nodes), self.parents.shape[1]
        seen = self.seen.expand(rows, -1, -1)[torch.arange(rows, device=nodes.device), nodes]
        order = torch.arange(num_nodes, device=nodes.device)
        path = torch.where(seen, order, num_nodes).sort(dim=1).values
        return path.masked_fill_(path == num_nodes, 0)[:, : self.deepest]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return each node's depth; the children of the last token have depth 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
