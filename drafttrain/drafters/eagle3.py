"""EAGLE-3: fused features and training-time test (Li et al., 2025, arXiv:2503.01840)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.ops.chunked_losses import OutputHead
from drafttrain.core.ops.layer_calls import compiled, device_of, dtype_of, recomputed
from drafttrain.core.ops.layers import (
    MLP,
    Attention,
    LayerShape,
    LentLinear,
    RMSNorm,
    Rotation,
    attend_cached,
)
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import Predictions, attention_mask, unrolled_predictions
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.core.vocab import DraftVocab
from drafttrain.drafters.base import TrainingChance, draft_vocab_size, rows_at, start_with
from drafttrain.drafters.serving.eagle3_layouts import VARIANTS, Eagle3Layout
from drafttrain.drafters.serving.layer_ids import LAYER_IDS, usual_layers, written_for_sglang
from drafttrain.drafters.shared.layer import (
    LayerDrafter,
    LayerState,
    ReducedConfig,
    layers_to_capture,
)
from drafttrain.drafters.shared.publications import About, quoted, spec_bench
from drafttrain.drafters.shared.text_losses import losses_along_text
from drafttrain.runtime import limits

Hidden = Float[Tensor, "batch seq hidden"]


@dataclass(frozen=True, kw_only=True)
class FusingConfig(ReducedConfig):
    """What drafters of fused features have in common; null takes the target's, or the usual."""

    layers: limits.DistinctLayers | None
    hidden_size: limits.PositiveInt | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    draft_vocab_coverage: limits.PositiveFraction
    unroll: limits.PositiveInt
    depth_decay: limits.PositiveFraction

    def __post_init__(self) -> None:
        super().__post_init__()
        one = not (self.norm_before_fc and self.fc_norm)
        need = "be false with drafter.norm_before_fc=true, one norm over all captured layers"
        self.require("fc_norm", one, need)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FusingConfig):
    """Shape and loss of EAGLE-3."""

    norm_output: bool

    layout = Eagle3Layout()

    def build(self, spec: TargetSpec) -> "Eagle3":
        return Eagle3(self, spec)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return low, middle and high layers: (2, L//2, L-3), or (1, L//2, L-1) if that has repeats.

    Engines drop a repeated id, and then fc does not fit (targets of six layers or fewer).
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    shallow = (1, num_layers // 2, num_layers - 1)
    return tuple(sorted({*shallow}))


class Eagle3Layer(nn.Module):
    """A decoder layer that attends to [norm(embedding); norm(hidden)]; residual from hidden.

    `norm_before_residual`: from norm(hidden) instead, as speculators trains by default.
    """

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = Attention(shape, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, shape.intermediate_size)

    def inputs(
        self, embedded: Float[Tensor, "batch seq hidden"], hidden: Float[Tensor, "batch seq hidden"]
    ) -> tuple[Float[Tensor, "batch seq twice"], Float[Tensor, "batch seq hidden"]]:
        """Return the input of attention, and the residual stream that its output is added to."""
        normed = self.hidden_norm(hidden)
        inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return inputs, normed if self.norm_before_residual else hidden

    def enter(
        self,
        projected: Float[Tensor, "batch seq heads"],
        weight: Float[Tensor, "heads hidden"],
        hidden: Float[Tensor, "batch seq hidden"],
        turn: Rotation,
    ) -> tuple[Float[Tensor, "batch seq hidden"], Tensor, Tensor, Tensor]:
        """Return the residual stream, queries, keys and values of one depth of the unroll.

        projected, weight: the embeddings' part of the projection (`Attention.joined`), from this
        depth's own tokens on.
        """
        normed = self.hidden_norm(hidden)
        projected = functional.linear(normed, weight) + projected
        queries, keys, values = self.self_attn.by_head(projected, turn)
        return normed if self.norm_before_residual else hidden, queries, keys, values

    def finish(
        self, hidden: Float[Tensor, "batch seq hidden"], mixed: Float[Tensor, "batch seq hidden"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return the residual stream with attention and feed-forward added."""
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(LayerDrafter):
    """Pairs fused features of position t with token t + 1; deeper, pairs its own hidden state."""

    about = About("An EAGLE-3", "2503.01840")
    published = (
        *quoted(
            "arXiv:2503.01840, table 1",
            "tree of 60 nodes",
            {
                "Llama 3.1 8B": (4.44, 6.23),
                "Llama 3.3 70B": (4.12, 5.88),
                "Vicuna 13B": (5.51, 6.62),
            },
            trained_on="ShareGPT and UltraChat, answers by the target",
            prompts="mean of MT-bench, HumanEval, GSM8K, Alpaca, CNN/DM; greedy, batch 1",
        ),
        *spec_bench({"Vicuna 13B": (3.02, 5.71)}),
    )
    copies_head = False
    config: FusingConfig

    def __init__(self, config: FusingConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, config.hidden_size or spec.hidden_size)
        self.captures = layers_to_capture(config.layers or default_layers(spec.num_layers), spec)
        self.unroll = config.unroll
        self.norm_output: bool = getattr(config, "norm_output", False)
        self.depth_terms = tuple(f"depth_{depth + 1}" for depth in range(config.unroll))
        width, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        read = len(self.captures) * spec.hidden_size
        self.fc = nn.Linear(read, width, bias=False)
        self.input_norm = RMSNorm(read, eps) if config.norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(spec.hidden_size, eps) for _ in self.captures)
        self.midlayer = Eagle3Layer(self.shape, config.norm_before_residual)
        self.norm = RMSNorm(width, eps)
        self.lm_head = LentLinear(width, spec.vocab_size, bias=False)
        self.embed_tokens = self.own_embedding()

    def reduce(self, vocab: DraftVocab) -> None:
        super().reduce(vocab)
        place = {"device": device_of(self), "dtype": self.lm_head.weight.dtype}
        self.lm_head = LentLinear(self.shape.hidden_size, vocab.size, bias=False, **place)

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Choose the draft vocabulary; copy the target's norm and the kept rows of its head."""
        self.reduce_to_frequent(token_counts, self.config.draft_vocab_coverage)
        if self.shape.hidden_size != self.spec.hidden_size:
            return  # the target's weights have another width
        if self.embed_tokens is not None:
            start_with(self.embed_tokens, readout.embedding)
        head = readout.head if self.vocab is None else readout.head[self.vocab.target_ids]
        start_with(self.lm_head, head)
        start_with(self.norm, readout.norm)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the token losses of every unrolled depth, weighted by decay**depth (section 3.2).

        The target's distribution is renormalised over the draft vocabulary; positions whose most
        likely token is outside it contribute zero and are counted. A hard label outside it
        contributes zero.
        """
        steps, length = self.config.unroll, batch.tokens.shape[1] - 1
        hidden = self.read(features, length)
        tokens = functional.pad(batch.tokens[:, 1:], (0, steps - 1))
        embedded = self.embed(features.readout, tokens)
        mask = attention_mask(batch, pairs=True)
        # The projection of [norm(embedding); norm(hidden)] is a sum, and every depth reads the same
        # embeddings, shifted by one: their part is computed once.
        layer = self.midlayer
        projected, weight = layer.self_attn.joined(layer.input_layernorm(embedded))
        past: list[tuple[Tensor, Tensor]] = []
        states = []
        for depth in range(steps):
            turn = self.shape.rotation(batch.positions[:, :-1] + depth, hidden.dtype)
            own = projected[:, depth : depth + length]
            hidden, state, newest = recomputed(self._step, own, weight, hidden, turn, mask, past)
            past = [*past, newest]
            states.append(state.flatten(0, 1))
        return self.compare(states, unrolled_predictions(batch, steps), batch, features)

    def _step(
        self,
        projected: Float[Tensor, "batch seq heads"],
        weight: Float[Tensor, "heads hidden"],
        hidden: Hidden,
        turn: Rotation,
        mask: Tensor | None,
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Hidden, Hidden, tuple[Tensor, Tensor]]:
        """Return the input of the next depth, that of the head, and the keys and values.

        A query at index t sees all of depth 0 up to t, and of each later depth only its own index
        t: the branch that it drafted itself (training-time test, section 3.2).
        """
        # Attention is called separately, between two compiled parts that do not depend on the
        # depth: one program serves all depths.
        residual, queries, keys, values = compiled(
            self.midlayer.enter, projected, weight, hidden, turn
        )
        mixed = unrolled_attention(queries, [*past, (keys, values)], mask)
        hidden, state = compiled(self._finish, residual, mixed)
        return hidden, state, (keys, values)

    def _finish(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.midlayer.finish(residual, self.midlayer.self_attn.merge(mixed))
        hidden = self._leave(hidden)
        return hidden, self._before_head(hidden)

    def compare(
        self,
        states: list[Float[Tensor, "_ hidden"]],
        predictions: Predictions,
        batch: Batch,
        features: TargetFeatures,
    ) -> Losses:
        """Return the losses of every depth by name, as `losses_along_text` does."""
        terms = losses_along_text(
            *(self.config, self.config.depth_decay, states, predictions, batch, features),
            heads=lambda: [OutputHead(self.lm_head.weight)],
            lent=[self.lm_head],
            vocab=self.vocab,
        )
        return dict(zip(self.depth_terms, terms, strict=True))

    def read(self, features: TargetFeatures, length: int | None = None) -> Hidden:
        """Return the fused features of the first `length` positions; None: of all positions."""
        return self.fuse([features.captured[layer][:, :length] for layer in self.captures])

    def fuse(self, captured: list[Tensor]) -> Hidden:
        """Return the fusion of the captured layers' hidden states, "batch seq hidden" each."""
        captured = [hidden.to(dtype_of(self)) for hidden in captured]
        if self.fc_norm is not None:
            captured = [norm(hidden) for norm, hidden in zip(self.fc_norm, captured, strict=True)]
        read = torch.cat(captured, dim=-1)
        return self.fc(read if self.input_norm is None else self.input_norm(read))

    def _leave(self, hidden: Tensor) -> Tensor:
        """Return the state that the next depth reads: before the norm, unless `norm_output`."""
        return self.norm(hidden) if self.norm_output else hidden

    def _before_head(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm_output else self.norm(hidden)

    def through(
        self, state: LayerState, turn: Rotation, tokens: Tensor, hidden: Tensor, last: Tensor | None
    ) -> Tensor:
        inputs, residual = self.midlayer.inputs(self.embed(state.readout, tokens), hidden)
        attention = self.midlayer.self_attn
        mixed = attention.merge(attend_cached(attention.project(inputs, turn), state.cache, 0))
        # Positions before the last need keys and values only.
        return self._leave(self.midlayer.finish(rows_at(residual, last), rows_at(mixed, last)))

    def logits(self, readout: Readout, hidden: Tensor) -> Tensor:
        return self.lm_head(self._before_head(hidden))

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        spec = self.spec
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": draft_vocab_size(self),
            **self.serving_keys(),
        }
        for key in VARIANTS:
            if getattr(self.config, key, False):
                config[key] = True
        if self.shape.hidden_size != spec.hidden_size:
            config["target_hidden_size"] = spec.hidden_size
        config[LAYER_IDS] = list(self.captures)  # for vLLM, of which one runner reads no other
        if list(self.captures) != usual_layers(spec.num_layers):
            config["eagle_config"] = {  # for SGLang, which reads the default without it
                LAYER_IDS: written_for_sglang(self.captures, spec.architecture),
                "use_aux_hidden_state": True,
            }
        config["num_aux_hidden_states"] = len(self.captures)
        tensors = self.own_tensors()
        if self.vocab is not None:
            tensors["d2t"], tensors["t2d"] = self.vocab.d2t, self.vocab.t2d
        return config, tensors
