"""Drafters whose one pass drafts all tokens, each independently of the others drafted."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.core.ops.layers import MLP, Attention, ByHead, LayerShape, RMSNorm, Rotation
from drafttrain.core.readout import Readout
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.shared.layer import CachedDrafter, LayerState
from drafttrain.runtime.settings import require

# Computes a layer's attention; the layer is given by its number.
Attend = Callable[[int, ByHead], Float[Tensor, "batch head seq head_dim"]]


def mask_token(wanted: int | None, spec: TargetSpec) -> int:
    """Return the token that stands at places to draft.

    None: the padding token. If there is none, or it also ends answers, an id that the tokenizer
    does not use; if every id is used, the padding token after all, or the last id.
    """
    pad, ids = spec.pad_token_id, range(spec.vocab_size)
    mask = (pad if pad in ids else None) if wanted is None else wanted  # some configs have -1
    if wanted is None and (mask is None or mask in spec.eos_token_ids):
        mask = mask if spec.unused_token_id is None else spec.unused_token_id
    mask = spec.vocab_size - 1 if mask is None else mask
    need = f"be one of the {spec.vocab_size:,} ids of {spec.name}"
    require(mask in ids, "drafter.mask_token_id", need, mask)
    return mask


class BlockLayer(nn.Module):
    """A decoder layer whose attention its drafter computes: which keys each slot sees differs.

    normed: whether there is a norm before attention; EAGLE-1 has none.
    """

    def __init__(self, shape: LayerShape, normed: bool = True) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps) if normed else nn.Identity()
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, shape.intermediate_size)

    def enter(
        self, hidden: Float[Tensor, "batch seq hidden"], turn: Rotation
    ) -> tuple[Tensor, ...]:
        """Return rotated queries and keys, and values; after them what else `finish` needs."""
        return self.self_attn.project(self.input_layernorm(hidden), turn)

    def finish(
        self,
        hidden: Float[Tensor, "batch seq hidden"],
        mixed: Float[Tensor, "batch head seq head_dim"],
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return the residual stream with attention and feed-forward added."""
        hidden = hidden + self.self_attn.merge(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class ParallelState(LayerState):
    """A cache, the logits of all depths, once they are drafted, and how many were asked for."""

    logits: Float[Tensor, "batch depth draft_vocab"] | None = None
    depth: int = 0


class ParallelDrafter(CachedDrafter):
    """A drafter of `unroll` tokens in one pass: all nodes of a tree's level have the same children.

    `observe` must start a new proposal (`restart`), which `draft` computes.
    """

    branches = True
    state_type = ParallelState

    @abstractmethod
    def draft(self, state: ParallelState) -> Float[Tensor, "batch depth draft_vocab"]:
        """Return the logits of every depth, from what was observed."""

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> LayerState:
        """Return an empty state; places to draft may reach past the end of the text."""
        return super().begin(readout, first_tokens, capacity + self.unroll + 1)

    def restart(self, state: ParallelState) -> None:
        """Forget the proposal."""
        state.logits, state.depth = None, 0

    def select(self, state: LayerState, rows: Sequence[int]) -> None:
        assert isinstance(state, ParallelState)
        self.restart(state)  # a whole block's logits would be copied in vain
        super().select(state, rows)

    def expand(
        self, state: LayerState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        """Return the next token's logits; they are computed once, whatever was drafted."""
        assert isinstance(state, ParallelState)
        if state.logits is None:
            state.logits = self.draft(state)
        state.depth += 1
        logits = state.logits[:, state.depth - 1, None]
        return logits.expand(-1, 1 if newest is None else newest.shape[1], -1)
