"""The decoder layer of EAGLE drafters: shaped like the target's unless configured otherwise."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core.losses import DepthLossConfig
from drafttrain.core.ops.layer_calls import device_of, dtype_of
from drafttrain.core.ops.layers import LayerShape, Rotation
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.readout import Readout
from drafttrain.core.transfer import send_numbers
from drafttrain.core.tree import Branches
from drafttrain.core.types import TargetFeatures, TargetSpec
from drafttrain.core.vocab import DraftVocab
from drafttrain.drafters.base import Drafter, DrafterConfig, DraftState
from drafttrain.drafters.serving.engines import DRAFTED_TOKENS
from drafttrain.drafters.serving.values import is_number
from drafttrain.runtime import limits
from drafttrain.runtime.settings import require
from drafttrain.runtime.untrusted_input import shown

# The numbers that each kind of scaling needs. Other kinds change with the length of the text, which
# a cache of rotated keys does not allow.
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
TARGET = "target"  # the setting for the target's own scaling


@dataclass(frozen=True, kw_only=True)
class LayerConfig(DrafterConfig):
    """The settings of the layer; null takes the target's value."""

    intermediate_size: limits.PositiveInt | None
    num_attention_heads: limits.PositiveInt | None
    num_key_value_heads: limits.PositiveInt | None
    head_dim: limits.PositiveInt | None
    rms_norm_eps: limits.PositiveFloat | None
    rope_theta: limits.PositiveFloat | None
    rope_scaling: Any  # TARGET, a scaling, or None
    attention_bias: bool
    attention_output_bias: bool
    qk_norm: bool
    own_embedding: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require_scaling(self.rope_scaling)

    def shape(self, spec: TargetSpec, hidden_size: int | None = None) -> "LayerShape":
        """Return the layer's shape for a target; `hidden_size` None takes the target's too.

        ValueError if the numbers of heads do not divide.
        """
        keys = [key.name for key in fields(LayerShape) if key.name != "hidden_size"]
        own = {key: getattr(self, key) for key in keys}
        theirs = {key: getattr(spec, key, None) for key in keys}
        sizes: dict[str, Any] = {k: theirs[k] if own[k] is None else own[k] for k in keys}
        sizes["rope_scaling"] = scaling_of(self.rope_scaling, spec)
        shape = LayerShape(hidden_size=hidden_size or spec.hidden_size, **sizes)
        heads, groups = shape.num_attention_heads, shape.num_key_value_heads
        divide = f"divide drafter.num_attention_heads ({heads})"
        require(heads % groups == 0, "drafter.num_key_value_heads", divide, groups)
        even, need = shape.head_dim % 2 == 0, "be even (rotary pairs)"
        require(even, "drafter.head_dim", need, shape.head_dim)
        if shape.hidden_size != spec.hidden_size and not self.own_embedding:
            raise ValueError(
                f"drafter.own_embedding must be true for drafter.hidden_size={shape.hidden_size}: "
                f"the target's embedding is {spec.hidden_size} wide"
            )
        return shape


@dataclass(frozen=True, kw_only=True)
class ReducedConfig(DepthLossConfig, LayerConfig):
    """The settings of a drafter that may know fewer tokens than its target; null: it knows all."""

    draft_vocab_size: limits.PositiveInt | None


def scaling_of(setting: Any, spec: TargetSpec) -> dict[str, Any] | None:
    """Return the scaling of a drafter's rotary positions, by its drafter.rope_scaling.

    None where the target's is of a kind by which no drafter can rotate.
    """
    if setting != TARGET:
        return dict(setting) if setting else None
    numbers = dict(spec.rope_scaling or {})
    kind = numbers.pop("rope_type", None)
    numbers.pop("partial_rotary_factor", None)  # a drafter rotates its heads whole
    usable = kind in ROPE_SCALINGS and not wrong_scaling(kind, numbers)
    return {"rope_type": kind, **numbers} if usable else None


def require_scaling(scaling: Any) -> None:
    """Raise ValueError for a drafter.rope_scaling by which no drafter could rotate."""
    if scaling in (None, TARGET):
        return
    key = "drafter.rope_scaling"
    need = f"be {TARGET}, null for none, or a scaling such as {{rope_type: linear, factor: 2.0}}"
    require(isinstance(scaling, Mapping), key, need, scaling)
    kind = scaling.get("rope_type")
    known = kind in [*ROPE_SCALINGS]
    require(known, f"{key}.rope_type", f"be one of {', '.join(ROPE_SCALINGS)}", kind)
    for name in ("rope_theta", "partial_rotary_factor"):
        require(name not in scaling, key, f"not hold {name}", scaling)
    numbers = {name: value for name, value in scaling.items() if name != "rope_type"}
    if wrong := wrong_scaling(kind, numbers):
        raise ValueError("; ".join(f"{key} {line}" for line in wrong))


