"""Heads on the target's last hidden state, each of which reads the token drafted before it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from drafttrain.core.losses import DepthLossConfig
from drafttrain.core.ops.layer_calls import call_layer, dtype_of
from drafttrain.core.placed_batch import unrolled_predictions
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.drafters.base import DrafterConfig, DraftState, TrainingChance, last_of
from drafttrain.drafters.shared.heads import HeadDrafter, of_depth
from drafttrain.runtime import limits


@dataclass(frozen=True, kw_only=True)
class SequentialConfig(DepthLossConfig, DrafterConfig):
    """What the families have in common: the loss at depth d, from 0, weighs depth_decay**d."""

    depth_decay: limits.PositiveFraction


@dataclass
class SequentialState(DraftState):
    """The states of the newest level's nodes: before their tokens are read, of their parents."""

    hidden: Float[Tensor, "batch width state"] | None = None
    last: Int[Tensor, "batch 1"] | None = None
    depth: int = 0  # tokens read of each path


class SequentialHeads(HeadDrafter[SequentialState]):
    """A recurrence over a chain's tokens, which starts from the final hidden state before them.

    From the state f_t, depth d, from 0, reads token t + 1 + d and predicts token t + 2 + d. A
    node's state follows from its parent's and from its own token: nodes of a tree are independent.
    """

    config: SequentialConfig
    captures = ()
    branches = True

    def __init__(self, config: SequentialConfig, spec: TargetSpec, unroll: int) -> None:
        super().__init__()
        self.config, self.spec, self.unroll = config, spec, unroll
        # Depth d reads d + 2 positions before its token; no position reads another.
        self.reach = unroll + 1
        self.depth_terms = tuple(f"depth_{depth + 1}" for depth in range(unroll))

    @abstractmethod
    def start(self, hidden: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq start"]:
        """Return the states before any token is read, from the target's final hidden states."""

    @abstractmethod
    def follow(
        self,
        depth: int,
        states: Float[Tensor, "batch seq before"],
        tokens: Int[Tensor, "batch seq"],
        readout: Readout,
    ) -> Float[Tensor, "batch seq after"]:
        """Return the states after these tokens, the first of which (depth 0) are committed."""

    def leave(
        self, depth: int, states: Float[Tensor, "batch seq after"]
    ) -> Float[Tensor, "batch seq width"]:
        """Return what the output head of a depth reads of its states."""
        return states

    def starts(self, batch: Batch, hidden: Tensor) -> Float[Tensor, "batch seq start"]:
        """Return the states before any token, of every position of a training batch."""
        return self.start(hidden)

    def newest(
        self, state: SequentialState, hidden: Tensor, counts: Sequence[int]
    ) -> Float[Tensor, "batch 1 start"]:
        """Return the states before any token at each row's last of `counts` new positions."""
        return self.start(last_of(hidden, counts))

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the token losses of every depth, along the text's own tokens."""
        depths, length = self.unroll, batch.tokens.shape[1] - 1
        states = self.starts(batch, features.final_hidden[:, :-1].to(dtype_of(self)))
        tokens = functional.pad(batch.tokens[:, 1:], (0, depths - 1))
        read = []
        for depth in range(depths):
            newest = tokens[:, depth : depth + length]
            states, left = call_layer(self._step, depth, states, newest, features.readout)
            read.append(left.flatten(0, 1))
        predictions = unrolled_predictions(batch, depths)
        return self.compare(read, predictions, batch, features, self.config.depth_decay)

    def _step(
        self, depth: int, states: Tensor, tokens: Tensor, readout: Readout
    ) -> tuple[Tensor, Tensor]:
        states = self.follow(depth, states, tokens, readout)
        return states, self.leave(depth, states)

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> SequentialState:
        return SequentialState(readout)

    def observe(
        self,
        state: SequentialState,
        tokens: Tensor,
        counts: Sequence[int],
        features: TargetFeatures,
    ) -> None:
        state.hidden = self.newest(state, features.final_hidden.to(dtype_of(self)), counts)
        state.last = last_of(tokens[..., None], counts)[..., 0]
        state.depth = 0

    def expand(
        self, state: SequentialState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        """Return the logits after the newest tokens, each read by its parent's state."""
        tokens = state.last if newest is None else newest
        assert tokens is not None, "observe comes before expand"
        before = state.hidden
        assert before is not None
        if parents is not None:
            before = before.gather(1, parents[..., None].expand(-1, -1, before.shape[2]))
        state.hidden, left = self._step(state.depth, before, tokens, state.readout)
        logits: Tensor = of_depth(self.lm_heads, state.depth)(left)
        state.depth += 1
        return logits
