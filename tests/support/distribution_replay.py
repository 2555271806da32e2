"""Runs the real decode loop once for every sequence of answers that chance could give.

What comes out is the exact joint distribution of the outputs of a batch, through everything that
the loop is made of: key-value caches, positions, warpers, stops, limits, rows that leave.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from distribution_support import Case, Distribution, Small, target_distribution
from shape_checker import unchecked
from torch import Tensor

from drafttrain.core.chance import Draw
from drafttrain.decode import loop
from drafttrain.decode.autoregressive import autoregressive_decode_batch
from drafttrain.decode.loop import Cycle
from drafttrain.drafters.base import Drafter

EXACT = 1e-12  # what rounding may do
CHECKED = 16  # shapes are checked in the first of so many decodings, and so on
Key = tuple[int, int, int]  # (row of the case, start, draw): whatever chance is asked for
Walk = dict[Key, tuple[float, float]]  # the interval in which each key's uniform lies


class Replay:
    """A Chance that follows walks, and where one leaves it free, takes the first answer there is.

    Every key names one uniform, as in `SeededChance`; a walk says in which interval it lies, so
    whoever asks for a key twice gets answers of the same uniform. Rows walk * group to
    walk * group + group - 1 of the batch belong to one walk. `siblings` are the walks not taken.
    """

    def __init__(self, walks: Sequence[Walk], group: int) -> None:
        self.walks = [dict(walk) for walk in walks]
        self.group = group
        self.asked: set[Key] = set()
        self.num_repeated = 0  # keys asked for more than once in one decoding
        self.siblings: list[Walk] = []

    def _answer(self, row: int, start: int, draw: int, edges: Sequence[float]) -> int:
        """Return i with edges[i] <= uniform < edges[i + 1]."""
        walk, member = self.walks[row // self.group], row % self.group
        key = (member, start, draw)
        self.num_repeated += (row, start, draw) in self.asked
        self.asked.add((row, start, draw))
        low, high = walk.get(key, (0.0, 1.0))
        parts = [(max(low, left), min(high, right)) for left, right in pairwise(edges)]
        # Slivers of rounding are no answers; they differ from one batch to the next.
        answer, *others = [i for i, (left, right) in enumerate(parts) if right - left > 1e-14]
        self.siblings.extend({**walk, key: parts[other]} for other in others)
        walk[key] = parts[answer]
        return answer

    def accept(
        self, probability: Tensor, rows: Sequence[int], starts: Sequence[int], draw: Draw
    ) -> Tensor:
        draws = [draw] * len(rows) if isinstance(draw, int) else draw
        answers = [
            self._answer(row, start, number, (0.0, p, 1.0)) == 0
            for row, start, number, p in zip(rows, starts, draws, probability.tolist(), strict=True)
        ]
        return torch.tensor(answers)

    def choose(
        self, probs: Tensor, rows: Sequence[int], starts: Sequence[int], draw: Draw
    ) -> Tensor:
        draws = [draw] * len(rows) if isinstance(draw, int) else draw
        cumulative = probs.double().cumsum(-1)
        edges = torch.cat(
            [torch.zeros_like(cumulative[:, :1]), cumulative / cumulative[:, -1:]], dim=1
        )
        answers = [
            self._answer(row, start, number, row_edges)
            for row, start, number, row_edges in zip(
                rows, starts, draws, edges.tolist(), strict=True
            )
        ]
        return torch.tensor(answers)


class Seen(set[str]):
    """What happened in some walk: a proof over walks in which nothing happens proves nothing."""

    def __init__(self, case: Case, ends: Sequence[int]) -> None:
        super().__init__()
        self.case, self.ends = case, torch.tensor(ends)

    def __call__(self, cycle: Cycle) -> None:
        """Take in one verification."""
        case, verdict, proposal = self.case, cycle.verdict, cycle.proposal
        accepted = verdict.num_accepted
        tokens, path = proposal.tokens, verdict.path
        if path is not None:
            tokens = tokens.gather(1, path)
        ends = torch.isin(tokens, self.ends)
        ends &= torch.arange(tokens.shape[1]) < accepted[:, None]
        lengths = [len(case.prompts[row % len(case.prompts)]) for row in cycle.rows]
        said = torch.tensor(cycle.starts) - torch.tensor(lengths)
        full = accepted == proposal.num_nodes.clamp(max=proposal.depth)
        other = torch.zeros_like(full)
        if proposal.tree is not None and path is not None:
            first = proposal.tree.children[:, :, 0].expand(len(path), -1)
            came = torch.cat([torch.zeros_like(path[:, :1]), path[:, :-1] + 1], dim=1)
            other = (first.gather(1, came) != path) & (
                torch.arange(path.shape[1]) < accepted[:, None]
            )
            other = other.any(-1)
        self |= {
            name
            for name, happened in {
                "nothing proposed": proposal.num_nodes == 0,
                "first rejected": (accepted == 0) & ~full,
                "partly accepted": (accepted > 0) & ~full,
                "all accepted": (accepted > 0) & full,
                "another child accepted": other,
                "end inside an accepted run": ends.any(-1),
                "limit inside an accepted run": said + accepted + 1 > case.limit,
            }.items()
            if bool(happened.any())
        }
        if len(set(accepted.tolist())) > 1:
            self.add("rows accept differently")
        if len(cycle.rows) % len(case.prompts):
            self.add("a row has left")


@dataclass(frozen=True)
class Replayed:
    """The distribution of what the loop emitted, the walks that took, and what happened there."""

    distribution: Distribution
    num_walks: int
    num_repeated: int
    seen: Seen


def replay(small: Small, drafter: Drafter | None, case: Case, width: int) -> Replayed:
    """Run the real loop over all answers of chance, depth-first; `width` walks in each batch.

    width 1 is the loop as it is called: one walk, the rows of the case. Wider batches hold many
    walks, as rows that know nothing of each other, at a hundredth of the price.
    """
    group = len(case.prompts)
    distribution: Distribution = {}
    seen = Seen(case, small.target.spec.eos_token_ids)
    pending: list[Walk] = [{}]
    num_walks = num_repeated = num_decodings = 0
    while pending:
        chance = Replay(pending[-width:], group)
        del pending[-width:]
        prompts = case.prompts * len(chance.walks)
        settings: dict[str, Any] = {
            "sampling": case.sampling,
            "max_new_tokens": case.limit,
            "chance": chance,
            "rows": range(len(prompts)),
            "stop_strings": case.stop_strings,
        }
        with unchecked(num_decodings % CHECKED > 0):
            if drafter is None:
                decoded = autoregressive_decode_batch(small.target, prompts, **settings)
            else:
                decoded = loop.speculative_decode_batch(
                    small.target,
                    drafter,
                    prompts,
                    policy=case.policy or case.depth,
                    draft_sampling=case.draft_sampling,
                    rule=case.rule,
                    record=seen,
                    **settings,
                )
        num_decodings += 1
        outputs = [row.tokens for row in decoded]
        for index, walk in enumerate(chance.walks):
            said = tuple(outputs[index * group : (index + 1) * group])
            distribution[said] = distribution.get(said, 0.0) + math.prod(
                b - a for a, b in walk.values()
            )
        pending += chance.siblings
        num_walks += len(chance.walks)
        num_repeated += chance.num_repeated
    return Replayed(distribution, num_walks, num_repeated, seen)


def distance(one: Distribution, other: Distribution) -> float:
    """The largest difference between the probabilities of an output."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one | other)


def deviation(small: Small, drafter: Drafter, case: Case, width: int) -> float:
    """The check itself: how far the loop's distribution is from the target's own."""
    return distance(
        replay(small, drafter, case, width).distribution, target_distribution(small, case)
    )
