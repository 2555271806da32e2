"""Mistakes that trees add, each put into the real loop through a part that it takes from elsewhere.

Sources: the list of published bugs in the papers and issues that the comments name.
"""

from dataclasses import replace
from typing import Any

import torch
from distribution_controls import TWO, Control, changes, nothing, sets
from distribution_support import Case
from torch import Tensor

from drafttrain.core.chance import Purpose, draw_of
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.tree import Branches
from drafttrain.core.types import Proposal, Verdict
from drafttrain.decode import draft as drafting
from drafttrain.decode import loop, verify
from drafttrain.decode.policy import tree_of_ranks
from drafttrain.decode.verify import Rejection, Walk
from drafttrain.target.model import Target

SIBLINGS = tree_of_ranks([(0,), (1,)])
DRAWN = Case(limit=2, policy=SIBLINGS)
INDEPENDENT = replace(DRAWN, policy=replace(SIBLINGS, replacement=True))
CHOSEN = replace(DRAWN, draft_sampling=GREEDY)
LEVELS = tree_of_ranks([(0,), (1,), (0, 0), (1, 0)])
DEEP = Case(limit=3, policy=LEVELS, sampling=Sampling(1.0, 2, 1.0), draft_sampling=GREEDY)
DEEP_DRAWN = replace(DEEP, draft_sampling=DEEP.sampling)
LONGER = replace(DEEP, limit=5)


