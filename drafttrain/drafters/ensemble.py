"""Several drafters in one tree, and prompt lookup alone where that is enough.

The tree is the union of what the members draft (SpecInfer, Miao et al., 2023, arXiv:2305.09781,
section 3: merge-based token trees). Prompt lookup costs nothing, which the other members do: where
its copy is expected to yield more tokens in the same time than the tree of all, it drafts alone.
What is expected of either is learned, row by row, from what the target went on to write. The
members are used as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.core.ops.graphs import Capture
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, Proposal, TargetFeatures, TargetSpec
from drafttrain.drafters.base import Drafter, DraftState, JoinedConfig, TrainingChance
from drafttrain.drafters.ngram import Ngram, NgramState, Text
from drafttrain.drafters.shared.backlog import Backlog
from drafttrain.drafters.shared.merge import Node, best_tree, merged, nodes_of, proposal_of
from drafttrain.runtime import limits

# How often a copied token was the next one, by the length of the match before it, the last entry
# for all longer ones: of 600 conversations (chats, code, mathematics, stories), as tokens of
# SmolLM2. An accepted token lengthens the match of the next one.
COPIED = (0.2, 0.4, 0.5, 0.6, 0.65, 0.65, 0.65, 0.7, 0.75, 0.85)
TOGETHER = (0.6,) * len(COPIED)  # and a token of all members, by depth: a guess
PRIOR_TESTS = 8.0  # tests that what is expected before any test counts for
DECAY = 0.99  # of the weight of a test, from one to the next
PATIENCE = 32  # plain steps after which the members that did not pay are tried again
# drafter.verify_cost of a small model: in float32 on a CPU; in bfloat16 on a CPU, or on a GPU.
IN_FLOAT32, ELSEWHERE = 0.1, 0.01

Nodes = tuple[str, list[Node]]  # of the member of that name


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(JoinedConfig):
    """Which drafters draft together, and what time they take, as a share of a plain pass.

    draft_cost: of the others than prompt lookup, by depth. verify_cost: of a token in a pass.
    """

    draft_cost: limits.NonNegativeFloat
    verify_cost: limits.NonNegativeFloat | None

    def join(self, spec: TargetSpec, members: Sequence[Drafter]) -> "Ensemble":
        for name, member in zip(self.members, members, strict=True):
            if not member.branches:
                # It may keep what it drafted itself, but another member's token was accepted.
                raise ValueError(
                    f"drafter.members must be drafters whose expand takes levels of a tree "
                    f"(branches = True), got {name}"
                )
        return Ensemble(self, spec, members)


class Acceptance:
    """How often tokens of each class are accepted; the newest tests count most."""

    def __init__(self, expected: Sequence[float]) -> None:
        self.rates, self.tests = [*expected], [PRIOR_TESTS] * len(expected)

    def learn(self, first: int, num_accepted: int, num_tested: int) -> None:
        """Take in a path whose i-th token is of the class first + i."""
        for token in range(num_tested):
            place = min(first + token, len(self.rates) - 1)
            self.tests[place] = DECAY * self.tests[place] + 1
            self.rates[place] += ((token < num_accepted) - self.rates[place]) / self.tests[place]

    def yields(self, first: int, depth: int) -> list[float]:
        """Return what paths of 0 to `depth` tokens are expected to yield, the bonus included."""
        places = (min(first + token, len(self.rates) - 1) for token in range(depth))
        rates = (self.rates[place] for place in places)
        return list(accumulate(accumulate(rates, mul, initial=1.0)))


@dataclass
class RowState:
    """What a row's drafts came to, and what is drafted for it in this cycle."""

    text: Text | None  # that prompt lookup searches; None: it is no member
    alone: Acceptance  # of prompt lookup, by the length of the match before a token
    together: Acceptance  # of all members, by depth
    copied: list[int] = field(default_factory=list)  # what prompt lookup drafts, or would
    matched: int = 0  # the length of its match
    depth: int = 0  # to which all members drafted; 0: they did not
    waited: int = PATIENCE  # plain steps since they did


@dataclass
class EnsembleState(DraftState):
    """The state of each member, what it has not read yet, and what each row has shown."""

    states: list[DraftState] = field(default_factory=list)
    unread: list[Backlog] = field(default_factory=list)  # by member, prompt lookup last
    rows: list[RowState] = field(default_factory=list)
    begun: bool = False  # whether the prompt was read


