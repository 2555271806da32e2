"""Mistakes of published code and of guides, each put into the real loop.

A mistake enters where the loop takes a part from elsewhere: a function, a rule, the source of
chance. The sources of those that were published are in the comments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from distribution_support import Case
from torch import Tensor

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Proposal, Verdict
from drafttrain.decode import draft as drafting
from drafttrain.decode import loop, verify
from drafttrain.decode.policy import Policy
from drafttrain.decode.rows import Rows, Stops
from drafttrain.decode.verify import Rejection, Rule, verify_draws, verify_greedy
from drafttrain.drafters.base import Drafter, DraftState
from drafttrain.target import model as target

PLAIN_CASE = Case()
COLD, TOP_P = Sampling(0.5, 0, 1.0), Sampling(1.0, 0, 0.6)
TWO = ((0, 1, 0, 1, 0), (1, 1))  # the rows of a batch


@dataclass(frozen=True)
class Control:
    """A mistake, and the smallest setting of the loop in which it shows."""

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    case: Case = PLAIN_CASE
    drafter: str = "medusa"
    width: int = 1000  # walks in one batch; 1 where the mistake is about the rows of a batch
    at_least: float = 1e-3  # how far the distribution must be off


def sets(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace a function of the loop."""
    return lambda patch: patch.setattr(owner, name, value)


