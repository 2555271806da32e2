"""How proposals grow: which nodes are drafted, in which shape. A chain is the simplest tree."""

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from jaxtyping import Int
from torch import Tensor

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.tree import Tree, depths_of
from drafttrain.drafters.base import Drafter, draft_vocab_size
from drafttrain.runtime.settings import require


class Policy(ABC):
    """A way to grow proposals; `decode/draft.py` follows it."""

    depth: int  # of the longest path
    num_nodes: int  # of a proposal, at most
    width: int  # how many children a node has, at most

    @property
    def branches(self) -> bool:
        """Whether a node may have several children."""
        return self.width > 1

    @abstractmethod
    def describe(self) -> str:
        """Return the policy in a few words, for reports."""

    @property
    def nodes_told(self) -> str:
        """The nodes in a table's cell: `3+5+4` by level, or how many."""
        return str(self.num_nodes)

    def check(self, drafter: Drafter, sampling: Sampling) -> None:
        """Raise ValueError if a drafter cannot draft so, or if that would not be lossless.

        sampling: how drafts are drawn.
        """
        deepest, name = drafter.max_depth, drafter.config.name
        if self.depth < 1 or (deepest is not None and self.depth > deepest):
            limit = "at least 1" if deepest is None else f"in 1..{deepest}"
            raise ValueError(f"depth must be {limit} for drafter={name}, got {self.depth}")
        if not self.branches:
            return
        if not drafter.branches:
            raise ValueError(
                f"policy must be chain for drafter={name}, got a {self.describe()}: its expand "
                "takes one node at a time (a drafter that can branch says so: branches = True)"
            )
        most = draft_vocab_size(drafter)
        need = f"be at most {most:,} for drafter={name}, which knows no more tokens"
        require(self.width <= most, "width", need, f"{self.width:,}")


@dataclass(frozen=True)
class StaticTree(Policy):
    """The same shape in every cycle (Medusa, Cai et al., 2024, section 2.1.2; Sequoia, 2024).

    parents: of each node (-1: the last token); nodes come level by level. A node's k-th child is
    the drafter's k-th choice, or its k-th draw; draws of one node are made without replacement,
    unless `replacement`.
    """

    parents: tuple[int, ...]
    replacement: bool = False

    def __post_init__(self) -> None:
        places = range(len(self.parents))
        if not self.parents or not all(-1 <= self.parents[j] < j for j in places):
            raise ValueError(
                "a tree must have a node, and each node's parent must come before it (-1: the "
                f"last token), got parents {list(self.parents)}"
            )
        depths = depths_of(self.parents)
        if sorted(depths) != depths:
            raise ValueError(f"a tree's nodes must come level by level, got depths {depths}")

    @cached_property
    def levels(self) -> tuple["Level", ...]:
        """The levels of the tree, from the children of the last token on."""
        depths = depths_of(self.parents)
        inner = [-1, *sorted({parent for parent in self.parents if parent >= 0})]
        found = []
        for depth in range(1, depths[-1] + 1):
            nodes = [node for node, its in enumerate(depths) if its == depth]
            expanded = [node for node in inner if (depths[node] if node >= 0 else 0) == depth - 1]
            above = [expanded.index(self.parents[node]) for node in nodes]
            found.append(
                Level(
                    tuple(nodes),
                    tuple(above),
                    tuple(above[:place].count(parent) for place, parent in enumerate(above)),
                    tuple(place for place, node in enumerate(nodes) if node in inner),
                )
            )
        return tuple(found)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The nodes, each named by the ranks on its path; the opposite of `tree_of_ranks`."""
        found: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            rank = self.parents[:node].count(parent)
            found.append((*(found[parent] if parent >= 0 else ()), rank))
        return found

    @cached_property
    def depth(self) -> int:  # type: ignore[override]
        return depths_of(self.parents)[-1]

    @cached_property
    def num_nodes(self) -> int:  # type: ignore[override]
        return len(self.parents)

    @cached_property
    def width(self) -> int:  # type: ignore[override]
        return max(Counter(self.parents).values())

    @property
    def nodes_told(self) -> str:
        return "+".join(str(len(level.nodes)) for level in self.levels)

    def describe(self) -> str:
        if not self.branches:
            return f"chain of {self.depth}"
        wide = " + ".join(str(len(level.nodes)) for level in self.levels)
        drawn = ", drawn with replacement" * self.replacement
        return f"static tree of {wide} nodes{drawn}"


@dataclass(frozen=True)
class Level:
    """One level of a static tree: its nodes, and for each its parent and its rank among siblings.

    parents: their places among the expanded nodes of the level above. expanded: the places, in
    this level, of the nodes that have children.
    """

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    expanded: tuple[int, ...]


def chain(depth: int) -> StaticTree:
    """Return the policy that drafts `depth` tokens in a row."""
    require(depth >= 1, "depth", "be at least 1", depth)
    return StaticTree(tuple(range(-1, depth - 1)))


@dataclass(frozen=True)
class DynamicTree(Policy):
    """The most probable nodes by the drafter's own word (EAGLE-2, Li et al., 2024, section 4).

    On each of `depth` levels the `width` nodes of the highest cumulative draft probability are
    expanded, each to its `width` most likely children; of all of them the best num_nodes are
    proposed. Its children are chosen, never drawn: to drop a node that was drawn because of its own
    probability would change the distribution of the output. temperature: of the probabilities that
    rank the nodes. A greedy target takes a likely token more often than a drafter that learned its
    distribution says, so that below 1 they are nearer to what is accepted.
    """

    depth: int
    width: int
    num_nodes: int
    temperature: float = 1.0
    branches = True  # also where it is one node wide: its nodes have parents

    def __post_init__(self) -> None:
        for key in ("depth", "width", "num_nodes"):
            require(getattr(self, key) >= 1, key, "be at least 1", getattr(self, key))
        need = f"be at least the depth, {self.depth}"
        require(self.num_nodes >= self.depth, "num_nodes", need, self.num_nodes)

    def check(self, drafter: Drafter, sampling: Sampling) -> None:
        super().check(drafter, sampling)
        if not sampling.greedy:
            raise ValueError(
                "draft_temperature must be 0 with a dynamic tree, got "
                f"{sampling.temperature:g}: it keeps nodes for their own probability, and to do "
                "that with nodes drawn by chance is not lossless; choose a static tree instead"
            )

    def describe(self) -> str:
        ranked = "" if self.temperature == 1 else f", ranked at temperature {self.temperature:g}"
        return (
            f"dynamic tree of {self.num_nodes} nodes, {self.depth} deep, {self.width} wide{ranked}"
        )


@lru_cache(maxsize=16)
def shape_of(
    policy: StaticTree, device: torch.device
) -> tuple[Tree | None, Int[Tensor, " place"] | None]:
    """Return a static tree's shape, and which expanded node each place is; None for a chain."""
    if not policy.branches:
        return None, None
    inner = sorted({parent + 1 for parent in policy.parents})
    order = [inner.index(place) if place in inner else -1 for place in range(policy.num_nodes + 1)]
    tree = Tree.of(torch.tensor([policy.parents], device=device), policy.depth, policy.width)
    return tree, torch.tensor(order, device=device)


