"""Grow every proposal: the only place where drafted tokens are chosen."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import Proposal
from drafttrain.drafters.base import Drafter, DraftState


def draft_chain(
    drafter: Drafter,
    state: DraftState,
    depth: int,
    sampling: Sampling,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Proposal:
    """Draft `depth` tokens in a row, greedily or from the drafter's distribution under `sampling`.

    The recorded draft_probs are the distribution that each token was drawn from, after temperature,
    top-k and top-p, over target ids; greedy drafts record none.
    """
    whole = drafter.propose(state, depth)
    if whole is not None:
        return whole
    token: Tensor | None = None
    tokens, draft_probs = [], []
    for level in range(depth):
        logits = drafter.expand(state, token)
        if sampling.greedy:
            token = logits.argmax(-1)
            if drafter.vocab is not None:
                token = drafter.vocab.target_ids[token]
        else:
            probs = probabilities(logits, sampling)
            if drafter.vocab is not None:
                probs = drafter.vocab.scatter(probs)
            token = chance.choose(probs, rows, starts, draw_of(level, Purpose.DRAFT))
            draft_probs.append(probs)
        tokens.append(token)
    drafted = torch.stack(tokens, dim=1)
    num_nodes = torch.full((len(drafted),), depth)
    return Proposal(drafted, num_nodes, torch.stack(draft_probs, dim=1) if draft_probs else None)