def changes(change: Callable[[Proposal], Proposal]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change every proposal after it was drafted."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(loop, "draft", lambda *told: change(drafting.draft(*told)))

    return plant


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The mistake is in the rule of the case."""


# --- rules that guides print ---


class Threshold(Rejection):
    """A draft is accepted where the target finds it probable enough."""

    def acceptance(self, target_probs: Tensor, draft_probs: Tensor, token: Tensor) -> Tensor:
        return (target_probs.gather(1, token) > 0.3).to(target_probs.dtype)


class Inverted(Rejection):
    """The ratio upside down."""

    def acceptance(self, target_probs: Tensor, draft_probs: Tensor, token: Tensor) -> Tensor:
        return super().acceptance(draft_probs, target_probs, token)


class Unwarped(Rejection):
    """The ratio from raw target probabilities, the rest from warped ones (COLD is a square)."""

    def acceptance(self, target_probs: Tensor, draft_probs: Tensor, token: Tensor) -> Tensor:
        raw = target_probs**COLD.temperature
        return super().acceptance(raw / raw.sum(-1, keepdim=True), draft_probs, token)


class Argmax(Rejection):
    """Accepted where it is the target's first choice, else the target is sampled."""

    def acceptance(self, target_probs: Tensor, draft_probs: Tensor, token: Tensor) -> Tensor:
        return (token == target_probs.argmax(-1, keepdim=True)).to(target_probs.dtype)

    def correction(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return target_probs


class AdditiveSlack(Rejection):
    """A little more is accepted than should be: the drafter's probability counted 5 % lower."""

    def acceptance(self, target_probs: Tensor, draft_probs: Tensor, token: Tensor) -> Tensor:
        return super().acceptance(target_probs, 0.95 * draft_probs, token)


# --- caches, positions, rows ---


def _one_short(self: Any, cache: Any, lengths: list[int]) -> None:
    """After partial acceptance the newest accepted token is forgotten too."""
    pairs = zip(lengths, cache.lengths, strict=True)
    cache.rollback([new if new == old else max(new - 1, 1) for new, old in pairs])


def _one_long(self: Any, cache: Any, lengths: list[int]) -> None:
    """The rejected token stays."""
    pairs = zip(lengths, cache.lengths, strict=True)
    cache.rollback([min(new + 1, old) for new, old in pairs])


def _as_the_worst(self: Any, cache: Any, lengths: list[int]) -> None:
    """Every row is rolled back as far as the row that accepted least."""
    drops = [old - new for new, old in zip(lengths, cache.lengths, strict=True)]
    cache.rollback([old - max(drops) for old in cache.lengths])


# --- drafting ---


@dataclass
class ChangedChance:
    """Chance, asked about other probabilities than the loop gives."""

    real: Chance
    of_choice: Callable[[Tensor], Tensor] = lambda probs: probs
    always: int | None = None  # the draw that is accepted whatever its probability

    def accept(
        self, probability: Tensor, rows: Sequence[int], starts: Sequence[int], draw: int
    ) -> Tensor:
        accepted = self.real.accept(probability, rows, starts, draw)
        return accepted | (draw == self.always)

    def choose(
        self, probs: Tensor, rows: Sequence[int], starts: Sequence[int], draw: int
    ) -> Tensor:
        return self.real.choose(self.of_choice(probs), rows, starts, draw)


def _recorded_raw(policy: Policy, drafter: Drafter, state: DraftState, *rest: Any) -> Proposal:
    """draft_probs are the softmax of the logits, however the token was chosen."""
    seen: list[Tensor] = []
    real = drafter.expand

    def expand(state: DraftState, newest: Tensor | None, parents: Tensor | None = None) -> Tensor:
        seen.append(real(state, newest, parents))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "expand", expand)
        proposal = drafting.draft(policy, drafter, state, *rest)
    return replace(proposal, draft_probs=torch.cat(seen, dim=1).softmax(-1))


def _recorded_whole(
    policy: Policy,
    drafter: Drafter,
    state: DraftState,
    sampling: Sampling,
    chance: Chance,
    *rest: Any,
) -> Proposal:
    """Tokens are drawn from bfloat16, draft_probs recorded in full precision."""
    chance = ChangedChance(chance, Tensor.bfloat16)
    return drafting.draft(policy, drafter, state, sampling, chance, *rest)


def _draft_ids(
    policy: Policy,
    drafter: Drafter,
    state: DraftState,
    sampling: Sampling,
    chance: Chance,
    *rest: Any,
) -> Proposal:
    """The place of a token in the draft vocabulary is offered as its id."""
    assert drafter.vocab is not None
    ids = drafter.vocab.target_ids
    chance = ChangedChance(chance, lambda probs: probs[:, ids])
    return drafting.draft(policy, drafter, state, sampling, chance, *rest)


def _cut_by_probability(*arguments: Any) -> Proposal:
    """Nodes are cut once it is known what was drawn."""
    proposal = drafting.draft(*arguments)
    assert proposal.draft_probs is not None
    sure = proposal.draft_probs.gather(2, proposal.tokens[..., None])[..., 0] > 0.45
    return replace(proposal, num_nodes=sure.int().cumprod(1).sum(1))


def _unnormalised(logits: Tensor, sampling: Sampling) -> Tensor:
    """The tokens that top-p leaves keep the probabilities they had before it."""
    before = probabilities(logits, replace(sampling, top_p=1.0))
    return torch.where(probabilities(logits, sampling) > 0, before, 0.0)


# --- verifying ---


def _first_accepted(
    rule: Rule, proposal: Proposal, target_probs: Tensor, chance: Chance, *rest: Any
) -> Verdict:
    """The first drafted token is accepted whatever its probability."""
    always = draw_of(0, Purpose.ACCEPT)
    return verify_draws(rule, proposal, target_probs, ChangedChance(chance, always=always), *rest)


def _after_a_rejection(
    rule: Rule,
    proposal: Proposal,
    target_probs: Tensor,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """A rejection does not end the chain: later nodes are judged and counted too."""
    assert proposal.draft_probs is not None
    batch, depth = proposal.tokens.shape
    count, emit = torch.zeros(batch, dtype=torch.long), target_probs[:, 0]
    for node in range(depth):
        token, drawn = proposal.tokens[:, node : node + 1], proposal.draft_probs[:, node]
        probability = rule.acceptance(target_probs[:, node], drawn, token).squeeze(1)
        good = chance.accept(probability, rows, starts, draw_of(node, Purpose.ACCEPT))
        correction = rule.correction(target_probs[:, node], drawn)
        emit = torch.where(good[:, None], target_probs[:, node + 1], correction)
        count += good
    return Verdict(count, chance.choose(emit, rows, starts, draw_of(0, Purpose.EMIT)))


def _all_matches(proposal: Proposal, choices: Tensor) -> Verdict:
    """Greedy matches count after a mismatch too."""
    count = (proposal.tokens == choices[:, :-1]).sum(-1)
    return Verdict(count, choices.gather(1, count[:, None]).squeeze(1))


def _bonus_of_last_node(rule: Rule, proposal: Proposal, probs: Tensor, *rest: Any) -> Verdict:
    """After full acceptance the bonus comes from the last node's own distribution."""
    return verify_draws(rule, proposal, torch.cat([probs[:, :-1], probs[:, -2:-1]], 1), *rest)


# --- ends ---


def _only_the_newest(self: Stops, output: Sequence[int], new: Sequence[int]) -> tuple[int, bool]:
    """A stop token before the newest one is passed over."""
    room = self.limit - len(output)
    return min(len(new), room), len(new) >= room or new[-1] in self.tokens


def _one_less(self: Stops, output: Sequence[int], new: Sequence[int]) -> tuple[int, bool]:
    """The limit is one short inside a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self, "limit", self.limit - (len(new) > 2))
        return _cut(self, output, new)


def _without_bonus(self: Rows, new: Sequence[Sequence[int]], stops: Stops) -> Any:
    """At depth 1, two new tokens are a draft and the bonus."""
    return _commit(self, [tokens[:1] for tokens in new], stops)


_residual, _visible, _positions = verify.residual, RaggedCache.visible, RaggedCache.positions
_cut, _commit, _verify = Stops.cut, Rows.commit, loop.verify


def _taken_back(proposal: Proposal) -> Proposal:
    """A drafted token is left out because it turned out improbable (DSpark, appendix A)."""
    assert proposal.draft_probs is not None
    last = proposal.tokens[:, -1:]
    rare = proposal.draft_probs[:, -1].gather(1, last)[:, 0] < 0.3
    return replace(proposal, num_nodes=proposal.num_nodes - rare.long())


CONTROLS = [
    Control("a drafted token taken back for its own probability", changes(_taken_back)),
    # HF transformers PR #28508 corrected the second; the first is the commonest of guides.
    Control("after a rejection, sample the target", sets(verify, "residual", lambda p, q: p)),
    Control(
        "softmax of the residual",
        sets(verify, "residual", lambda p, q: (p - q).clamp(min=0).softmax(-1)),
    ),
    Control(
        "residual of drafter less target", sets(verify, "residual", lambda p, q: _residual(q, p))
    ),
    Control(
        "residual with absolute values",
        sets(verify, "residual", lambda p, q: (p - q).abs() / (p - q).abs().sum(-1, keepdim=True)),
    ),
    # transformers #47932: the candidate's logits were recorded before they were processed.
    Control(
        "draft_probs recorded from raw logits",
        sets(loop, "draft", _recorded_raw),
        Case(sampling=COLD),
    ),
    Control(
        "draft_probs recorded before top-p",
        sets(loop, "draft", _recorded_raw),
        Case(draft_sampling=TOP_P),
    ),
    Control(
        "top-p without renormalising draft_probs",
        sets(drafting, "probabilities", _unnormalised),
        Case(draft_sampling=TOP_P),
    ),
    # DeepSpec #31.
    Control(
        "drawn from bfloat16, recorded in full precision",
        sets(loop, "draft", _recorded_whole),
        at_least=1e-5,
    ),
    Control(
        "draft ids taken for target ids",
        sets(loop, "draft", _draft_ids),
        drafter="eagle3",
    ),
    # The guides' q = softmax for a draft that was the argmax; EAGLE #171, #183, #221.
    Control(
        "a greedy draft judged by its softmax probability",
        sets(loop, "draft", _recorded_raw),
        Case(draft_sampling=GREEDY),
    ),
    # DSpark, appendix A: which nodes are verified may not depend on what was drawn.
    Control("nodes cut after they were drawn", sets(loop, "draft", _cut_by_probability)),
    Control(
        "target distribution not warped",
        sets(loop, "probabilities", lambda logits, sampling: logits.softmax(-1)),
        Case(sampling=COLD),
    ),
    Control(
        "ratio from the target's raw distribution", nothing, Case(sampling=COLD, rule=Unwarped())
    ),
    # EAGLE PR #47, issue #50: greedy posterior at temperature > 0.
    Control(
        "argmax verification at temperature 1",
        sets(
            loop,
            "verify",
            lambda rule, proposal, logits, *rest: verify_greedy(proposal, logits.argmax(-1)),
        ),
    ),
    Control("accepted where it is the argmax", nothing, Case(rule=Argmax())),
    Control("a probability threshold", nothing, Case(rule=Threshold())),
    Control("the ratio upside down", nothing, Case(rule=Inverted())),
    Control("5 % more accepted", nothing, Case(rule=AdditiveSlack())),
    Control(
        "the first draft always accepted",
        sets(loop, "verify_draws", _first_accepted),
    ),
    Control(
        "accepting continues after a rejection",
        sets(loop, "verify_draws", _after_a_rejection),
    ),
    Control(
        "greedy matches counted after a mismatch",
        sets(loop, "verify_greedy", _all_matches),
        Case(((0, 1, 1, 1),), sampling=GREEDY),
        drafter="ngram",
    ),
    Control(
        "bonus from the distribution of the last node",
        sets(loop, "verify_draws", _bonus_of_last_node),
        Case(depth=1),
    ),
    Control(
        "verification a row late",
        sets(
            loop,
            "verify",
            lambda rule, proposal, logits, *rest: _verify(rule, proposal, logits.roll(1, 1), *rest),
        ),
    ),
    # transformers #47912: an end inside the accepted run was passed over.
    Control(
        "only the newest token is looked at for the end",
        sets(Stops, "cut", _only_the_newest),
    ),
    Control(
        "the bonus is forgotten after full acceptance",
        sets(Rows, "commit", _without_bonus),
        Case(depth=1),
    ),
    Control(
        "a limit one short inside a run",
        sets(Stops, "cut", _one_less),
    ),
    Control(
        "rejected tokens stay in the cache",
        sets(target.Target, "rollback", lambda self, cache, lengths: None),
    ),
    Control("one rejected token stays", sets(target.Target, "rollback", _one_long)),
    Control("one accepted token is lost", sets(target.Target, "rollback", _one_short)),
    Control(
        "positions one further after the prompt",
        sets(
            RaggedCache,
            "positions",
            lambda self, new, device: any(self.lengths) + _positions(self, new, device),
        ),
        drafter="ngram",
        width=1,
    ),
    Control(
        "drafts see each other both ways",
        sets(
            RaggedCache,
            "causal",
            lambda self, new, device: torch.ones(1, 1, new, self.past + new, dtype=torch.bool),
        ),
        drafter="ngram",
        width=1,
    ),
    # Chance: one uniform for two choices.
    Control(
        "acceptance by the uniform that drew the draft",
        sets(
            verify,
            "draw_of",
            lambda node, purpose: draw_of(node, Purpose(purpose if purpose == 2 else 0)),
        ),
    ),
    Control(
        "the same uniforms in every cycle",
        sets(
            Rows,
            "starts",
            property(lambda self: [row.num_prompt_tokens for row in self.active]),
        ),
    ),
    # Batches.
    Control(
        "rows share a uniform",
        sets(Rows, "names", property(lambda self: [0] * len(self.active))),
        Case(((0, 1, 0), (1, 1, 0)), limit=1, depth=1),
        width=1,
    ),
    Control(
        "chance keyed by place, not by row",
        sets(Rows, "names", property(lambda self: list(range(len(self.active))))),
        Case(((0, 1, 0), (1, 1)), limit=2, depth=1),
        drafter="ngram",
        width=1,
    ),
    Control(
        "every row rolled back as the worst",
        sets(target.Target, "rollback", _as_the_worst),
        Case(((1, 0, 1, 0), (0, 0, 1)), limit=4, depth=1, sampling=Sampling(1.0, 2, 1.0)),
        drafter="ngram",
        width=1,
    ),
    Control(
        "a short row sees what lies past its end",
        sets(
            RaggedCache,
            "visible",
            lambda self, places: _visible(self, places.amax(0).expand_as(places)),
        ),
        Case(TWO, limit=2, depth=1, sampling=Sampling(1.0, 2, 1.0)),
        drafter="ngram",
        width=1,
    ),
]
