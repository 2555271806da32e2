"""The fastest static tree on a machine: acceptance by rank and depth, against measured passes.

Sequoia (Chen et al., 2024, sections 3.1 and 3.3) and OPT-Tree (Wang et al., 2024), with the
drafter's passes counted too, so that a chain is chosen where a chain is faster.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from drafttrain.decode.loop import Cycle
from drafttrain.decode.policy import (
    Policy,
    StaticTree,
    accepted_along,
    chain,
    most_accepted,
    spine,
    tree_of_ranks,
    tree_of_widths,
)
from drafttrain.decode.rows import at_once
from drafttrain.evaluation.certify import accepted_paths
from drafttrain.evaluation.cost import Costs
from drafttrain.evaluation.evaluate import Setup
from drafttrain.evaluation.measure import DraftMethod, decoders, first_turn
from drafttrain.runtime.terminal import followed

Times = Callable[[StaticTree], float]  # seconds of a cycle


@dataclass(frozen=True)
class OptimalTree:
    """The fastest tree of one depth.

    lengths: the predicted tokens of an uncut draft, by task and in all. paths: its nodes, each
    named by the ranks on its path.
    """

    paths: list[list[int]]
    lengths: dict[str, float]

    @property
    def tree(self) -> StaticTree:
        return tree_of_ranks(self.paths)


@dataclass
class RankCounts:
    """How often the k-th child of a first choice was accepted, by depth, where that had been.

    reached[d]: verifications in which the first choices down to depth d were accepted.
    accepted[d][k]: those of them in which child k was accepted at depth d + 1.
    """

    reached: list[int]
    accepted: list[list[int]]

    @classmethod
    def empty(cls, depth: int, width: int) -> "RankCounts":
        return cls([0] * depth, [[0] * width for _ in range(depth)])

    def add(self, cycle: Cycle) -> None:
        """Count one verification of a `spine`."""
        width = len(self.accepted[0])
        for path in accepted_paths(cycle.verdict):
            for depth in range(min(len(path) + 1, len(self.reached))):
                self.reached[depth] += 1
                if depth == len(path):
                    break
                rank = path[depth] - depth * width  # a level lies after those above it
                self.accepted[depth][rank] += 1
                if rank:
                    break

    def plus(self, other: "RankCounts") -> "RankCounts":
        """Return the counts of both."""
        reached = np.add(self.reached, other.reached)
        return RankCounts(reached.tolist(), np.add(self.accepted, other.accepted).tolist())

    @property
    def acceptance(self) -> list[list[float]]:
        """How often each rank is accepted, by depth; 0 where it never was, or could not be."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [[count / max(tries, 1) for count in counts] for counts, tries in pairs]


def count_ranks(setup: Setup, depth: int) -> dict[str, RankCounts]:
    """Decode each prompt's first turn with a `spine`, and count what is accepted, by task."""
    config, target = setup.settings, setup.parts.target
    width = config.tree_width
    method = DraftMethod("spine", depth, setup.parts.timed_drafter, spine(depth, width))
    decode = decoders(target, [method], config, config.sampling, setup.seed)[method.key]
    counts: dict[str, RankCounts] = {}
    for place, prompt in enumerate(followed("tune: acceptance by rank", setup.prompts)):
        here = counts.setdefault(prompt.task, RankCounts.empty(depth, width))
        tokens = first_turn(prompt, target, setup.template)
        at_once(decode([tokens], rows=[place], record=here.add))
    return counts


def samples(depth: int, num_nodes: int, most_children: int) -> dict[tuple[str, int], Policy]:
    """Return the proposals to time, from which the seconds of any tree are predicted.

    wide n: n children of the last token. after n: the same, with a child each; the difference is a
    pass of the drafter over n nodes. chain n: so deep. most_children: no node can have more.
    """
    widest = min(num_nodes, most_children)
    widths = sorted({*(2**k for k in range(1, 11) if 2**k < widest), widest} - {1})
    found: dict[tuple[str, int], Policy] = {}
    for width in widths:
        found["wide", width] = tree_of_widths([width])
        if depth > 1 and 2 * width <= num_nodes:
            found["after", width] = tree_of_widths([width, 1])
    for deep in sorted({*(2**k for k in range(11) if 2**k < depth), depth}):
        found["chain", deep] = chain(deep)
    return found


def predicted_times(
    costs: Costs, kinds: Sequence[tuple[str, int]], rows: int, context: float
) -> Times:
    """Return the seconds of a cycle by its tree, from the costs of `samples`, numbered by `kinds`.

    A target pass takes as long as its number of nodes asks, a drafter pass as those that it reads.
    """
    draft: dict[str, dict[int, float]] = {"wide": {}, "after": {}, "chain": {}}
    verify: dict[str, dict[int, float]] = {"wide": {}, "after": {}, "chain": {}}
    for number, (kind, size) in enumerate(kinds):
        draft[kind][size] = costs.draft_s(number, rows, context)
        verify[kind][size] = costs.verify_s(number, rows, context)
    first, deepest = draft["chain"][1], max(draft["chain"])
    one_more = (draft["chain"][deepest] - first) / max(deepest - 1, 1)
    reading = {1: one_more}
    reading |= {size: s - draft["wide"][size] for size, s in draft["after"].items()}

    def seconds(tree: StaticTree) -> float:
        if not tree.branches:
            return _between(draft["chain"], tree.depth) + _between(verify["chain"], tree.depth)
        passes = [max(_between(reading, len(level.expanded)), 0.0) for level in tree.levels[:-1]]
        begun = _between({1: first} | draft["wide"], len(tree.levels[0].nodes))
        return begun + sum(passes) + _between(verify["wide"], tree.num_nodes)

    return seconds


def _between(values: Mapping[int, float], size: int) -> float:
    return float(np.interp(size, list(values), list(values.values())))


def fastest_trees(
    counts: Mapping[str, RankCounts], seconds: Times, depths: Sequence[int], num_nodes: int
) -> dict[int, OptimalTree]:
    """Return, for each depth, the tree of exactly that depth which makes most tokens per second."""
    acceptance = {task: found.acceptance for task, found in counts.items()}
    acceptance["all"] = reduce(RankCounts.plus, counts.values()).acceptance

    def length(tree: StaticTree, task: str) -> float:
        return 1 + sum(accepted_along(acceptance[task], path) for path in tree.paths)

    found = {}
    for depth in depths:
        nodes = most_accepted(acceptance["all"][:depth], num_nodes)
        sizes = range(1, len(nodes) + 1)
        grown = [nodes[:n] for n in sizes if max(map(len, nodes[:n])) == depth]
        candidates = [chain(depth), *map(tree_of_ranks, grown)]
        best = max(candidates, key=lambda tree: length(tree, "all") / seconds(tree))
        lengths = {task: length(best, task) for task in acceptance}
        found[depth] = OptimalTree([list(path) for path in best.paths], lengths)
    return found
