"""MTP: DeepSeek-V3's sequential module, trained on its own states (DeepSeek-AI, 2024, 2412.19437).

One module drafts every depth, as in FastMTP (arXiv:2509.18362).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.ops.chunked_losses import OutputHead
from drafttrain.core.ops.layer_calls import compiled, dtype_of, recomputed
from drafttrain.core.ops.layers import LayerShape, RMSNorm, Rotation, attend_cached
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import attention_mask, unrolled_predictions
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.drafters.base import TrainingChance, rows_at, start_with
from drafttrain.drafters.serving.mtp_layout import MIMO, VARIANTS, MTPLayout, in_file
from drafttrain.drafters.shared.layer import LayerDrafter, LayerState, ReducedConfig
from drafttrain.drafters.shared.parallel import BlockLayer
from drafttrain.drafters.shared.publications import About, quoted
from drafttrain.drafters.shared.text_losses import losses_along_text
from drafttrain.runtime import limits

Hidden = Float[Tensor, "batch seq hidden"]
NO_TOKEN = -1  # embedded as zero


@dataclass(frozen=True, kw_only=True)
class MTPConfig(ReducedConfig):
    """Shape and loss of an MTP module; embedding and head are the target's.

    variant: mimo reads the target's last hidden state before its final norm, and no token at
    position 0 (as vLLM's mimo_mtp.py); qwen reads it after that norm (as its qwen3_next_mtp.py).
    """

    variant: Annotated[str, limits.one_of(*VARIANTS)]
    unroll: limits.PositiveInt
    depth_decay: limits.PositiveFraction

    layout = MTPLayout()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("own_embedding", not self.own_embedding, "be false: it shares the target's")

    def build(self, spec: TargetSpec) -> "MTP":
        return MTP(self, spec)


class MTPLayer(BlockLayer):
    """proj[norm(hidden); norm(embedding)], a decoder layer, and a final norm of its own."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.hidden_layernorm = RMSNorm(width, eps)
        self.token_layernorm = RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = RMSNorm(width, eps)

    def pairs(self, hidden: Hidden, embedded: Hidden) -> Hidden:
        """Return the layer's input (equation 21)."""
        normed = [self.hidden_layernorm(hidden), self.token_layernorm(embedded)]
        return self.input_proj(torch.cat(normed, dim=-1))

    def leave(self, hidden: Hidden, mixed: Float[Tensor, "batch head seq head_dim"]) -> Hidden:
        """Return the input of the head, which the next depth reads too."""
        return self.final_layernorm(self.finish(hidden, mixed))


class MTP(LayerDrafter):
    """Pairs the last hidden state of position t with token t + 1; deeper, its own state."""

    about = About("An MTP", "2412.19437")
    published = quoted(
        "arXiv:2412.19437",
        "chain of 1",
        {"DeepSeek-V3": (1.8, None)},
        trained_on="pretraining, with the target",
    )
    config: MTPConfig

    def __init__(self, config: MTPConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, spec.hidden_size)
        self.captures = (spec.num_layers,) if config.variant == MIMO else ()
        self.unroll = config.unroll
        self.depth_terms = tuple(f"depth_{depth + 1}" for depth in range(config.unroll))
        self.layer = MTPLayer(self.shape)
        self.embed_tokens = None

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Choose the tokens to draft; copy the final norm, which the head is made for."""
        self.reduce_to_frequent(token_counts)
        start_with(self.layer.final_layernorm, readout.norm)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the token losses of every depth, weighted by decay**depth (FastMTP, equation 2).

        Deeper than the first depth it reads its own state and keys, as in decoding; gradients flow
        through them.
        """
        config, readout, length = self.config, features.readout, batch.tokens.shape[1] - 1
        hidden = self.read(features)[:, :-1].to(dtype_of(self))
        tokens = batch.tokens[:, 1:]
        if config.variant == MIMO:
            tokens = tokens.masked_fill(batch.positions[:, :-1] == 0, NO_TOKEN)
        embedded = self._embedded(readout, functional.pad(tokens, (0, config.unroll - 1)))
        mask = attention_mask(batch, pairs=True)
        past: list[tuple[Tensor, Tensor]] = []
        states = []
        for depth in range(config.unroll):
            own = embedded[:, depth : depth + length]
            turn = self.shape.rotation(batch.positions[:, :-1] + depth, hidden.dtype)
            hidden, newest = recomputed(self._step, hidden, own, turn, mask, past)
            past = [*past, newest]
            states.append(hidden.flatten(0, 1))
        predictions = unrolled_predictions(batch, config.unroll)
        terms = losses_along_text(
            *(config, config.depth_decay, states, predictions, batch, features),
            heads=lambda: [OutputHead.of(self.draft_readout(readout))],
            vocab=self.vocab,
        )
        return dict(zip(self.depth_terms, terms, strict=True))

    def _step(
        self,
        hidden: Hidden,
        embedded: Hidden,
        turn: Rotation,
        mask: Tensor | None,
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Hidden, tuple[Tensor, Tensor]]:
        """Return the state of one depth, and its keys and values.

        A query at index t sees all of depth 0 up to t, and of each later depth its own index t.
        """
        pairs, queries, keys, values = compiled(self._enter, hidden, embedded, turn)
        mixed = unrolled_attention(queries, [*past, (keys, values)], mask)
        return compiled(self.layer.leave, pairs, mixed), (keys, values)

    def _enter(self, hidden: Hidden, embedded: Hidden, turn: Rotation) -> tuple[Tensor, ...]:
        pairs = self.layer.pairs(hidden, embedded)
        return pairs, *self.layer.enter(pairs, turn)

    def _embedded(self, readout: Readout, tokens: Int[Tensor, "batch seq"]) -> Hidden:
        embedded = self.embed(readout, tokens.clamp(min=0))
        return embedded.masked_fill((tokens == NO_TOKEN)[..., None], 0)

    def read(self, features: TargetFeatures) -> Tensor:
        return features.captured[self.captures[0]] if self.captures else features.final_hidden

    def observe(
        self, state: LayerState, tokens: Tensor, counts: Sequence[int], features: TargetFeatures
    ) -> None:
        if self.config.variant == MIMO and not any(state.committed):
            tokens = tokens.clone()
            tokens[:, 0] = NO_TOKEN
        super().observe(state, tokens, counts, features)

    def through(
        self, state: LayerState, turn: Rotation, tokens: Tensor, hidden: Tensor, last: Tensor | None
    ) -> Tensor:
        embedded = self._embedded(state.readout, tokens)
        pairs, queries, keys, values = self._enter(hidden.to(embedded.dtype), embedded, turn)
        mixed = attend_cached((queries, keys, values), state.cache, 0)
        return rows_at(self.layer.leave(pairs, mixed), last)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the module's own keys and tensors; an export adds them to the target's."""
        config = {
            **self.serving_keys(),
            "architectures": list(MTPLayout.architectures),
            "num_nextn_predict_layers": 1,
            "variant": self.config.variant,
            "qk_norm": self.shape.qk_norm,
            "attention_output_bias": self.shape.attention_output_bias,
        }
        return config, in_file(self.own_tensors(), self.config.variant)
