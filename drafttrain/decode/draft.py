"""Grow every proposal, unless a drafter proposes everything at once."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.sampling import most_likely, probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.transfer import send_numbers
from drafttrain.core.types import Proposal
from drafttrain.core.vocab import DraftVocab
from drafttrain.decode.adaptive import Adaptive, Pace
from drafttrain.decode.policy import DynamicTree, Level, Policy, StaticTree, chain, shape_of
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
    pace: Pace | None = None,
) -> Proposal:
    """Draft a proposal under a policy, by the drafter's choices or draws under `sampling`.

    The recorded draft_probs are the distribution that each token was drawn from, after temperature,
    top-k and top-p, over target ids; greedy drafts record none. pace: ends a chain.
    """
    limits = (policy.width, policy.num_nodes) if policy.branches else ()
    depth = policy.depth if pace is None else pace.planned
    whole = drafter.propose(state, depth, *limits)
    if whole is not None:
        return whole
    if isinstance(policy, DynamicTree):
        shape = (policy.depth, policy.width, policy.num_nodes)
        return best_tree(drafter, state, *shape, policy.temperature)
    if isinstance(policy, Adaptive):
        policy = chain(policy.depth)
    assert isinstance(policy, StaticTree)
    return grow_static(policy, drafter, state, sampling, chance, rows, starts, pace)


def grow_static(
    policy: StaticTree,
    drafter: Drafter,
    state: DraftState,
    sampling: Sampling,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
    pace: Pace | None = None,
) -> Proposal:
    """Draft a tree of a fixed shape, level by level; the k-th child is the k-th choice or draw.

    pace: ends a chain before its last level. It is asked with the tokens drafted so far, which
    stay; none is taken back for what it turned out to be.
    """
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
            drafted = drawn_children(probs, level, policy.replacement, chance, rows, starts)
            draft_probs.append(probs)
        tokens.append(drafted)
        newest = drafted
        if policy.branches and level.expanded:
            newest = drafted[:, placed(level.expanded, drafted.device)]
            above = tuple(level.parents[place] for place in level.expanded)
            parents = placed(above, drafted.device).expand(len(drafted), -1)
        if pace is not None:
            sure = drafter.confidence(state)
            if sure is None:
                known = draft_probs[-1] if draft_probs else logits.float().softmax(-1)
                sure = known.amax(-1) if sampling.greedy else known.gather(-1, drafted[..., None])
            if not pace.goes_on(sure.flatten().tolist()):
                break
    drafted = torch.cat(tokens, dim=1)
    num_nodes = torch.full((len(drafted),), drafted.shape[1])
    drawn_from = torch.cat(draft_probs, dim=1) if draft_probs else None
    tree, sources = shape_of(policy, drafted.device)
    return Proposal(drafted, num_nodes, drawn_from, tree, sources, policy.replacement)


def nothing(rows: int, device: torch.device) -> Proposal:
    """Return a proposal without nodes: its verification is a plain step."""
    tokens = torch.empty(rows, 0, dtype=torch.long, device=device)
    return Proposal(tokens, torch.zeros(rows, dtype=torch.long), None)


def best_children(
    logits: Float[Tensor, "batch width draft_vocab"], level: Level, vocab: DraftVocab | None
) -> Int[Tensor, "batch node"]:
    """Return the most likely tokens that a level asks for, as target ids."""
    most = max(level.ranks) + 1
    best = most_likely(logits)[..., None] if most == 1 else logits.topk(most, dim=-1).indices
    if len(level.nodes) == 1:
        tokens = best[..., 0]
    else:
        parents, ranks = placed(level.parents, best.device), placed(level.ranks, best.device)
        tokens = best[:, parents, ranks]
    return tokens if vocab is None else vocab.target_ids[tokens]


@lru_cache(maxsize=256)
def placed(places: tuple[int, ...], device: torch.device) -> Int[Tensor, " place"]:
    """Return places of a policy's shape on `device`, where they stay: they are sent once."""
    return send_numbers(places, device)


def drawn_children(
    probs: Probs,
    level: Level,
    replacement: bool,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Int[Tensor, "batch node"]:
    """Return the tokens of a level, each drawn by a choice of its own.

    Siblings are drawn one after another, all nodes of a rank at once.
    """

    def choose(probs: Probs, nodes: Sequence[int]) -> Int[Tensor, "batch width"]:
        width = len(nodes)
        names = [row for row in rows for _ in nodes]
        begun = [start for start in starts for _ in nodes]
        numbers = [draw_of(node, Purpose.DRAFT) for node in nodes] * len(probs)
        flat = probs.reshape(-1, probs.shape[-1])
        return chance.choose(flat, names, begun, numbers).unflatten(0, (-1, width))

    if len(level.nodes) == 1:
        return choose(probs, level.nodes)
    drafted = torch.empty(len(probs), len(level.nodes), dtype=torch.long, device=probs.device)
    left = probs
    for rank in range(max(level.ranks) + 1):
        ranked = tuple(place for place, its in enumerate(level.ranks) if its == rank)
        places = placed(ranked, probs.device)
        parents = placed(tuple(level.parents[place] for place in ranked), probs.device)
        tokens = choose(left[:, parents], [level.nodes[place] for place in ranked])
        drafted[:, places] = tokens
        if not replacement and rank < max(level.ranks):
            left = left.clone()
            left[:, parents] = without(left[:, parents], tokens)
    return drafted
