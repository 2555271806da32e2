"""EAGLE-1: one layer that continues the target's features (Li et al., 2024, arXiv:2401.15077)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.core import losses
from drafttrain.core.losses import TokenLossConfig
from drafttrain.core.ops.chunked_losses import (
    OutputHead,
    TargetProbs,
    chunked_losses,
    loss_terms,
)
from drafttrain.core.ops.layer_calls import call_layer, dtype_of
from drafttrain.core.ops.layers import MLP, RMSNorm, Rotation, document_mask
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.placed_batch import host_of, positions_to_predict
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, LossTerm, TargetFeatures, TargetSpec
from drafttrain.drafters.base import (
    About,
    TrainingChance,
    load_exactly,
    quoted,
    rows_at,
    spec_bench,
)
from drafttrain.drafters.serving.eagle_layout import EagleLayout, rescaled
from drafttrain.drafters.shared.layer import LayerConfig, LayerDrafter, LayerShape


@dataclass(frozen=True, kw_only=True)
class EagleConfig(TokenLossConfig, LayerConfig):
    """Shape and loss of EAGLE-1; its width is the target's, because it uses the target's head.

    token_weight: the weight of all `losses` together, as feature_weight is of the regression.
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
            self.require(key, getattr(self, key) >= 0, "be at least 0")

    def build(self, spec: TargetSpec) -> "Eagle":
        return Eagle(self, spec)


class EagleLayer(nn.Module):
    """A Llama decoder layer without the norm before attention, as in EAGLE-1."""

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


class Eagle(LayerDrafter):
    """Pairs the final hidden state of position t with token t + 1 and predicts feature t + 1."""

    about = About("An EAGLE", "2401.15077")
    published = (
        *quoted(
            "arXiv:2401.15077",
            "static tree of 26 nodes",
            "ShareGPT, 68k texts as they are",
            "MT-bench, greedy",
            "not stated",
            {"Vicuna 13B": (3.07, 3.98), "Vicuna 7B": (None, 3.94)},
        ),
        *spec_bench({"Vicuna 13B": (2.16, 3.64), "Vicuna 7B": (2.1, 3.58)}),
    )
    captures = ()
    depth_terms = ("depth_1",)  # training unrolls one depth
    config: EagleConfig

    def __init__(self, config: EagleConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, spec.hidden_size)
        width = spec.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(self.shape)])
        self.embed_tokens = self.own_embedding()

    def _pairs(
        self, readout: Readout, tokens: Tensor, features: Tensor
    ) -> Float[Tensor, "batch seq hidden"]:
        embedded = self.embed(readout, tokens)
        return self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return feature regression and token losses (equations 2 to 4: soft cross-entropy)."""
        config, readout = self.config, features.readout
        inputs = features.final_hidden.to(dtype_of(self))
        if self.training and config.feature_noise:
            uniform = chance.uniform_like(inputs, batch.document)
            inputs = inputs + (uniform - 0.5) * config.feature_noise
        pairs = self._pairs(readout, batch.tokens[:, 1:], inputs[:, :-1])
        turn = self.shape.rotation(batch.positions[:, :-1], pairs.dtype)
        mask = document_mask(batch.document[:, :-1], host_of(batch).document[:, :-1])
        predicted = call_layer(self.layers[0], pairs, turn, mask)
        rows, ahead = positions_to_predict(batch, 2)
        predicted = predicted[rows, ahead - 2]
        truth = features.final_hidden[rows, ahead - 1]
        place = torch.arange(len(rows), device=rows.device)
        target_probs, heads = (
            TargetProbs(readout, truth, place, None),
            [OutputHead.of(readout)],
        )
        labels = batch.tokens[rows, ahead]
        sums = chunked_losses(config, [1.0], heads, [predicted], place[None], labels, target_probs)
        (token,) = loss_terms([1.0], sums)
        regression = losses.feature_regression(predicted, truth).sum()
        return {
            "feature": LossTerm(config.feature_weight, regression, token.count),
            "depth_1": LossTerm(config.token_weight, token.sum, token.count, token.correct),
        }

    def read(self, features: TargetFeatures) -> Tensor:
        return features.final_hidden

    def through(
        self,
        readout: Readout,
        cache: RaggedCache,
        turn: Rotation,
        tokens: Tensor,
        hidden: Tensor,
        last: Tensor | None,
    ) -> Tensor:
        pairs = self._pairs(readout, tokens, hidden)
        return rows_at(self.layers[0](pairs, turn, cache), last)

    def logits(self, readout: Readout, hidden: Tensor) -> Tensor:
        return readout.logits(hidden.to(readout.head.dtype))

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the SafeAILab layout, with an fc.bias for engines whose fc always has one.

        It is zero unless drafter.fc_bias is set (then the export refuses it: vLLM drops it).
        SafeAILab's `bias` key is left out: both engines would read it as the attention's bias,
        find none in the file, and draft from uninitialised memory.
        """
        config = {
            # SGLang takes the first name that it knows; vLLM can only wrap the second.
            "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
            "model_type": "llama",
            **self.serving_keys(),
        }
        tensors = dict(self.state_dict())
        if self.embed_tokens is None:
            tensors = rescaled(tensors, self.spec.embedding_scale)
        tensors.setdefault("fc.bias", torch.zeros(self.spec.hidden_size, dtype=dtype_of(self)))
        return config, tensors

    def from_serving(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Load the SafeAILab layout; without drafter.fc_bias, fc.bias must be zero or absent.

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
