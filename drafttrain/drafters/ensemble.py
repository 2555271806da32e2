"""Several drafters in one tree: the union of what its members draft (SpecInfer, Miao et al., 2023).

arXiv:2305.09781, section 3: merge-based token trees. Its members are used as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from drafttrain.core.ops.graphs import Capture
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, Proposal, TargetFeatures, TargetSpec
from drafttrain.drafters.base import Drafter, DraftState, JoinedConfig, TrainingChance
from drafttrain.drafters.shared.merge import best_tree, merged, nodes_of, proposal_of


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(JoinedConfig):
    """Which drafters draft together."""

    def join(self, spec: TargetSpec, members: Sequence[Drafter]) -> "Ensemble":
        for name, member in zip(self.members, members, strict=True):
            if not member.branches:
                # It may keep what it drafted itself, but another member's token was accepted.
                raise ValueError(
                    f"drafter.members must be drafters whose expand takes levels of a tree "
                    f"(branches = True), got {name}"
                )
        return Ensemble(self, spec, members)


@dataclass
class EnsembleState(DraftState):
    """The state of each member."""

    states: list[DraftState] = field(default_factory=list)


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
        return EnsembleState(readout, states)

    def observe(
        self, state: EnsembleState, tokens: Tensor, counts: Sequence[int], features: TargetFeatures
    ) -> None:
        """Let every member read the committed tokens, with the layers that it asked for."""
        for member, own in zip(self.members, state.states, strict=True):
            captured = {layer: features.captured[layer] for layer in member.captures}
            member.observe(own, tokens, counts, replace(features, captured=captured))

    def expand(
        self, state: EnsembleState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        raise AssertionError("an ensemble proposes everything at once")

    def select(self, state: EnsembleState, rows: Sequence[int]) -> None:
        for member, own in zip(self.members, state.states, strict=True):
            member.select(own, rows)

    def propose(
        self, state: EnsembleState, depth: int, width: int = 1, num_nodes: int = 0
    ) -> Proposal:
        """Return the union of the members' trees, or of their chains the most voted path.

        Also a member's chain is drafted as a tree: no member then keeps of its own draft what was
        not accepted.
        """
        most = num_nodes or depth
        drafted = []
        for member, own in zip(self.members, state.states, strict=True):
            deepest = min(depth, member.max_depth or depth)
            proposal = member.propose(own, deepest, width, most)
            if proposal is None:
                proposal = best_tree(member, own, deepest, width, most)
            drafted.append(nodes_of(proposal))
        trees = [merged(opinions, width, most) for opinions in zip(*drafted, strict=True)]
        return proposal_of(trees, depth, width, state.readout.embedding.device)
