"""Which nodes follow which, in trees of different shapes padded to one width."""

import torch

from drafttrain.core.tree import Tree


def test_children_are_the_nodes_that_follow_a_place_in_order_and_padding_displaces_none() -> None:
    padded = [[-1, 0, 0, -1, -1, -1], [-1, -1, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4]]
    tree = Tree.of(torch.tensor(padded), 6, 2)
    expected = []
    for row in padded:
        below = [[node for node, parent in enumerate(row) if parent == p] for p in range(-1, 6)]
        expected.append([[*nodes, -1, -1][:2] for nodes in below])
    assert tree.children.tolist() == expected