def wrong_scaling(kind: object, numbers: dict[str, Any]) -> list[str]:
    """Return what a scaling of this kind must hold, and does not."""
    complaints = []
    for key in ROPE_SCALINGS.get(str(kind), ()):
        if not is_number(numbers.get(key)) or numbers[key] <= 0:
            got = shown(repr(numbers.get(key)))
            complaints.append(f"must hold {key} for rope_type {shown(kind)}, got {got}")
    for key, value in numbers.items():
        if value is not None and not isinstance(value, bool) and not is_number(value):
            complaints.append(f"must hold numbers, got {shown(key)}={shown(value)}")
    if kind == "llama3" and numbers.get("low_freq_factor") == numbers.get("high_freq_factor"):
        complaints.append("must have high_freq_factor above low_freq_factor")
    return complaints


def layers_to_capture(layers: Sequence[int], spec: TargetSpec) -> tuple[int, ...]:
    """Return a drafter's layers of the target, ascending; ValueError if this does not have them."""
    inside = all(0 <= layer <= spec.num_layers for layer in layers)
    need = f"lie in 0..{spec.num_layers} for {spec.name}"
    require(inside, "drafter.layers", need, sorted(layers))
    return tuple(sorted(layers))


@dataclass
class CachedState(DraftState):
    """The drafter's cache, and the rotation of each position that it may hold."""

    cache: RaggedCache
    table: Rotation

    def turn(self, num_tokens: int) -> Rotation:
        """Return the rotation of the next `num_tokens` positions of each row."""
        if self.cache.even and self.cache.branches is None:
            places: slice | Tensor = slice(start := self.cache.lengths[0], start + num_tokens)
        else:
            places = self.cache.positions(num_tokens, self.table.cos.device)
        return Rotation(self.table.cos[places], self.table.sin[places])


@dataclass
class LayerState(CachedState):
    """Positions of the cache from `committed` on hold the drafter's own unverified nodes."""

    committed: list[int]  # per row
    hidden: Float[Tensor, "batch width hidden"] | None = None  # the newest level's
    level: Branches | None = None  # the newest level of a tree


