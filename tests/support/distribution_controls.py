"""Mistakes of published code and of guides, each put into the real loop.

A mistake is a line of the loop changed in place, or one of its functions or rules replaced. The
sources of those that were published are in the comments.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from distribution_support import Case
from torch import Tensor

from drafttrain.core import sampling
from drafttrain.core.chance import Purpose, draw_of
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.decode import draft, loop, rows, verify
from drafttrain.decode.verify import Rejection
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


def edit(patch: pytest.MonkeyPatch, function: Any, old: str, new: str, *owners: Any) -> None:
    """Change one place in the source of a function, in every module or class that holds it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, (
        f"{function.__name__} has {source.count(old)} places that read {old!r}: it has changed,"
        " and this control must change with it"
    )
    found: dict[str, Any] = {}
    exec(source.replace(old, new), inspect.unwrap(function).__globals__, found)
    for owner in owners:
        patch.setattr(owner, function.__name__, found[function.__name__])


def edits(function: Any, old: str, new: str, *owners: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The same, to be done later."""
    return lambda patch: edit(patch, function, old, new, *owners)


def sets(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace a function of the loop."""
    return lambda patch: patch.setattr(owner, name, value)


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


_residual, _visible, _positions = verify.residual, RaggedCache.visible, RaggedCache.positions

SPLIT = "num_nodes = torch.full((len(drafted),), depth)"
CUT = """sure = [l.gather(1, t[:, None])[:, 0] > 0.45 for l, t in zip(draft_probs, tokens)]
    num_nodes = torch.stack(sure, dim=1).int().cumprod(1).sum(1)"""

CONTROLS = [
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
        edits(
            draft.draft_chain,
            "draft_probs.append(probs)",
            "draft_probs.append(logits.softmax(-1))",
            loop,
        ),
        Case(sampling=COLD),
    ),
    Control(
        "draft_probs recorded before top-p",
        edits(
            draft.draft_chain,
            "draft_probs.append(probs)",
            "draft_probs.append(logits.softmax(-1))",
            loop,
        ),
        Case(draft_sampling=TOP_P),
    ),
    Control(
        "top-p without renormalising draft_probs",
        edits(sampling.probabilities, "probs = probs / probs.sum(-1, keepdim=True)", "pass", draft),
        Case(draft_sampling=TOP_P),
    ),
    # DeepSpec #31.
    Control(
        "drawn from bfloat16, recorded in full precision",
        edits(
            draft.draft_chain,
            "chance.choose(probs,",
            "chance.choose(probs.bfloat16(),",
            loop,
        ),
        at_least=1e-5,
    ),
    Control(
        "draft ids taken for target ids",
        edits(
            draft.draft_chain,
            "chance.choose(probs,",
            "chance.choose(probs[:, drafter.vocab.target_ids],",
            loop,
        ),
        drafter="eagle3",
    ),
    # The guides' q = softmax for a draft that was the argmax; EAGLE #171, #183, #221.
    Control(
        "a greedy draft judged by its softmax probability",
        edits(
            draft.draft_chain,
            "token = logits.argmax(-1)",
            "token = logits.argmax(-1); draft_probs.append(logits.softmax(-1))",
            loop,
        ),
        Case(draft_sampling=GREEDY),
    ),
    # DSpark, appendix A: which nodes are verified may not depend on what was drawn.
    Control("nodes cut after they were drawn", edits(draft.draft_chain, SPLIT, CUT, loop)),
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
        edits(loop.verify, "if sampling.greedy and rule.lossless:", "if True:", loop),
    ),
    Control("accepted where it is the argmax", nothing, Case(rule=Argmax())),
    Control("a probability threshold", nothing, Case(rule=Threshold())),
    Control("the ratio upside down", nothing, Case(rule=Inverted())),
    Control("5 % more accepted", nothing, Case(rule=AdditiveSlack())),
    Control(
        "the first draft always accepted",
        edits(
            verify.verify_chain,
            "accepted &= active",
            "accepted = active & (accepted | (node == 0))",
            loop,
        ),
    ),
    Control(
        "accepting goes on after a rejection",
        edits(verify.verify_chain, "accepted &= active", "pass", loop),
    ),
    Control(
        "greedy matches counted after a mismatch",
        edits(verify.verify_greedy, ".int().cumprod(-1)", ".int()", loop),
        Case(((0, 1, 1, 1),), sampling=GREEDY),
        drafter="ngram",
    ),
    Control(
        "bonus from the distribution of the last node",
        edits(verify.verify_chain, "target_probs[:, node + 1]", "target_probs[:, node]", loop),
        Case(depth=1),
    ),
    Control(
        "verification a row late",
        edits(
            loop.verify,
            "probabilities(logits, sampling)",
            "probabilities(logits.roll(1, 1), sampling)",
            loop,
        ),
    ),
    # transformers #47912: an end inside the accepted run was passed over.
    Control(
        "only the newest token is looked at for the end",
        edits(
            rows.Stops.cut, "enumerate(new[:room])", "list(enumerate(new[:room]))[-1:]", rows.Stops
        ),
    ),
    Control(
        "the bonus is forgotten after full acceptance",
        edits(
            loop.speculative_decode_batch,
            "new = [row[:count] for",
            "new = [row[: count - (count > depth)] for",
            loop,
        ),
        Case(depth=1),
    ),
    Control(
        "a limit one short inside a run",
        edits(
            rows.Stops.cut,
            "self.limit - len(output)",
            "self.limit - len(output) - (len(new) > 2)",
            rows.Stops,
        ),
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
            lambda self, new, device: (max(self.lengths) > 0) + _positions(self, new, device),
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
            rows.Rows,
            "starts",
            property(lambda self: [row.num_prompt_tokens for row in self.active]),
        ),
    ),
    # Batches.
    Control(
        "rows share a uniform",
        sets(rows.Rows, "names", property(lambda self: [0] * len(self.active))),
        Case(((0, 1, 0), (1, 1, 0)), limit=1, depth=1),
        width=1,
    ),
    Control(
        "chance keyed by place, not by row",
        sets(rows.Rows, "names", property(lambda self: list(range(len(self.active))))),
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