def policy_of(policy: Policy | int) -> Policy:
    """Return the policy; a number is the depth of a chain."""
    return policy if isinstance(policy, Policy) else chain(policy)


def tree_of_widths(widths: Sequence[int], replacement: bool = False) -> StaticTree:
    """Return the tree in which each node of level k has widths[k] children."""
    parents: list[int] = []
    above = [-1]
    for width in widths:
        level = [parent for parent in above for _ in range(width)]
        above = list(range(len(parents), len(parents) + len(level)))
        parents += level
    return StaticTree(tuple(parents), replacement)


def tree_of_ranks(paths: Sequence[Sequence[int]], replacement: bool = False) -> StaticTree:
    """Return the static tree of these nodes, each named by the ranks on its path, as Medusa's are.

    Every prefix of a path must be among them, and so must the siblings of lower rank.
    """
    ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
    places = {path: place for place, path in enumerate(ordered)}
    if not ordered or not all(ordered) or len(places) < len(ordered):
        raise ValueError(f"tree must have nodes, each once, got {[list(p) for p in ordered]}")
    for path in ordered:
        needed = [path[:-1]] * (len(path) > 1) + [(*path[:-1], path[-1] - 1)] * (path[-1] > 0)
        for other in needed:
            if other not in places:
                raise ValueError(
                    f"tree must have the node {list(other)} where it has {list(path)}, got none"
                )
    return StaticTree(tuple(places.get(path[:-1], -1) for path in ordered), replacement)


def spine(depth: int, width: int) -> StaticTree:
    """Return the tree of the first choices, each with its siblings: it sees every rank's luck."""
    levels = range(depth)
    return tree_of_ranks([(*[0] * level, rank) for level in levels for rank in range(width)])


def most_accepted(acceptance: Sequence[Sequence[float]], num_nodes: int) -> list[Sequence[int]]:
    """Return the nodes, by the ranks on their paths, that are most often accepted, best first.

    acceptance[d][k]: how often child k of an accepted node at depth d is accepted. A node is
    accepted as often as all of its path is, so that the first n nodes are the best tree of n (the
    rank of a node tells its acceptance: Sequoia, Chen et al., 2024, section 3.1; here by depth
    too). A child that is accepted more often than an earlier one, by the noise of counting, counts
    as that one does.
    """
    falling = [[min(ranks[: rank + 1]) for rank in range(len(ranks))] for ranks in acceptance]
    chosen: list[Sequence[int]] = []
    # A node comes in with its first child and its next sibling, which are accepted no more often.
    waiting: list[tuple[float, tuple[int, ...]]] = [(-falling[0][0], (0,))]
    while waiting and len(chosen) < num_nodes:
        cost, path = heapq.heappop(waiting)
        if not cost:
            break
        chosen.append(path)
        above, rank = path[:-1], path[-1]
        depth = len(above)
        if depth + 1 < len(falling):
            heapq.heappush(waiting, (cost * falling[depth + 1][0], (*path, 0)))
        if rank + 1 < len(falling[depth]):
            ratio = falling[depth][rank + 1] / falling[depth][rank]
            heapq.heappush(waiting, (cost * ratio, (*above, rank + 1)))
    return chosen


def accepted_along(acceptance: Sequence[Sequence[float]], path: Sequence[int]) -> float:
    """Return how often a node, named by the ranks on its path, is accepted."""
    return prod(acceptance[depth][rank] for depth, rank in enumerate(path))