class Ensemble(Drafter[EnsembleState]):
    """Drafts the tree of its members' best continuations, cut by their votes; all are chosen."""

    branches = True

    def __init__(
        self, config: EnsembleConfig, spec: TargetSpec, members: Sequence[Drafter]
    ) -> None:
        super().__init__()
        self.config: EnsembleConfig = config
        self.spec = spec
        self._members = nn.ModuleList(members)
        # Without prompt lookup all members draft in every cycle.
        self.lookup_member = next((each for each in members if isinstance(each, Ngram)), None)
        self.captures = tuple(sorted({layer for each in members for layer in each.captures}))
        depths = [each.max_depth for each in members]
        self.max_depth = None if None in depths else max(each or 0 for each in depths)

    @property
    def members(self) -> list[Drafter]:
        """The drafters that draft together, the first of which wins ties."""
        return [member for member in self._members if isinstance(member, Drafter)]

    @property
    def max_positions(self) -> int | None:
        """The longest text that all members can draft for."""
        theirs = [each.max_positions for each in self.members]
        return min((most for most in theirs if most is not None), default=None)

    def to(self, *args: Any, **kwargs: Any) -> "Ensemble":
        """Move every member by its own rules: some keep their dtype."""
        for member in self.members:
            member.to(*args, **kwargs)
        return self

    def use_graphs(self, capture: Capture) -> None:
        for member in self.members:
            member.use_graphs(capture)

    def attach(self, tokenizer: Any) -> None:
        for member in self.members:
            member.attach(tokenizer)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        raise ValueError(f"drafter={self.config.name} is used as it is; train its members")

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> EnsembleState:
        states = [member.begin(readout, first_tokens, capacity) for member in self.members]
        pairs = zip(self.members, states, strict=True)
        unread = [
            Backlog(*pair) for pair in sorted(pairs, key=lambda pair: pair[0] is self.lookup_member)
        ]
        texts: Sequence[Text | None] = [None] * len(first_tokens)
        for own in states:
            texts = own.texts if isinstance(own, NgramState) else texts
        rows = [RowState(text, Acceptance(COPIED), Acceptance(TOGETHER)) for text in texts]
        return EnsembleState(readout, states, unread, rows)

    def observe(
        self, state: EnsembleState, tokens: Tensor, counts: Sequence[int], features: TargetFeatures
    ) -> None:
        """Keep the committed tokens until a member drafts, and learn from them.

        What prompt lookup would have copied is compared with them, whoever drafted.
        """
        told = tokens.cpu()  # the host waits for them once
        for unread in state.unread:
            copies = unread.drafter is self.lookup_member
            captured = {layer: features.captured[layer] for layer in unread.drafter.captures}
            unread.add(told if copies else tokens, counts, replace(features, captured=captured))
            if copies or not state.begun:
                unread.read()
        state.begun = True
        for row, committed, count in zip(state.rows, told.tolist(), counts, strict=True):
            pairs = list(zip(row.copied, committed[:count], strict=False))
            wrong = (place for place, (copied, token) in enumerate(pairs) if copied != token)
            right = next(wrong, len(pairs))
            row.alone.learn(row.matched - 1, right, min(right + 1, len(pairs)))
            row.together.learn(0, count - 1, min(count, row.depth))
            row.copied, row.depth = [], 0

    def expand(
        self, state: EnsembleState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        raise AssertionError("an ensemble proposes everything at once")

    def select(self, state: EnsembleState, rows: Sequence[int]) -> None:
        for unread in state.unread:
            unread.select(rows)
        state.rows = [state.rows[row] for row in rows]

    def propose(
        self, state: EnsembleState, depth: int, width: int = 1, num_nodes: int = 0
    ) -> Proposal:
        """Return for each row what prompt lookup copies, or the union of all members' trees.

        Of chains the union is the most voted path. Also a member's chain is drafted as a tree: no
        member then keeps of its own draft what was not accepted.
        """
        most = num_nodes or depth
        embedding, token_s = state.readout.embedding, self.config.verify_cost
        if token_s is None:
            slow = embedding.device.type == "cpu" and embedding.dtype == torch.float32
            token_s = IN_FLOAT32 if slow else ELSEWHERE
        together_s = 1 + token_s * most + self.config.draft_cost * depth  # a plain pass takes 1
        copies = [self._copies(row, depth, token_s, together_s) for row in state.rows]
        drafted = self._drafted(state, depth, width, most) if None in copies else []
        trees: list[list[Node]] = []
        members: list[Mapping[Node, str]] = []
        for place, (row, alone) in enumerate(zip(state.rows, copies, strict=True)):
            opinions = drafted[place] if alone is None else alone
            trees.append(merged([nodes for _, nodes in opinions], width, most))
            if alone is None:
                row.waited, row.depth = 0, max(map(len, trees[-1]), default=0)
            by = {node: name for name, nodes in reversed(opinions) for node in nodes}
            members.append({node: by[node] for node in trees[-1]})
        proposal = proposal_of(trees, depth, width, embedding.device)
        return replace(proposal, members=members)

    def _copies(
        self, row: RowState, depth: int, token_s: float, together_s: float
    ) -> list[Nodes] | None:
        """Return the nodes of prompt lookup where it drafts alone; None: all members draft.

        No node is a plain step, where neither pays.
        """
        lookup = self.lookup_member
        if lookup is None or row.text is None:
            return None
        row.copied, row.matched = lookup.match(row.text, depth, len(COPIED))
        tokens = row.alone.yields(row.matched - 1, len(row.copied))
        rates = [each / (1 + token_s * drafted) for drafted, each in enumerate(tokens)]
        best = rates.index(max(rates))
        pay = row.together.yields(0, depth)[-1] / together_s > rates[best]
        if pay or (best == 0 and row.waited >= PATIENCE):
            return None
        row.waited += best == 0
        path = [tuple(row.copied[:end]) for end in range(1, best + 1)]
        return [(lookup.config.name, path)]

    def _drafted(
        self, state: EnsembleState, depth: int, width: int, most: int
    ) -> list[list[Nodes]]:
        """Return by row the nodes that each member drafts; prompt lookup comes last."""
        drafted: list[list[Nodes]] = [[] for _ in state.rows]
        for unread in state.unread:
            unread.read()
            member = unread.drafter
            deepest = min(depth, member.max_depth or depth)
            proposal = member.propose(unread.state, deepest, width, most)
            if proposal is None:
                proposal = best_tree(member, unread.state, deepest, width, most)
            for row, nodes in zip(drafted, nodes_of(proposal), strict=True):
                row.append((member.config.name, nodes))
        return drafted