class Unchanged(Rejection):
    """A sibling is tested against the whole of the target's distribution again."""

    def correction(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return target_probs


def _probabilities(proposal: Proposal) -> Tensor:
    """How likely each child of the root was to be drawn first."""
    assert proposal.draft_probs is not None
    return proposal.draft_probs[:, 0].gather(1, proposal.tokens)


def _best_kept(proposal: Proposal) -> Proposal:
    """Of two drawn siblings the one of higher probability is kept, as EAGLE-2 keeps chosen ones."""
    best = _probabilities(proposal).argmax(1, keepdim=True)
    tokens, num_nodes = proposal.tokens.gather(1, best), proposal.num_nodes - 1
    return Proposal(tokens, num_nodes, proposal.draft_probs)


def _sorted(proposal: Proposal) -> Proposal:
    """Drawn siblings are tested in the order of their probabilities."""
    order = _probabilities(proposal).argsort(1, descending=True)
    return replace(proposal, tokens=proposal.tokens.gather(1, order))


def _one_of_equals(proposal: Proposal) -> Proposal:
    """Of equal independent draws only one is tested."""
    first, second = proposal.tokens.unbind(1)
    return replace(proposal, num_nodes=proposal.num_nodes - (first == second).long())


def _cut_for_itself(proposal: Proposal) -> Proposal:
    """The second child is dropped for its own probability. (For the first one's it might be.)"""
    first, second = _probabilities(proposal).unbind(1)
    rare = second < (1 - first) / 2  # of the two tokens that were left for it
    return replace(proposal, num_nodes=proposal.num_nodes - rare.long())


def _judged_by_softmax(proposal: Proposal) -> Proposal:
    """Chosen children are tested as if they had been drawn (EAGLE #171, #183, #221, #283)."""
    batch = len(proposal.tokens)
    flat = torch.full((batch, 1, 3), 0.25, dtype=torch.float64)
    flat[:, 0, 1] = 0.5
    return replace(proposal, draft_probs=flat, sources=torch.zeros(3, dtype=torch.long))


def _of_the_root(proposal: Proposal) -> Proposal:
    """All nodes are judged by the distribution of the first level."""
    assert proposal.sources is not None
    return replace(proposal, sources=torch.zeros_like(proposal.sources))


def _whatever_precedes(proposal: Proposal, choices: Tensor) -> Verdict:
    """A match counts even where its parent is none."""
    tree = proposal.tree
    assert tree is not None
    agree = proposal.tokens == choices.gather(1, (tree.parents + 1).expand_as(proposal.tokens))
    depths, deepest = torch.where(agree, tree.depth, 0).max(-1)
    place = torch.where(depths > 0, deepest + 1, 0)
    return Verdict(depths, choices.gather(1, place[:, None]).squeeze(1), tree.path_to(deepest))


def _seen_in_order(self: RaggedCache, branches: Branches) -> Tensor:
    """Every token of the tree sees all that come before it, its parent's siblings too."""
    new, in_tree = branches.seen.shape[1:]
    total = self.past + new
    whole = torch.ones(1, 1, new, total, dtype=torch.bool)
    return whole.tril(total - in_tree + in_tree - new)


def _as_long_as_the_first(self: RaggedCache, branches: Branches) -> Tensor:
    """All rows see as much of what precedes their trees as the longest does."""
    mask = _of_tree(self, branches)
    return mask | mask[:1].logical_and(torch.arange(mask.shape[3]) < max(self.lengths))


def _in_a_row(self: RaggedCache, new: int, device: torch.device) -> Tensor:
    """Positions count the tokens of the tree, not their depths."""
    return self._starts(device) + torch.arange(new, device=device)


def _next_to_it(self: Walk, taken: Tensor, node: Tensor) -> None:
    """After acceptance the walk goes on at the node's neighbour."""
    _step(self, taken, node)
    last = self.proposal.tokens.shape[1]
    self.place = torch.where(taken, (node + 2).clamp(max=last), self.place)


def _wrong_path(self: Target, cache: Any, starts: Any, path: Tensor) -> None:
    """The keys and values of a sibling are kept in place of the accepted node's."""
    _keep(self, cache, starts, torch.where(path > 0, path - 1, path + 1))


_step, _keep, _of_tree = Walk.step, Target.keep, RaggedCache.of_tree

TREE_CONTROLS = [
    # Sequoia and EAGLE-1: the distribution of the next draw must be updated.
    Control("the drafter's distribution is not updated",
            sets(verify, "without", lambda probs, token: probs), DRAWN),
    Control("a rejected token is taken out, the rest not normalised",
            sets(verify, "without", lambda p, token: p.scatter(-1, token[..., None], 0.0)), DRAWN),
    Control("drawn with replacement, verified as without",
            sets(drafting, "without", lambda probs, token: probs), DRAWN),
    Control("drawn without replacement, verified as with",
            changes(lambda proposal: replace(proposal, replacement=True)), DRAWN),
    Control("the target's distribution is not updated",
            nothing, replace(DRAWN, rule=Unchanged())),
    Control("the target's distribution is not updated, independent draws",
            nothing, replace(INDEPENDENT, rule=Unchanged())),
    Control("a chosen child tested by a ratio", changes(_judged_by_softmax), CHOSEN),
    Control("chosen children, each tested against the whole target",
            nothing, replace(CHOSEN, rule=Unchanged())),
    Control("the residual not normalised before the next sibling",
            sets(verify, "residual", lambda p, q: (p - q).clamp(min=0)), DRAWN),
    Control("one uniform for all siblings",
            sets(verify, "draw_of", lambda n, purpose: draw_of(0, Purpose(purpose))), DRAWN),
    Control("one uniform for two draws",
            sets(drafting, "draw_of", lambda n, purpose: draw_of(0, purpose)), INDEPENDENT),
    # EAGLE-2's selection is right for chosen children only.
    Control("the better of two drawn siblings kept", changes(_best_kept), DRAWN),
    Control("drawn siblings sorted by probability", changes(_sorted), DRAWN),
    Control("equal draws tested once", changes(_one_of_equals), INDEPENDENT),
    # DSpark, appendix A.
    Control("a drawn sibling dropped for its own probability", changes(_cut_for_itself), DRAWN),
    Control("every level judged by the first one's distribution", changes(_of_the_root),
            DEEP_DRAWN, drafter="eagle3"),
    Control("matches counted below a mismatch", sets(loop, "verify_greedy", _whatever_precedes),
            Case(TWO, limit=8, policy=LEVELS, sampling=GREEDY), width=1),
    Control("the walk goes on at a neighbour", sets(Walk, "step", _next_to_it), DEEP),
    Control("nodes see their parent's siblings",
            sets(RaggedCache, "of_tree", _seen_in_order), DEEP),
    Control("positions by place in the tree", sets(RaggedCache, "positions", _in_a_row), DEEP),
    Control("the accepted path is not moved together",
            sets(Target, "keep", lambda self, cache, starts, path: None), LONGER),
    Control("a sibling's keys and values are kept", sets(Target, "keep", _wrong_path), LONGER),
    Control("a short row sees what lies past its end, in a tree",
            sets(RaggedCache, "of_tree", _as_long_as_the_first),
            replace(DEEP, prompts=TWO, policy=SIBLINGS), width=1),
]  # fmt: skip
