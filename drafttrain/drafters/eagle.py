"""EAGLE-1: one layer that continues the target's features (Li et al., 2024, arXiv:2401.15077)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core import losses
from drafttrain.core.losses import TokenLossConfig
from drafttrain.core.ops.chunked_losses import OutputHead, TargetLaw, chunked_losses, loss_terms
from drafttrain.core.ops.layer_calls import call_layer, device_of, dtype_of
from drafttrain.core.ops.layers import MLP, RMSNorm, Rotation, document_mask
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, LossTerm, Nodes, TargetFeatures, TargetSpec
from drafttrain.drafters.base import (
    About,
    Capabilities,
    Drafter,
    DraftState,
    Expansion,
    TrainingChance,
    last_of,
    load_exactly,
    positions_to_predict,
)
from drafttrain.drafters.serving.eagle_layout import EagleLayout, rescaled
from drafttrain.drafters.shared.layer import (
    LayerConfig,
    LayerShape,
    embed,
    own_embedding,
    serving_keys,
)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(TokenLossConfig, LayerConfig):
    """Shape and loss of EAGLE-1; its width is the target's, whose head it uses.

    token_weight: of the whole of `losses`, beside feature_weight.
    """

    fc_bias: bool
    feature_weight: float
    token_weight: float
    feature_noise: float

    layout = EagleLayout()

    def __post_init__(self) -> None:
        TokenLossConfig.__post_init__(self)
        LayerConfig.__post_init__(self)
        for key in ("feature_weight", "token_weight", "feature_noise"):
            if getattr(self, key) < 0:
                raise ValueError(f"drafter.{key} must be at least 0, got {getattr(self, key)}")

    def build(self, spec: TargetSpec) -> "Eagle":
        """Make the drafter with random weights."""
        return Eagle(self, spec)


class EagleLayer(nn.Module):
    """A Llama decoder layer without the norm before attention, as EAGLE-1 has it."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = shape.attention(shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(
        self,
        values: Float[Tensor, "batch seq hidden"],
        turn: Rotation,
        attend: "RaggedCache | Tensor | None",
    ) -> Float[Tensor, "batch seq hidden"]:
        """Run the layer; `attend` is the cache while decoding, else the training mask or None."""
        if isinstance(attend, RaggedCache):
            mixed = self.self_attn.cached(values, turn, attend)
        else:
            mixed = self.self_attn(values, turn, attend)
        values = values + mixed
        return values + self.mlp(self.post_attention_layernorm(values))


@dataclass
class EagleState(DraftState):
    """The drafter's cache; positions from `committed` on hold its own, unverified, nodes."""

    cache: RaggedCache
    table: Rotation
    committed: list[int]  # per row
    hidden: Float[Tensor, "batch 1 hidden"] | None = (
        None  # what the next node reads: the last's own
    )

    @classmethod
    def empty(
        cls, drafter: Drafter, shape: LayerShape, readout: Readout, rows: int, capacity: int
    ) -> "EagleState":
        """Allocate for a drafter with one layer of the given shape, EAGLE's or EAGLE-3's."""
        dtype, device = dtype_of(drafter), device_of(drafter)
        table = shape.rotation(torch.arange(capacity, device=device), dtype)
        return cls(readout, RaggedCache(rows), table, [0] * rows)

    def turn(self, num_tokens: int) -> Rotation:
        """Return the rotation of the next `num_tokens` positions of each row."""
        if self.cache.even:
            start = self.cache.lengths[0]
            stop = start + num_tokens
            return Rotation(self.table.cos[start:stop], self.table.sin[start:stop])
        places = self.cache.positions(num_tokens, self.table.cos.device)
        return Rotation(self.table.cos[places], self.table.sin[places])

    def commit(self, counts: Sequence[int]) -> None:
        """Keep of what was appended last `counts` positions per row; the rest was padding."""
        pairs = zip(self.committed, counts, strict=True)
        self.committed = [length + count for length, count in pairs]
        self.cache.rollback(self.committed)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.cache.select(rows)
        self.committed = [self.committed[row] for row in rows]
        if self.hidden is not None:
            self.hidden = self.hidden[list(rows)]


