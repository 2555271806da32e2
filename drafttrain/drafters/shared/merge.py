"""One tree of several continuations, and the most probable tree of one drafter."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.core.ops.ragged_cache import padded_rows
from drafttrain.core.transfer import send
from drafttrain.core.tree import Tree
from drafttrain.core.types import Proposal
from drafttrain.drafters.base import Drafter, DraftState

Node = tuple[int, ...]  # the tokens on the path to it, its own included


def merged(opinions: Sequence[Sequence[Node]], width: int, most: int) -> list[Node]:
    """Return the union of trees, cut at `most` nodes.

    opinions: of each voter its nodes, the best ones first and each after its parent. A node that
    more of them have comes before others, then the one that is nearer to the beginning for a voter,
    then the first voter's. A node has at most `width` children, all different.
    """
    votes = Counter(node for nodes in opinions for node in set(nodes))
    first: dict[Node, tuple[int, int]] = {}  # place and voter
    for voter, nodes in enumerate(opinions):
        for place, node in enumerate(nodes):
            first[node] = min(first.get(node, (place, voter)), (place, voter))
    kept: dict[Node, None] = {}
    children: Counter[Node] = Counter()
    # Whoever has a node has its parent, at an earlier place: the parent comes first.
    for node in sorted(votes, key=lambda node: (-votes[node], first[node])):
        above = node[:-1]
        if len(kept) < most and children[above] < width and (not above or above in kept):
            children[above] += 1
            kept[node] = None
    return [*kept]


def nodes_of(proposal: Proposal) -> list[list[Node]]:
    """Return the nodes of each row's proposal, in its order."""
    tree, rows = proposal.tree, []
    counts = proposal.num_nodes.tolist()
    above = None if tree is None else tree.parents.tolist()
    for row, (tokens, count) in enumerate(zip(proposal.tokens.tolist(), counts, strict=True)):
        parents = range(-1, count - 1) if above is None else above[row][:count]
        nodes: list[Node] = []
        for token, parent in zip(tokens[:count], parents, strict=True):
            nodes.append((*(nodes[parent] if parent >= 0 else ()), token))
        rows.append(nodes)
    return rows


def proposal_of(
    trees: Sequence[Sequence[Node]], depth: int, width: int, device: torch.device
) -> Proposal:
    """Return the proposal of each row's nodes, each after its parent; a chain has no shape.

    depth, width: no tree is deeper, and no node has more children.
    """
    tokens, counts = padded_rows([[node[-1] for node in nodes] for nodes in trees], device)
    rows = []
    for nodes in trees:
        places = {node: place for place, node in enumerate(nodes)}
        rows.append([places.get(node[:-1], -1) for node in nodes])
    tree = None
    if any(parents != list(range(-1, len(parents) - 1)) for parents in rows):
        above = [parents + [-1] * (tokens.shape[1] - len(parents)) for parents in rows]
        tree = Tree.of(send(torch.tensor(above), device), depth, width)
    return Proposal(tokens, torch.tensor(counts), None, tree)


def best_tree(
    drafter: Drafter,
    state: DraftState,
    depth: int,
    width: int,
    num_nodes: int,
    temperature: float = 1.0,
) -> Proposal:
    """Return the tree of the best cumulative draft probabilities, best first (EAGLE-2, section 4).

    temperature: of these probabilities. Width 1 is the chain of the most likely tokens.
    """
    logits = drafter.expand(state, None)
    batch, device = len(logits), logits.device
    scores = logits.new_zeros(batch, 1, dtype=torch.float32)
    parents = torch.full((batch, 1), -1, device=device)  # the expanded nodes, among all candidates
    all_tokens: list[Tensor] = []
    all_scores: list[Tensor] = []
    all_parents: list[Tensor] = []
    for level in range(depth):
        num_children = min(width, logits.shape[-1])
        best = (logits.float() / temperature).log_softmax(-1).topk(num_children, dim=-1)
        tokens = best.indices if drafter.vocab is None else drafter.vocab.target_ids[best.indices]
        all_tokens.append(tokens.flatten(1))
        all_scores.append((scores[..., None] + best.values).flatten(1))
        all_parents.append(parents[..., None].expand(-1, -1, num_children).flatten(1))
        if level + 1 < depth:
            before = sum(each.shape[1] for each in all_tokens[:-1])
            # Stable: of equal ones the earlier, so that a choice does not depend on the device.
            ranked = all_scores[-1].sort(dim=1, descending=True, stable=True).indices
            chosen = ranked[:, :num_children]
            scores, parents = all_scores[-1].gather(1, chosen), before + chosen
            newest = all_tokens[-1].gather(1, chosen)
            logits = drafter.expand(state, newest, chosen // num_children)
    tokens, scores, parents = (torch.cat(p, dim=1) for p in (all_tokens, all_scores, all_parents))
    # A child is never better than its parent, and comes after it: a stable order keeps the parents.
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
    place = torch.full_like(parents, -1).scatter(
        1, kept, torch.arange(kept.shape[1], device=device).expand(batch, -1)
    )
    above = parents.gather(1, kept)
    above = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
    counts = torch.full((batch,), kept.shape[1])
    return Proposal(tokens.gather(1, kept), counts, None, Tree.of(above, depth, width))
