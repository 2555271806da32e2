"""Grow every proposal, unless a drafter proposes everything at once."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import Proposal
from drafttrain.core.vocab import DraftVocab
from drafttrain.decode.policy import DynamicTree, Level, Policy, StaticTree, shape_of
from drafttrain.decode.verify import without
from drafttrain.drafters.base import Drafter, DraftState
from drafttrain.drafters.shared.merge import best_tree

Probs = Float[Tensor, "batch width vocab"]


def draft(
    policy: Policy,
    drafter: Drafter,
    state: DraftState,
    sampling: Sampling,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Proposal:
    """Draft a proposal under a policy, by the drafter's choices or draws under `sampling`.

    The recorded draft_probs are the distribution that each token was drawn from, after temperature,
    top-k and top-p, over target ids; greedy drafts record none.
    """
    limits = (policy.width, policy.num_nodes) if policy.branches else ()
    whole = drafter.propose(state, policy.depth, *limits)
    if whole is not None:
        return whole
    if isinstance(policy, DynamicTree):
        return best_tree(drafter, state, policy.depth, policy.width, policy.num_nodes)
    assert isinstance(policy, StaticTree)
    return grow_static(policy, drafter, state, sampling, chance, rows, starts)


def grow_static(
    policy: StaticTree,
    drafter: Drafter,
    state: DraftState,
    sampling: Sampling,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Proposal:
    """Draft a tree of a fixed shape, level by level; the k-th child is the k-th choice or draw."""
    newest: Tensor | None = None
    parents: Tensor | None = None
    tokens, draft_probs = [], []
    for level in policy.levels:
        if parents is None:
            logits = drafter.expand(state, newest)
        else:
            logits = drafter.expand(state, newest, parents)
        if sampling.greedy:
            drafted = best_children(logits, level, drafter.vocab)
        else:
            probs = probabilities(logits, sampling)
            if drafter.vocab is not None:
                probs = drafter.vocab.scatter(probs)
            draws = Draws(chance, rows, starts, policy.replacement)
            drafted = draws.children(probs, level)
            draft_probs.append(probs)
        tokens.append(drafted)
        newest = drafted
        if policy.branches and level.expanded:
            newest = drafted[:, level.expanded]
            above = torch.tensor([level.parents[place] for place in level.expanded])
            parents = above.to(drafted.device).expand(len(drafted), -1)
    drafted = torch.cat(tokens, dim=1)
    num_nodes = torch.full((len(drafted),), policy.num_nodes)
    drawn_from = torch.cat(draft_probs, dim=1) if draft_probs else None
    tree, sources = shape_of(policy, drafted.device)
    return Proposal(drafted, num_nodes, drawn_from, tree, sources, policy.replacement)


def best_children(
    logits: Float[Tensor, "batch width draft_vocab"], level: Level, vocab: DraftVocab | None
) -> Int[Tensor, "batch node"]:
    """Return the most likely tokens that a level asks for, as target ids."""
    most = max(level.ranks) + 1
    best = logits.argmax(-1, keepdim=True) if most == 1 else logits.topk(most, dim=-1).indices
    tokens = best[..., 0] if len(level.nodes) == 1 else best[:, level.parents, level.ranks]
    return tokens if vocab is None else vocab.target_ids[tokens]


class Draws:
    """Tokens drawn from the drafter's distributions, each by a choice of its own."""

    def __init__(
        self, chance: Chance, rows: Sequence[int], starts: Sequence[int], replacement: bool
    ) -> None:
        self.chance, self.rows, self.starts = chance, rows, starts
        self.replacement = replacement

    def children(self, probs: Probs, level: Level) -> Int[Tensor, "batch node"]:
        """Return the tokens of a level: siblings one after another, all nodes of a rank at once."""
        if len(level.nodes) == 1:
            return self._choose(probs, [draw_of(level.nodes[0], Purpose.DRAFT)])
        drafted = torch.empty(len(probs), len(level.nodes), dtype=torch.long, device=probs.device)
        left = probs
        for rank in range(max(level.ranks) + 1):
            places = [place for place, its in enumerate(level.ranks) if its == rank]
            parents = [level.parents[place] for place in places]
            numbers = [draw_of(level.nodes[place], Purpose.DRAFT) for place in places]
            tokens = self._choose(left[:, parents], numbers)
            drafted[:, places] = tokens
            if not self.replacement and rank < max(level.ranks):
                left = left.clone()
                left[:, parents] = without(left[:, parents], tokens)
        return drafted

    def _choose(self, probs: Probs, draws: Sequence[int]) -> Int[Tensor, "batch width"]:
        width = probs.shape[1]
        names = [row for row in self.rows for _ in range(width)]
        starts = [start for start in self.starts for _ in range(width)]
        numbers = list(draws) * len(probs)
        flat = probs.reshape(-1, probs.shape[-1])
        return self.chance.choose(flat, names, starts, numbers).unflatten(0, (-1, width))
