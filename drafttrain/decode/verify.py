"""Acceptance rules: pure functions of probabilities; all randomness is an argument.

Row 0 of the target's distributions is that of the token after the last committed one, row j + 1
that of the token after node j and its ancestors.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.transfer import send
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
    per_token = True  # whether each token is tested alone, by the two methods

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

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        """Whether it is rejection sampling."""
        return self.lenience == 1

    def acceptance(self, target_probs: Probs, draft_probs: Probs, token: Tokens) -> PerToken:
        return _ratio(target_probs.gather(1, token), self.lenience * draft_probs.gather(1, token))

    def correction(self, target_probs: Probs, draft_probs: Probs) -> Probs:
        return residual(target_probs, self.lenience * draft_probs)


@dataclass(frozen=True)
class Block(Rejection):
    """Block verification (Sun et al., 2025, arXiv:2403.10444, algorithm 2), of chains. Lossless.

    Whether a token is accepted depends on the whole chain: `verify_block`. It accepts at least as
    many tokens as rejection sampling on average, from the same drafts.
    """

    name = "block verification"
    per_token = False


LOSSLESS = Rejection()
MOST_SIBLINGS = 1 << 16  # numbers of draws between two levels


def verify_greedy(proposal: Proposal, choices: Int[Tensor, "batch positions"]) -> Verdict:
    """Accept the longest path that matches the target's own choices. Lossless.

    choices: the argmax of each target distribution, which is that distribution at temperature 0.
    """
    tree, tokens = proposal.tree, proposal.tokens
    before = choices[:, : tokens.shape[1]]
    if tree is not None:
        before = choices.gather(1, (tree.parents + 1).expand_as(tokens))
    agree = tokens == before
    if int(proposal.num_nodes.min()) < tokens.shape[1]:
        nodes = torch.arange(tokens.shape[1], device=agree.device)
        agree &= nodes < send(proposal.num_nodes, agree.device)[:, None]
    if tree is None:
        num_accepted = agree.int().cumprod(-1).sum(-1)
        return Verdict(num_accepted, choices.gather(1, num_accepted[:, None]).squeeze(1))
    accepted = (agree[:, None] | ~tree.seen).all(-1)
    depths, deepest = torch.where(accepted, tree.depth, 0).max(-1)
    place = torch.where(depths > 0, deepest + 1, 0)
    return Verdict(depths, choices.gather(1, place[:, None]).squeeze(1), tree.path_to(deepest))


def verify_choices(
    proposal: Proposal,
    target_probs: Float[Tensor, "batch positions vocab"],
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """Draw the target's own choice node after node, and accept the nodes that it meets. Lossless.

    For nodes that were chosen deterministically. It has the outcome of rejection sampling against
    point masses: node x is accepted with probability target_probs[x], and after a rejection the
    target's distribution has no x in it (EAGLE-2's rule; sample-match for a chain).
    """
    walk = Walk(proposal)
    for level in range(proposal.depth + 1):
        probs = walk.here(target_probs)
        choice = chance.choose(walk.only_active(probs), rows, starts, draw_of(level, Purpose.EMIT))
        walk.bonus = torch.where(walk.active, choice, walk.bonus)
        if level == proposal.depth:
            break
        children, real = walk.children()
        met = real & walk.active[:, None] & (walk.tokens(children) == choice[:, None])
        walk.step(met.any(-1), children.gather(1, met.int().argmax(-1, keepdim=True)).squeeze(1))
        if walk.known_to_end():
            break
    return walk.verdict()


def verify_draws(
    rule: Rule,
    proposal: Proposal,
    target_probs: Float[Tensor, "batch positions vocab"],
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """Accept node after node under a rule, siblings in the order of their draws; then a bonus.

    After a rejection the next sibling is tested against the rule's correction of the target's
    distribution. It was drawn from the same distribution if draws are independent (multi-step
    sampling: SpecInfer, Miao et al., 2024), else from that without the rejected token (recursive
    rejection sampling: Sequoia, Chen et al., 2024). A node that was chosen deterministically counts
    as drawn from a point mass.
    """
    walk = Walk(proposal)
    left = target_probs[:, 0].clone()  # of the token that ends the cycle, if no child is accepted
    for level in range(proposal.depth):
        children, real = walk.children()
        undecided = walk.active
        taken, node = torch.zeros_like(undecided), torch.zeros_like(walk.place)
        tokens, drawn_from = walk.tokens(children), walk.drawn_from(target_probs)
        for rank in range(children.shape[1]):
            if rank and not proposal.replacement:
                drawn_from = without(drawn_from, tokens[:, rank - 1])
            token, child = tokens[:, rank, None], children[:, rank]
            here = undecided & real[:, rank]
            if proposal.draft_probs is None:
                drawn_from = torch.zeros_like(left).scatter_(1, token, 1.0)
            probability = rule.acceptance(left, drawn_from, token).squeeze(1)
            probability = torch.where(here, probability, 0.0)
            # By place among the siblings, so that the rows of a batch do not move each other's.
            number = level if proposal.tree is None else level * MOST_SIBLINGS + rank
            accepted = chance.accept(probability, rows, starts, draw_of(number, Purpose.ACCEPT))
            rejected = here & ~accepted
            left = torch.where(rejected[:, None], rule.correction(left, drawn_from), left)
            taken, node = taken | accepted, torch.where(accepted, child, node)
            undecided = undecided & ~accepted
        walk.step(taken, node)
        left = torch.where(taken[:, None], walk.here(target_probs), left)
        if walk.known_to_end():
            break
    walk.bonus = chance.choose(left, rows, starts, draw_of(0, Purpose.EMIT))
    return walk.verdict()


def verify_block(
    proposal: Proposal,
    target_probs: Float[Tensor, "batch positions vocab"],
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """Accept the longest prefix of a chain that passes its test, tried from the whole chain down.

    Prefix i has the weight w_i = min(1, w_i-1 target_i / draft_i); what it leaves for the next
    token is max(0, w_i target - draft), of mass m_i, and it passes with m_i / (m_i + 1 - w_i); the
    whole chain passes with its weight (equations 4 and 5).
    """
    walk = Walk(proposal)
    batch, depth = proposal.tokens.shape
    weights = [target_probs.new_ones(batch)]
    drawn_from = []
    for node in range(depth):
        token = proposal.tokens[:, node : node + 1]
        if proposal.draft_probs is None:
            drawn = torch.zeros_like(target_probs[:, 0]).scatter_(1, token, 1.0)
        else:
            drawn = proposal.draft_probs[:, node].to(target_probs.dtype)
        drawn_from.append(drawn)
        likelihood = drawn.gather(1, token).clamp(min=torch.finfo(drawn.dtype).tiny)
        ratio = target_probs[:, node].gather(1, token) / likelihood
        weights.append((weights[-1] * ratio.squeeze(1)).clamp(max=1))
    num_nodes = walk.num_nodes.squeeze(1)
    accepted = torch.zeros_like(num_nodes)
    undecided = torch.ones_like(walk.active)
    emit = target_probs[:, 0]
    for length in range(depth, -1, -1):
        weight, probs = weights[length], target_probs[:, length]
        left, passes = probs, weight
        if length < depth:
            rest = (weight[:, None] * probs - drawn_from[length]).clamp(min=0)
            mass = rest.sum(-1)
            whole = num_nodes == length
            left = torch.where(whole[:, None] | (mass == 0)[:, None], probs, rest)
            tested = torch.where(mass > 0, mass / (mass + 1 - weight), 0.0)
            passes = torch.where(whole, weight, tested)
        here = undecided & (length <= num_nodes)
        if length:
            passes = torch.where(here, passes, 0.0)
            draw = draw_of(length - 1, Purpose.ACCEPT)
            here = here & chance.accept(passes, rows, starts, draw)
        emit = torch.where(here[:, None], left, emit)
        accepted = torch.where(here, length, accepted)
        undecided = undecided & ~here
    bonus = chance.choose(emit, rows, starts, draw_of(0, Purpose.EMIT))
    return Verdict(accepted, bonus)


class Walk:
    """The way down a proposal, of all rows at once: each at a place, or stopped there.

    Place 0 is the last token, place j + 1 is node j.
    """

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        batch, device = len(proposal.tokens), proposal.tokens.device
        self.place = torch.zeros(batch, dtype=torch.long, device=device)
        self.active = torch.ones(batch, dtype=torch.bool, device=device)
        self.bonus = torch.zeros_like(self.place)
        self.path: list[Tensor] = []
        self.num_accepted = torch.zeros_like(self.place)
        self.num_nodes = send(proposal.num_nodes, device)[:, None]

    def children(self) -> tuple[Int[Tensor, "batch child"], Bool[Tensor, "batch child"]]:
        """Return the children of each row's place, and which of them are there."""
        tree, most = self.proposal.tree, self.proposal.tokens.shape[1]
        if tree is None:
            nodes = self.place[:, None]
        else:
            table = tree.children.expand(len(self.place), -1, -1)
            nodes = table[torch.arange(len(table), device=table.device), self.place]
        real = (nodes >= 0) & (nodes < self.num_nodes)
        return nodes.clamp(min=0, max=most - 1), real

    def tokens(self, nodes: Int[Tensor, "batch child"]) -> Int[Tensor, "batch child"]:
        """Return the tokens of nodes."""
        return self.proposal.tokens.gather(1, nodes)

    def here(self, values: Float[Tensor, "batch position vocab"]) -> Probs:
        """Return what belongs to each row's place."""
        if self.proposal.tree is None:  # active rows are all at the same place
            return values[:, len(self.path)]
        return values[torch.arange(len(values), device=values.device), self.place]

    def drawn_from(self, target_probs: Float[Tensor, "batch position vocab"]) -> Probs:
        """Return the distribution of the first child's draw, in the dtype of `target_probs`."""
        proposal = self.proposal
        if proposal.draft_probs is None:
            return torch.zeros_like(target_probs[:, 0])
        if proposal.sources is None:
            return proposal.draft_probs[:, len(self.path)].to(target_probs.dtype)
        source = proposal.sources[self.place].clamp(min=0)  # a leaf has none, and no child
        every = torch.arange(len(source), device=source.device)
        return proposal.draft_probs[every, source].to(target_probs.dtype)

    def only_active(self, probs: Probs) -> Probs:
        """Return distributions with nothing to choose for rows that have stopped."""
        sure = torch.zeros_like(probs[0])
        sure[:1].fill_(1.0)  # `sure[0] = 1.0` would copy the number from the host, and wait
        return torch.where(self.active[:, None], probs, sure)

    def step(self, taken: Bool[Tensor, " batch"], node: Int[Tensor, " batch"]) -> None:
        """Go on to a node in the rows that take one; the others stop."""
        self.place = torch.where(taken, node + 1, self.place)
        self.path.append(node)
        self.num_accepted = self.num_accepted + taken
        self.active = taken

    def known_to_end(self) -> bool:
        """Whether all rows have stopped, on a CPU; the host does not wait for a device to say."""
        return self.active.device.type == "cpu" and not bool(self.active.any())

    def verdict(self) -> Verdict:
        """Return the accepted path of every row, and its bonus."""
        if self.proposal.tree is None:
            return Verdict(self.num_accepted, self.bonus)
        return Verdict(self.num_accepted, self.bonus, torch.stack(self.path, dim=1))


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


def without(
    probs: Float[Tensor, "*batch vocab"], token: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch vocab"]:
    """Return a distribution without one token, normalised: that of the next draw.

    Where nothing is left, it is uniform: any distribution is right for the next draw, if
    verification knows which (recursive rejection sampling, as in Sequoia, Chen et al., 2024).
    """
    left = probs.scatter(-1, token[..., None], 0.0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, 1 / probs.shape[-1])


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