class Eagle(Drafter[EagleState]):
    """Pairs the final hidden state of position t with token t + 1 and predicts feature t + 1."""

    about = About("An EAGLE", "2401.15077")
    captures = ()
    depth_terms = ("depth_1",)  # training shows it one depth

    def __init__(self, config: EagleConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config: EagleConfig = config
        self.spec = spec
        self.shape = config.shape(spec)
        width = spec.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(self.shape)])
        self.embed_tokens = own_embedding(config.own_embedding, spec, width)

    @property
    def capabilities(self) -> Capabilities:
        """Any depth; training shows it depth 1 only."""
        return Capabilities(trainable=True, branches=False, max_depth=None, unroll=1)

    def _pairs(
        self, readout: Readout, tokens: Tensor, features: Tensor
    ) -> Float[Tensor, "batch seq hidden"]:
        embedded = embed(self.embed_tokens, readout, tokens, dtype_of(self))
        return self.fc(torch.cat([embedded, features.to(dtype_of(self))], dim=-1))

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Feature regression plus the losses on tokens (equations 2 to 4: soft cross-entropy)."""
        inputs = features.final_hidden.to(dtype_of(self))
        if self.training and self.config.feature_noise:
            uniform = chance.uniform_like(inputs, batch.document)
            inputs = inputs + (uniform - 0.5) * self.config.feature_noise
        pairs = self._pairs(features.readout, batch.tokens[:, 1:], inputs[:, :-1])
        turn = self.shape.rotation(batch.positions[:, :-1], pairs.dtype)
        predicted = call_layer(self.layers[0], pairs, turn, document_mask(batch.document[:, :-1]))
        rows, ahead = positions_to_predict(batch, 2)
        predicted = predicted[rows, ahead - 2]
        truth = features.final_hidden[rows, ahead - 1]
        place = torch.arange(len(rows), device=rows.device)
        law = TargetLaw(features.readout, truth, place, None)
        (token,) = loss_terms(
            [1.0],
            chunked_losses(
                self.config,
                [1.0],
                [OutputHead.of(features.readout)],
                [predicted],
                place[None],
                batch.tokens[rows, ahead],
                law,
            ),
        )
        regression = losses.feature_regression(predicted, truth).sum()
        return {
            "feature": LossTerm(self.config.feature_weight, regression, token.count),
            "depth_1": LossTerm(self.config.token_weight, token.sum, token.count, token.correct),
        }

    def _logits(self, readout: Readout, predicted: Tensor) -> Tensor:
        return readout.logits(predicted.to(readout.head.dtype))

    def begin(
        self, readout: Readout, first_tokens: Int[Tensor, " batch"], capacity: int
    ) -> EagleState:
        """Allocate the cache; the first token is never paired, it has no feature before it."""
        return EagleState.empty(self, self.shape, readout, len(first_tokens), capacity)

    def _advance(self, state: EagleState, tokens: Tensor, features: Tensor) -> Tensor:
        turn = state.turn(tokens.shape[1])
        return self.layers[0](self._pairs(state.readout, tokens, features), turn, state.cache)

    def observe(
        self,
        state: EagleState,
        tokens: Int[Tensor, "batch new"],
        counts: Sequence[int],
        features: TargetFeatures,
    ) -> None:
        """Replace own nodes by pairs of true features, the last token's among them."""
        state.cache.rollback(state.committed)
        state.hidden = last_of(self._advance(state, tokens, features.final_hidden), counts)
        state.commit(counts)

    def expand(self, state: EagleState, nodes: Nodes | None) -> Expansion:
        """Continue from the predicted feature: it stands in for the target's."""
        assert state.hidden is not None, "observe comes before expand"
        if nodes is not None:
            state.hidden = self._advance(state, nodes.tokens, state.hidden)
        return Expansion(self._logits(state.readout, state.hidden))

    def select(self, state: EagleState, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        state.select(rows)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the SafeAILab layout; fc.bias is there for engines whose fc always has one.

        It is zero unless drafter.fc_bias is set (then the export refuses it: vLLM drops it).
        SafeAILab's `bias` key stays out: both engines would take it for a bias of the attention,
        find none in the file, and draft from uninitialised memory.
        """
        config = {
            # SGLang takes the first it knows; vLLM refuses the first name and wraps the second.
            "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
            "model_type": "llama",
            **serving_keys(self.shape, self.spec),
        }
        tensors = dict(self.state_dict())
        if self.embed_tokens is None:
            tensors = rescaled(tensors, self.spec.embedding_scale)
        tensors.setdefault("fc.bias", torch.zeros(self.spec.hidden_size, dtype=dtype_of(self)))
        return config, tensors

    def from_serving(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Load the SafeAILab layout; without drafter.fc_bias only an fc.bias of zero may be there.

        Its embedding is the target's, and ignored, unless drafter.own_embedding is set.
        """
        bias = tensors.get("fc.bias")
        if not self.config.fc_bias and bias is not None and bool(bias.any()):
            raise ValueError("fc.bias must be zero: vLLM drops it, so the drafter would differ")
        own = self.state_dict()
        shared = [n for n in ("fc.bias", "embed_tokens.weight") if n not in own]
        held = {name: t for name, t in tensors.items() if name not in shared}
        if self.embed_tokens is None:
            held = rescaled(held, 1 / self.spec.embedding_scale)
        load_exactly(self, held)
