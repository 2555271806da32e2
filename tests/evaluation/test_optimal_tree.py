"""The fastest tree of a machine, against every tree there is and sums done by hand."""

from itertools import combinations, product
from typing import Any

import pytest
import torch
from builders import model_config
from test_drafters import random_drafter

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Proposal, Verdict
from drafttrain.decode.loop import Cycle, speculative_decode
from drafttrain.decode.policy import (
    StaticTree,
    accepted_along,
    chain,
    most_accepted,
    spine,
    tree_of_ranks,
    tree_of_widths,
)
from drafttrain.evaluation.cost import Costs
from drafttrain.evaluation.optimal_tree import RankCounts, fastest_trees, predicted_times, samples
from drafttrain.target.model import load_target

ACCEPTANCE = [[0.5, 0.3, 0.05], [0.6, 0.1, 0.02], [0.9, 0.05, 0.01]]


def length(acceptance: list[list[float]], paths: Any) -> float:
    return 1 + sum(accepted_along(acceptance, path) for path in paths)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
def test_the_most_accepted_nodes_are_the_best_of_all_trees(num_nodes: int) -> None:
    nodes = [p for depth in (1, 2, 3) for p in product(range(3), repeat=depth)]
    best = 0.0
    for chosen in combinations(nodes, num_nodes):
        try:
            tree_of_ranks(chosen)
        except ValueError:
            continue
        best = max(best, length(ACCEPTANCE, chosen))
    found = most_accepted(ACCEPTANCE, num_nodes)
    assert tree_of_ranks(found).num_nodes == num_nodes
    assert length(ACCEPTANCE, found) == pytest.approx(best)


def test_a_tree_is_named_by_its_nodes() -> None:
    for tree in (chain(3), tree_of_widths([2, 2, 1]), spine(3, 2), tree_of_ranks(ALL_OF_TWO)):
        assert tree_of_ranks(tree.paths) == tree


ALL_OF_TWO = [(0,), (1,), (0, 0), (0, 1), (1, 0)]


def test_nothing_is_drafted_that_is_never_accepted() -> None:
    assert most_accepted([[0.5, 0.0], [0.5, 0.5]], 9) == [(0,), (0, 0), (0, 1)]


def cycle(*paths: list[int]) -> Cycle:
    longest = max(len(path) for path in paths)
    padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
    accepted = torch.tensor([len(path) for path in paths])
    verdict = Verdict(accepted, accepted, padded)
    drafted = Proposal(padded, accepted, None)  # of which the paths alone are read
    logits = torch.zeros(len(paths), 1, 1)
    return Cycle(range(len(paths)), [0] * len(paths), drafted, logits, verdict)


def test_ranks_are_counted_as_far_as_first_choices_were_accepted() -> None:
    counts = RankCounts.empty(3, 2)
    # A spine of 3 levels, 2 wide: nodes 0 and 1, then 2 and 3 below node 0, 4 and 5 below node 2.
    counts.add(cycle([], [1], [0]))
    counts.add(cycle([0, 2, 5], [0, 2, 4], [0, 3]))
    assert counts.reached == [6, 4, 2]
    assert counts.accepted == [[4, 1], [2, 1], [1, 1]]
    assert counts.acceptance == [[4 / 6, 1 / 6], [0.5, 0.25], [0.5, 0.5]]
    assert counts.plus(counts).acceptance == counts.acceptance


def test_the_ranks_of_a_real_decoding_add_up_to_its_acceptance(tiny_target_dir: Any) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    drafter, counts = random_drafter("medusa", target), RankCounts.empty(2, 3)
    decoded = speculative_decode(
        *(target, drafter, [5, 6, 7]),
        policy=spine(2, 3), sampling=GREEDY, max_new_tokens=40, chance=SeededChance(0),
        stop_tokens=(), record=counts.add,
    )  # fmt: skip
    told = decoded.stats.untrimmed
    assert counts.reached[0] == told.num_drafts
    assert [sum(ranks) for ranks in counts.accepted] == told.num_accepted_tokens_per_position


KINDS = samples(4, 8, 100)
# Seconds of the drafter and the target, by sample; one context and batch size.
DRAFT = {("wide", n): 1 + n / 100 for n in (2, 4, 8)}
DRAFT |= {("after", n): 1.5 + n / 100 + n / 20 for n in (2, 4)}
DRAFT |= {("chain", n): 0.5 + 0.5 * n for n in (1, 2, 4)}
VERIFY = {kind: 10 + kind[1] / 10 for kind in KINDS}


def costs(verify: dict[tuple[str, int], float]) -> Costs:
    draft_s = {(place, 1, 64): DRAFT[kind] for place, kind in enumerate(KINDS)}
    verify_s = {(place, 1, 64): verify[kind] for place, kind in enumerate(KINDS)}
    return Costs([1], [64], {(1, 64): 10.0}, verify_s, draft_s)


def test_the_seconds_of_a_tree_are_those_of_its_passes() -> None:
    seconds = predicted_times(costs(VERIFY), list(KINDS), 1, 64.0)
    assert seconds(chain(3)) == pytest.approx(2.0 + 10.3)
    # Two children of the root (1.02), a pass over both (0.6), one over one of them (0.5).
    tree = tree_of_ranks([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    assert [len(level.expanded) for level in tree.levels] == [2, 1, 0]
    assert seconds(tree) == pytest.approx(1.02 + 0.6 + 0.5 + 10.5)


def fastest(verify: dict[tuple[str, int], float]) -> dict[int, StaticTree]:
    counts = RankCounts([1000, 500, 400, 300], [[500, 300], [250, 50], [250, 20], [200, 10]])
    seconds = predicted_times(costs(verify), list(KINDS), 1, 64.0)
    found = fastest_trees({"math": counts, "chat": counts}, seconds, [1, 2, 4], 8)
    assert found[2].lengths["math"] == pytest.approx(found[2].lengths["all"])
    for depth, each in found.items():
        assert each.tree.depth == depth
    return {depth: each.tree for depth, each in found.items()}


def test_a_tree_is_chosen_where_nodes_cost_nothing_and_a_chain_where_they_cost_much() -> None:
    free = fastest({kind: 10.0 for kind in KINDS})
    assert free[1] == tree_of_widths([2])
    assert free[2].num_nodes > 2
    costly = fastest({kind: 10.0 if kind[0] == "chain" else 10.0 + kind[1] * 8 for kind in KINDS})
    assert [tree.branches for tree in costly.values()] == [False] * 3
