"""Medusa-1: heads on the target's last hidden state (Cai et al., 2024, arXiv:2401.10774)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.losses import DepthLossConfig
from drafttrain.core.ops.layer_calls import call_layer, device_of, dtype_of
from drafttrain.core.placed_batch import Predictions, positions_to_predict
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.core.vocab import DraftVocab
from drafttrain.drafters.base import (
    DrafterConfig,
    DraftState,
    TrainingChance,
    draft_vocab_size,
    last_of,
    start_with,
)
from drafttrain.drafters.serving.layout import ServedLayout
from drafttrain.drafters.serving.medusa_layouts import MedusaLayout
from drafttrain.drafters.shared.heads import HeadDrafter, of_depth, own_heads
from drafttrain.drafters.shared.publications import About, quoted, spec_bench
from drafttrain.runtime import limits


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DepthLossConfig, DrafterConfig):
    """Shape and loss of Medusa heads."""

    num_heads: limits.PositiveInt
    num_layers: limits.PositiveInt
    fc_bias: bool
    shared_head: bool
    logit_scale: limits.PositiveFloat
    head_decay: limits.PositiveFraction

    layout: ClassVar[ServedLayout | None] = MedusaLayout()

    def build(self, spec: TargetSpec) -> "Medusa":
        return Medusa(self, spec)


class ResidualBlocks(nn.Module):
    """x + SiLU(W x + b), `num_layers` times, with weights of their own; W starts at zero."""

    def __init__(self, width: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(num_layers))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.zeros_(layer.weight)
            if bias:
                nn.init.zeros_(layer.bias)

    def forward(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape hidden"]:
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


@dataclass
class MedusaState(DraftState):
    """The newest final hidden state, and all heads' logits once they were computed."""

    hidden: Float[Tensor, "batch hidden"] | None = None
    logits: tuple[Float[Tensor, "batch vocab"], ...] | None = None  # by head, of this proposal
    depth: int = 0


class Medusa(HeadDrafter[MedusaState]):
    """Head k reads the final hidden state of position t and predicts token t + 2 + k."""

    about = About("A Medusa", "2401.10774")
    published = (
        *quoted(
            "arXiv:2401.10774",
            "static tree",
            {
                "Vicuna 7B (Medusa-1)": (2.18, None),
                "Vicuna 7B, trained too (Medusa-2)": (2.83, 3.47),
            },
            trained_on="ShareGPT",
        ),
        *spec_bench({"Vicuna 13B": (1.8, 2.39), "Vicuna 7B": (1.71, 2.31)}),
    )
    captures: tuple[int, ...] = ()
    branches = True

    def __init__(self, config: MedusaConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config: MedusaConfig = config
        self.spec = spec
        heads = range(config.num_heads)
        self.max_depth = self.unroll = config.num_heads
        # Head k reads k + 2 positions before its token; no position reads another.
        self.reach = config.num_heads + 1
        self.depth_terms = tuple(f"head_{k + 1}" for k in heads)
        self.blocks = nn.ModuleList(
            ResidualBlocks(spec.hidden_size, config.num_layers, config.fc_bias) for _ in heads
        )
        self.lm_heads = self._heads(spec.vocab_size)

    def _heads(self, vocab_size: int, **place: Any) -> nn.ModuleList:
        count = 1 if self.config.shared_head else self.config.num_heads
        return own_heads(self.spec.hidden_size, vocab_size, count, **place)

    def _predict(self, k: int, hidden: Tensor) -> Tensor:
        """Return the logits of head k for final hidden states of the target."""
        logits = of_depth(self.lm_heads, k)(self.blocks[k](hidden))
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def reduce(self, vocab: DraftVocab) -> None:
        self.vocab = vocab
        self.lm_heads = self._heads(vocab.size, device=device_of(self), dtype=dtype_of(self))
        self.register_buffer("target_ids", vocab.target_ids)

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Copy the target's head to every head: with zero blocks, head k predicts token t + 1."""
        for head in self.lm_heads:
            start_with(head, readout.head)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return each head's token losses, decayed by head (section 2.2: hard cross-entropy).

        Distributions are compared at the position before the token: that of head k at t with the
        target's at t+1+k.
        """
        config = self.config
        rows, columns = positions_to_predict(batch, 2)
        kinds = torch.arange(config.num_heads, device=rows.device)[:, None]
        known = batch.positions[rows, columns] >= 2 + kinds
        hidden = features.final_hidden.to(dtype_of(self))
        reads = (columns - 2 - kinds).clamp(min=0)
        states = [
            call_layer(block, hidden[rows, at])
            for block, at in zip(self.blocks, reads, strict=True)
        ]
        places = torch.arange(len(rows), device=rows.device).where(known, -1)
        told = (config.head_decay, config.logit_scale)
        return self.compare(states, Predictions(rows, columns, places), batch, features, *told)

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> MedusaState:
        return MedusaState(readout)

    def observe(
        self, state: MedusaState, tokens: Tensor, counts: Sequence[int], features: TargetFeatures
    ) -> None:
        state.hidden = last_of(features.final_hidden, counts)[:, 0]
        state.logits = None
        state.depth = 0

    def expand(
        self, state: MedusaState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        """Return the next head's logits; all heads are computed once, whatever was drafted."""
        assert state.hidden is not None, "observe comes before expand"
        if state.logits is None:
            hidden = state.hidden.to(dtype_of(self))
            state.logits = tuple(self._predict(k, hidden) for k in range(self.config.num_heads))
        logits = state.logits[state.depth]
        state.depth += 1
        return logits[:, None].expand(-1, 1 if newest is None else newest.shape[1], -1)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.spec.hidden_size,
            "vocab_size": self.spec.vocab_size,
            "truncated_vocab_size": draft_vocab_size(self),
            "num_heads": self.config.num_heads,
            "num_hidden_layers": self.config.num_layers,
            "medusa_fc_bias": self.config.fc_bias,  # without it vLLM drops the biases silently
        }
        if self.config.shared_head:
            config["original_lm_head"] = True
        if self.config.logit_scale != 1.0:
            config["logit_scale"] = self.config.logit_scale
        tensors = dict(self.state_dict())
        if self.vocab is not None:
            tensors["token_map"] = tensors.pop("target_ids")
        return config, tensors
