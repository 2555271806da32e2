"""Acceptance rules: pure functions of probabilities; all chance comes in as an argument.

Row j of a chain's target laws is the law of the token after j drafted tokens: row 0 follows the
root, row `depth` is the bonus after full acceptance.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.chance import Chance, Purpose, draw_of
from drafttrain.types import Proposal, Verdict


def verify_greedy(proposal: Proposal, choices: Int[Tensor, "batch laws"]) -> Verdict:
    """Accept the longest prefix of the chain that the target's own choices spell. Lossless.

    choices: the target's argmax of each law; they are the law itself at temperature 0.
    """
    depth = proposal.tokens.shape[1]
    drafted = torch.arange(depth, device=proposal.tokens.device) < proposal.num_nodes[:, None].to(
        proposal.tokens.device
    )
    agree = (proposal.tokens == choices[:, :depth]) & drafted
    num_accepted = agree.int().cumprod(-1).sum(-1)
    bonus = choices.gather(1, num_accepted[:, None]).squeeze(1)
    return Verdict(_chain_path(num_accepted, depth), num_accepted, bonus)


def verify_rejection(
    proposal: Proposal,
    target_probs: Float[Tensor, "batch laws vocab"],
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """Accept a chain by rejection sampling. Lossless (Leviathan et al., 2023, algorithm 1).

    Token x drawn from draft_probs is accepted with probability min(1, target_probs[x] /
    draft_probs[x]); at the first rejection the target's law less the drafter's, normalised, gives
    the corrected token; after full acceptance the next law gives the bonus. A token that was
    chosen deterministically was drawn from a point mass. Exact for any draft_probs that the tokens
    were really drawn from.
    """
    batch, depth = proposal.tokens.shape
    device = proposal.tokens.device
    going = torch.ones(batch, dtype=torch.bool, device=device)
    num_accepted = torch.zeros(batch, dtype=torch.long, device=device)
    emit = target_probs[:, 0].clone()  # the law of the token that ends the cycle, per row
    num_nodes = proposal.num_nodes.to(device)
    for node in range(depth):
        going &= node < num_nodes
        token = proposal.tokens[:, node : node + 1]
        law = target_probs[:, node]
        if proposal.draft_probs is None:
            drawn_from = torch.zeros_like(law).scatter_(1, token, 1.0)
        else:
            drawn_from = proposal.draft_probs[:, node].to(law.dtype)
        accept_probability = acceptance(law, drawn_from, token).squeeze(1)
        accepted = chance.accept(accept_probability, rows, starts, draw_of(node, Purpose.ACCEPT))
        accepted &= going
        rejected = going & ~accepted
        emit = torch.where(rejected[:, None], residual(law, drawn_from), emit)
        emit = torch.where(accepted[:, None], target_probs[:, node + 1], emit)
        num_accepted += accepted
        going = accepted
    bonus = chance.choose(emit, rows, starts, draw_of(0, Purpose.EMIT))
    return Verdict(_chain_path(num_accepted, depth), num_accepted, bonus)


def acceptance(
    target_probs: Float[Tensor, "batch vocab"],
    draft_probs: Float[Tensor, "batch vocab"],
    token: Int[Tensor, "batch 1"],
) -> Float[Tensor, "batch 1"]:
    """Return min(1, target/draft) of a drafted token; 0 where the target never says it."""
    target, draft = target_probs.gather(1, token), draft_probs.gather(1, token)
    # A drafted token has draft > 0; where rounding made it 0, it counts as drawn at will.
    return torch.where(target >= draft, (target > 0).to(target.dtype), target / draft)


def residual(
    target_probs: Float[Tensor, "batch vocab"], draft_probs: Float[Tensor, "batch vocab"]
) -> Float[Tensor, "batch vocab"]:
    """Return the law after a rejection: max(0, target - draft), normalised.

    Where nothing is left (both laws equal up to rounding) a rejection had probability zero up to
    rounding too, and the target's law stands in.
    """
    left = (target_probs - draft_probs).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, target_probs)


def _chain_path(num_accepted: Int[Tensor, " batch"], depth: int) -> Int[Tensor, "batch depth"]:
    nodes = torch.arange(depth, device=num_accepted.device).expand(len(num_accepted), depth)
    return nodes.masked_fill(nodes >= num_accepted[:, None], -1)