class CachedDrafter(Drafter[LayerState]):
    """A drafter of decoder layers with a cache, shaped like the target's unless configured."""

    config: LayerConfig
    embed_tokens: nn.Embedding | None
    state_type: ClassVar[type[LayerState]] = LayerState

    def __init__(self, config: LayerConfig, spec: TargetSpec, width: int) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.shape = config.shape(spec, width)

    def own_embedding(self) -> nn.Embedding | None:
        """Return a token embedding of the drafter's own, if it is configured to have one."""
        if not self.config.own_embedding:
            return None
        return nn.Embedding(self.spec.vocab_size, self.shape.hidden_size)

    def embed(
        self, readout: Readout, tokens: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return the embeddings of tokens, from the drafter's own table or the target's."""
        own = self.embed_tokens
        return (readout.embed(tokens) if own is None else own(tokens)).to(dtype_of(self))

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> LayerState:
        """Return an empty state; the first token is never paired: no feature precedes it."""
        places, rows = torch.arange(capacity, device=device_of(self)), len(first_tokens)
        table = self.shape.rotation(places, dtype_of(self))
        return self.state_type(readout, RaggedCache(rows, self.rooms), table, [0] * rows)

    def serving_keys(self) -> dict[str, Any]:
        """Return the keys that serving configurations share; it has one layer."""
        shape, spec = self.shape, self.spec
        keys = {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": spec.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": spec.max_positions,
            "tie_word_embeddings": False,
            "attention_bias": shape.attention_bias,
            "mlp_bias": False,
            "bos_token_id": spec.bos_token_id,
            "eos_token_id": spec.eos_token_ids[0] if spec.eos_token_ids else None,
        }
        if shape.rope_scaling is not None:
            keys["rope_scaling"] = dict(shape.rope_scaling)
        if self.copies_head and self.vocab is not None:
            keys[DRAFTED_TOKENS] = self.vocab.size
        return keys


class LayerDrafter(CachedDrafter):
    """A drafter of one decoder layer: it reads features, and deeper its own hidden states.

    Unless it has a head of its own, it uses the target's: with a reduced vocabulary, the rows of
    its tokens alone (FR-Spec, Zhao et al., 2025, arXiv:2502.14856).
    """

    branches = True
    copies_head = True
    config: ReducedConfig

    def reduce(self, vocab: DraftVocab) -> None:
        self.vocab = vocab
        self.register_buffer("target_ids", vocab.target_ids)

    def reduce_to_frequent(
        self, token_counts: Int[Tensor, " vocab"], coverage: float | None = None
    ) -> None:
        """Draft drafter.draft_vocab_size tokens, the most frequent, or fewer with `coverage`."""
        size = self.config.draft_vocab_size or self.spec.vocab_size
        vocab = DraftVocab.most_frequent(token_counts.to(device_of(self)), size, coverage)
        if vocab is not None:
            self.reduce(vocab)

    def outline(self, target: Callable[[], Any]) -> None:
        """Take the largest draft vocabulary; fewer tokens may cover the data."""
        kept, size = self.config.draft_vocab_size, self.spec.vocab_size
        if kept is not None and kept < size:
            self.reduce(DraftVocab.of(torch.arange(kept, device="cpu"), size))

    def draft_readout(self, readout: Readout) -> Readout:
        """Return the target's readout with the rows of the tokens that can be drafted."""
        return readout if self.vocab is None else readout.with_rows(self.vocab.target_ids)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the weights by name, without the map of a reduced vocabulary."""
        return {name: tensor for name, tensor in self.state_dict().items() if name != "target_ids"}

    @abstractmethod
    def read(self, features: TargetFeatures) -> Float[Tensor, "batch seq hidden"]:
        """Return the hidden states that are paired with the tokens after the features."""

    @abstractmethod
    def through(
        self,
        state: LayerState,
        turn: Rotation,
        tokens: Int[Tensor, "batch new"],
        hidden: Float[Tensor, "batch new read"],
        last: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch width hidden"]:
        """Return the layer's output for pairs of tokens and hidden states, within the cache's pass.

        last: the place of each row's last pair, for which alone it is wanted; None: of all pairs.
        """

    def logits(
        self, readout: Readout, hidden: Float[Tensor, "batch width hidden"]
    ) -> Float[Tensor, "batch width draft_vocab"]:
        """Return logits from the output of `advance`; by the target's head, unless overridden."""
        readout = self.draft_readout(readout)
        return readout.logits(hidden.to(readout.head.dtype))

    def observe(
        self, state: LayerState, tokens: Tensor, counts: Sequence[int], features: TargetFeatures
    ) -> None:
        """Replace the drafter's own nodes by pairs of true features, the last token's included."""
        state.cache.rollback(state.committed)
        state.level = None
        state.hidden = self.advance(state, tokens, self.read(features), list(counts))
        state.committed = [old + new for old, new in zip(state.committed, counts, strict=True)]
        state.cache.rollback(state.committed)  # the rest was padding

    def expand(
        self, state: LayerState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        """Return the next logits; the drafter's own hidden states replace the target's."""
        assert state.hidden is not None, "observe comes before expand"
        if newest is not None:
            hidden = state.hidden
            if parents is not None:
                state.cache.branches = state.level = Branches.level(state.level, parents)
                hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[2]))
            state.hidden = self.advance(state, newest, hidden, None)
        return self.logits(state.readout, state.hidden)

    def advance(
        self, state: LayerState, tokens: Tensor, hidden: Tensor, counts: list[int] | None
    ) -> Float[Tensor, "batch width hidden"]:
        """Append pairs of tokens and hidden states; return the output of each row's last pair.

        counts: how many pairs of each row are real; None returns the outputs of all of them.
        """
        turn = state.turn(tokens.shape[1])
        inputs = [tokens, hidden, turn.cos, turn.sin]
        if counts is not None:
            inputs.append(send_numbers(counts, tokens.device) - 1)

        def run(
            tokens: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, last: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            return (self.through(state, Rotation(cos, sin), tokens, hidden, last),)

        # Graphs read the embedding where it was, and a drafter may meet another copy of its target.
        (found,) = state.cache.run(run, inputs, counts, key=state.readout.embedding.data_ptr())
        return found
