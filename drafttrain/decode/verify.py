"""Acceptance rules: pure functions of probabilities; all randomness is an argument.

Row j of a chain's target distributions is the distribution of the token after j drafted tokens: row
0 follows the last committed token, row `depth` is for the bonus after full acceptance.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.types import Proposal, Verdict

Probs = Float[Tensor, "batch vocab"]
Tokens = Int[Tensor, "batch tokens"]
PerToken = Float[Tensor, "batch tokens"]


class Rule(ABC):
    """How a drafted token is accepted, and which distribution follows a rejection.

    A rule is lossless if `one_step_distribution` is the target's distribution for every drafter's
    distribution.
    """

    name: str
    lossless: bool

    @abstractmethod
    def acceptance(self, target_probs: Probs, draft_probs: Probs, token: Tokens) -> PerToken:
        """Return the probability of accepting each token if it were drafted."""

    @abstractmethod
    def correction(self, target_probs: Probs, draft_probs: Probs) -> Probs:
        """Return the distribution of the token that follows a rejection."""


@dataclass(frozen=True)
class Rejection(Rule):
    """Rejection sampling (Leviathan et al., 2023, algorithm 1; Chen et al., 2023). Lossless.

    Token x drawn from draft_probs is accepted with probability min(1, target_probs[x] /
    draft_probs[x]); after a rejection the corrected token is drawn from max(0, target_probs -
    draft_probs), normalised. Exact for any draft_probs that the tokens were really drawn from.
    """

    name = "rejection sampling"
    lossless = True

    def acceptance(self, target_probs: Probs, draft_probs: Probs, token: Tokens) -> PerToken:
        """Return min(1, target/draft); 0 where the target's probability is 0."""
        return _ratio(target_probs.gather(1, token), draft_probs.gather(1, token))

    def correction(self, target_probs: Probs, draft_probs: Probs) -> Probs:
        return residual(target_probs, draft_probs)


@dataclass(frozen=True)
class Typical(Rule):
    """Typical acceptance (Medusa, Cai et al., 2024, section 2.3.1). NOT lossless above T = 0.

    A token is always accepted if its target probability exceeds min(epsilon, delta *
    exp(-entropy)); after a rejection the next token is drawn from the target's distribution.
    """

    epsilon: float
    delta: float
    name = "typical acceptance"
    lossless = False

    def acceptance(self, target_probs: Probs, draft_probs: Probs, token: Tokens) -> PerToken:
        entropy = torch.special.entr(target_probs).sum(-1, keepdim=True)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        return (target_probs.gather(1, token) > threshold).to(target_probs.dtype)

    def correction(self, target_probs: Probs, draft_probs: Probs) -> Probs:
        return target_probs


@dataclass(frozen=True)
class Lenience(Rule):
    """Rejection sampling against lenience * draft_probs (Leviathan et al., 2023, appendix A.5).

    NOT lossless above T = 0 for lenience < 1: no token is emitted with more than 1 / lenience times
    its probability under the target. With lenience 1 it is rejection sampling.
    """

    lenience: float
    name = "lenience"
    lossless = False

    def acceptance(self, target_probs: Probs, draft_probs: Probs, token: Tokens) -> PerToken:
        return _ratio(target_probs.gather(1, token), self.lenience * draft_probs.gather(1, token))

    def correction(self, target_probs: Probs, draft_probs: Probs) -> Probs:
        return residual(target_probs, self.lenience * draft_probs)


LOSSLESS = Rejection()


def verify_greedy(proposal: Proposal, choices: Int[Tensor, "batch positions"]) -> Verdict:
    """Accept the longest prefix of the chain that matches the target's own choices. Lossless.

    choices: the argmax of each target distribution, which is that distribution at temperature 0.
    """
    depth = proposal.tokens.shape[1]
    agree = proposal.tokens == choices[:, :depth]
    if int(proposal.num_nodes.min()) < depth:
        nodes = torch.arange(depth, device=agree.device)
        agree &= nodes < proposal.num_nodes[:, None].to(agree.device)
    num_accepted = agree.int().cumprod(-1).sum(-1)
    bonus = choices.gather(1, num_accepted[:, None]).squeeze(1)
    return Verdict(num_accepted, bonus)


def verify_chain(
    rule: Rule,
    proposal: Proposal,
    target_probs: Float[Tensor, "batch positions vocab"],
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """Accept a chain token by token under a rule; a bonus token follows full acceptance.

    A token that was chosen deterministically counts as drawn from a point mass.
    """
    batch, depth = proposal.tokens.shape
    device = proposal.tokens.device
    active = torch.ones(batch, dtype=torch.bool, device=device)
    num_accepted = torch.zeros(batch, dtype=torch.long, device=device)
    emit = target_probs[:, 0].clone()  # the distribution of the token that ends the cycle, per row
    num_nodes = proposal.num_nodes.to(device)
    for node in range(depth):
        active &= node < num_nodes
        token = proposal.tokens[:, node : node + 1]
        probs, drawn_from = target_probs[:, node], drawn_distribution(proposal, node, target_probs)
        accept_probability = rule.acceptance(probs, drawn_from, token).squeeze(1)
        accepted = chance.accept(accept_probability, rows, starts, draw_of(node, Purpose.ACCEPT))
        accepted &= active
        rejected = active & ~accepted
        emit = torch.where(rejected[:, None], rule.correction(probs, drawn_from), emit)
        emit = torch.where(accepted[:, None], target_probs[:, node + 1], emit)
        num_accepted += accepted
        active = accepted
        if not bool(active.any()):
            break
    bonus = chance.choose(emit, rows, starts, draw_of(0, Purpose.EMIT))
    return Verdict(num_accepted, bonus)


def drawn_distribution(
    proposal: Proposal, node: int, target_probs: Float[Tensor, "batch positions vocab"]
) -> Probs:
    """Return the distribution that a node was drawn from, in the dtype of `target_probs`."""
    if proposal.draft_probs is not None:
        return proposal.draft_probs[:, node].to(target_probs.dtype)
    point = torch.zeros_like(target_probs[:, node])
    return point.scatter_(1, proposal.tokens[:, node : node + 1], 1.0)


def one_step_distribution(rule: Rule, target_probs: Probs, draft_probs: Probs) -> Probs:
    """Return the distribution of a cycle's first emitted token, averaged over the drafter's draws.

    In closed form: draft * acceptance + (1 - sum of that) * correction. For a lossless rule it is
    target_probs, up to rounding; otherwise its distance from target_probs is what the rule costs.
    """
    every = torch.arange(target_probs.shape[1], device=target_probs.device)
    accepted = draft_probs * rule.acceptance(
        target_probs, draft_probs, every.expand_as(target_probs)
    )
    rejected = (draft_probs.sum(-1, keepdim=True) - accepted.sum(-1, keepdim=True)).clamp(min=0)
    return accepted + rejected * rule.correction(target_probs, draft_probs)


def residual(target_probs: Probs, draft_probs: Probs) -> Probs:
    """Return the distribution after a rejection: max(0, target - draft), normalised.

    If nothing is left (both distributions are equal up to rounding), a rejection had probability
    zero up to rounding too, and the target's distribution is returned.
    """
    left = (target_probs - draft_probs).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, target_probs)


def _ratio(target: PerToken, draft: PerToken) -> PerToken:
    # A drafted token has draft > 0; if rounding made it 0, it is accepted where target > 0.
    return torch.where(target >= draft, (target > 0).to(target.dtype), target / draft)
