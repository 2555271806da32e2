"""EAGLE-1: one layer that continues the target's features (Li et al., 2024, arXiv:2401.15077).

With `unroll` above 1 it trains on its own features too, as HASS does (Zhang et al., 2024,
arXiv:2408.15766).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.losses import FirstMiss, feature_regression
from drafttrain.core.ops.chunked_losses import OutputHead, TargetProbs, chunked_losses, loss_terms
from drafttrain.core.ops.layer_calls import compiled, dtype_of, recomputed
from drafttrain.core.ops.layers import Rotation, attend_cached
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import attention_mask, unrolled_predictions
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, LossTerm, TargetFeatures, TargetSpec
from drafttrain.drafters.base import TrainingChance, rows_at
from drafttrain.drafters.serving.eagle_layout import EagleLayout, rescaled
from drafttrain.drafters.shared.embedding_scale import EmbeddingScale
from drafttrain.drafters.shared.layer import LayerDrafter, LayerState, ReducedConfig
from drafttrain.drafters.shared.parallel import BlockLayer
from drafttrain.drafters.shared.publications import About, quoted, spec_bench
from drafttrain.runtime import limits

INPUTS = "tokens", "features"  # of `fc`, in this order


@dataclass(frozen=True, kw_only=True)
class EagleConfig(ReducedConfig):
    """Shape and loss of EAGLE-1; its width is the target's, because it uses the target's head.

    token_weight: the weight of all `losses` together, as feature_weight is of the regression.
    scale_embeddings: whether embeddings are made as large as features before they are joined.
    reads: which of its two inputs it reads; the other one is zero (the paper's ablation).
    unroll: the alignment steps of HASS; 1 trains on the target's features alone.
    """

    fc_bias: bool
    feature_weight: limits.NonNegativeFloat
    token_weight: limits.NonNegativeFloat
    feature_noise: limits.NonNegativeFloat
    scale_embeddings: bool
    reads: list[str]
    unroll: limits.PositiveInt

    layout = EagleLayout()

    def __post_init__(self) -> None:
        super().__post_init__()
        more = self.unroll > 1 or not self.until_first_miss
        self.require("until_first_miss", more, "be false with drafter.unroll=1, which drafts once")
        known = len(set(self.reads)) == len(self.reads) > 0 and {*self.reads} <= {*INPUTS}
        self.require("reads", known, f"be one or both of {', '.join(INPUTS)}")

    def build(self, spec: TargetSpec) -> "Eagle":
        return Eagle(self, spec)


class Eagle(LayerDrafter):
    """Pairs the final hidden state of position t with token t + 1 and predicts feature t + 1."""

    about = About("An EAGLE", "2401.15077")
    published = (
        *quoted(
            "arXiv:2401.15077",
            "static tree of 26 nodes",
            {"Vicuna 13B": (3.07, 3.98), "Vicuna 7B": (None, 3.94)},
            trained_on="ShareGPT, 68k texts as they are",
            prompts="MT-bench, greedy",
        ),
        *spec_bench({"Vicuna 13B": (2.16, 3.64), "Vicuna 7B": (2.1, 3.58)}),
        *quoted(
            "arXiv:2408.15766",
            "EAGLE-2's tree",
            {
                "Llama 2 7B (HASS)": (3.24, 5.15),
                "Llama 2 13B (HASS)": (3.65, 5.58),
                "Llama 3 8B (HASS)": (3.09, 5.08),
                "Llama 3 70B (HASS)": (4.05, 5.21),
            },
            prompts="greedy, prompts not stated",
            hardware="H800",
        ),
    )
    captures = ()
    config: EagleConfig

    def __init__(self, config: EagleConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, spec.hidden_size)
        width = spec.hidden_size
        self.unroll = config.unroll
        self.depth_terms = tuple(f"depth_{depth + 1}" for depth in range(config.unroll))
        self.scale = EmbeddingScale(config.scale_embeddings)
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList([BlockLayer(self.shape, normed=False)])
        self.embed_tokens = self.own_embedding()

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Choose the factor of embeddings, and the tokens that can be drafted.

        A fresh table of its own is as large as features.
        """
        self.reduce_to_frequent(token_counts)
        if self.embed_tokens is None:
            self.scale.prepare(readout)

    def _pairs(
        self, readout: Readout, tokens: Tensor, features: Tensor
    ) -> Float[Tensor, "batch seq hidden"]:
        embedded = self.scale(self.embed(readout, tokens))
        both = dict(zip(INPUTS, (embedded, features.to(embedded.dtype)), strict=True))
        read = [
            each if name in self.config.reads else torch.zeros_like(each)
            for name, each in both.items()
        ]
        return self.fc(torch.cat(read, dim=-1))

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return feature regression and token losses (equations 2 to 4: soft cross-entropy).

        Deeper than the first depth it reads the features that it predicted, as in decoding (HASS,
        section 3.2: harmonized context alignment); no gradient flows back through them.
        """
        config, readout, length = self.config, features.readout, batch.tokens.shape[1] - 1
        hidden = features.final_hidden.to(dtype_of(self))
        if self.training and config.feature_noise:
            uniform = chance.uniform_like(hidden, batch.document)
            hidden = hidden + (uniform - 0.5) * config.feature_noise
        hidden = hidden[:, :-1]
        tokens = functional.pad(batch.tokens[:, 1:], (0, config.unroll - 1))
        mask = attention_mask(batch, pairs=True)
        past: list[tuple[Tensor, Tensor]] = []
        states = []
        for depth in range(config.unroll):
            pairs = self._pairs(readout, tokens[:, depth : depth + length], hidden)
            turn = self.shape.rotation(batch.positions[:, :-1] + depth, pairs.dtype)
            state, newest = recomputed(self._step, pairs, turn, mask, past)
            past = [*past, newest]
            states.append(state.flatten(0, 1))
            hidden = state.detach()
        return self._compare(states, batch, features)

    def _step(
        self,
        pairs: Float[Tensor, "batch seq hidden"],
        turn: Rotation,
        mask: Tensor | None,
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Float[Tensor, "batch seq hidden"], tuple[Tensor, Tensor]]:
        """Return the predicted features of one depth, and its keys and values.

        A query at index t sees the target's features up to t, and of each later depth only its own
        index t: the features that it predicted itself.
        """
        layer: Any = self.layers[0]
        queries, keys, values = compiled(layer.enter, pairs, turn)
        mixed = unrolled_attention(queries, [*past, (keys, values)], mask)
        return compiled(layer.finish, pairs, mixed), (keys, values)

    def _compare(
        self, states: list[Float[Tensor, "row hidden"]], batch: Batch, features: TargetFeatures
    ) -> Losses:
        config, readout = self.config, features.readout
        predictions = unrolled_predictions(batch, len(states))
        rows, columns, places = predictions.rows, predictions.columns, predictions.places
        truth = features.final_hidden[rows, columns - 1]
        order = torch.arange(len(rows), device=rows.device)
        chains = FirstMiss.along_text(config, rows, columns, len(states))
        weights, head = [1.0] * len(states), OutputHead.of(self.draft_readout(readout))
        labels = batch.tokens[rows, columns]
        if self.vocab is not None:
            labels = self.vocab.draft_ids[labels]
        sums = chunked_losses(
            *(config, weights, [head], states, places, labels),
            TargetProbs(readout, truth, order, self.vocab),
            first_miss=chains,
        )
        regression = []
        for depth, (state, at) in enumerate(zip(states, places, strict=True)):
            counted = at >= 0
            if chains is not None:
                counted = counted & chains.counts(depth, order)
            distance = feature_regression(state[at.clamp(min=0)], truth)
            regression.append(torch.where(counted, distance, 0).sum())
        terms = [replace(term, weight=config.token_weight) for term in loss_terms(weights, sums)]
        if self.vocab is None:
            terms = [replace(term, uncovered=None) for term in terms]
        count = torch.stack([term.count for term in terms]).sum()
        feature = LossTerm(config.feature_weight, torch.stack(regression).sum(), count)
        return {"feature": feature, **dict(zip(self.depth_terms, terms, strict=True))}

    def read(self, features: TargetFeatures) -> Tensor:
        return features.final_hidden

    def through(
        self, state: LayerState, turn: Rotation, tokens: Tensor, hidden: Tensor, last: Tensor | None
    ) -> Tensor:
        layer: Any = self.layers[0]
        pairs = self._pairs(state.readout, tokens, hidden)
        mixed = attend_cached(layer.enter(pairs, turn), state.cache, 0)
        return rows_at(layer.finish(pairs, mixed), last)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the SafeAILab layout, with an fc.bias for engines whose fc always has one.

        It is zero unless drafter.fc_bias is set (then the export refuses it: vLLM drops it).
        SafeAILab's `bias` key is left out: both engines would read it as the attention's bias,
        find none in the file, and draft from uninitialised memory.
        """
        width = self.spec.hidden_size
        config = {
            "architectures": list(EagleLayout.architectures),
            "model_type": "llama",
            **self.serving_keys(),
        }
        tensors = self.own_tensors()
        tensors.pop("scale.factor", None)
        for name, columns in zip(INPUTS, (slice(width), slice(width, None)), strict=True):
            if name not in self.config.reads:  # an engine reads both
                tensors["fc.weight"] = tensors["fc.weight"].clone()
                tensors["fc.weight"][:, columns] = 0
        of_target = self.spec.embedding_scale if self.embed_tokens is None else 1.0
        tensors = rescaled(tensors, self.scale.value() * of_target)
        tensors.setdefault("fc.bias", torch.zeros(width, dtype=dtype_of(self)))
        return config, tensors
