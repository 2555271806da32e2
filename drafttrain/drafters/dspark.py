"""DSpark: DFlash's block, corrected by the token drafted before (arXiv:2607.05147, 2026)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.ops.chunked_losses import OutputHead, Sums
from drafttrain.core.ops.layer_calls import wide_dtype
from drafttrain.core.ops.layers import LentLinear, within_calls
from drafttrain.core.types import Batch, Losses, LossTerm, TargetFeatures, TargetSpec
from drafttrain.drafters.base import TrainingChance
from drafttrain.drafters.dflash import DFlash, DFlashConfig, DFlashState
from drafttrain.drafters.serving.dspark_layout import MARKOV_TYPES, DSparkLayout
from drafttrain.drafters.shared.layer import LayerState
from drafttrain.drafters.shared.publications import About, quoted
from drafttrain.runtime import limits


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Shape and loss of DSpark; see DFlashConfig for what it shares."""

    markov: Annotated[str, limits.one_of(*MARKOV_TYPES)]
    markov_rank: limits.PositiveInt
    confidence_weight: limits.PositiveFloat

    layout = DSparkLayout()

    def build(self, spec: TargetSpec) -> "DSpark":
        return DSpark(self, spec)


class MarkovHead(nn.Module):
    """What the token before adds to logits: markov_w2 @ markov_w1[token], a product of rank r.

    gated: each of the r numbers is first multiplied by a sigmoid of the state and of all of them.
    """

    vocabulary_matrices = ("markov_w2.weight",)

    def __init__(self, vocab_size: int, rank: int, width: int, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = LentLinear(rank, vocab_size, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if gated else None
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)  # it begins as DFlash

    def forward(
        self, tokens: Int[Tensor, "*node"], states: Float[Tensor, "*node hidden"]
    ) -> tuple[Float[Tensor, "*node rank"], Float[Tensor, "*node rank"]]:
        """Return the embeddings of the tokens before, and what markov_w2 reads of them."""
        embedded = self.markov_w1(tokens)
        if self.gate_proj is None:
            return embedded, embedded
        gate = self.gate_proj(torch.cat([states, embedded], dim=-1)).sigmoid()
        return embedded, gate * embedded


class ConfidenceHead(nn.Module):
    """The logit of the probability that the next token is accepted, before it is drawn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = LentLinear(width, 1)

    def forward(
        self, states: Float[Tensor, "*node hidden"], embedded: Float[Tensor, "*node rank"]
    ) -> Float[Tensor, "*node"]:
        """Return logits in float32, from the states and the embeddings of the tokens before."""
        read = torch.cat([states, embedded], dim=-1)
        read = read.to(wide_dtype(read))

        def product(read: Tensor) -> Tensor:
            with torch.autocast(read.device.type, enabled=False):
                weight, bias = self.proj.weight.to(read.dtype), self.proj.bias.to(read.dtype)
                return functional.linear(read, weight, bias)

        return within_calls([self.proj], read, product)[..., 0]


@dataclass
class DSparkState(DFlashState):
    """DFlash's state, and the embeddings of the tokens that the newest logits follow."""

    embedded: Float[Tensor, "batch width rank"] | None = None


_PAPER = partial(
    quoted,
    "arXiv:2607.05147",
    "chain of 7",
    trained_on="answers by the target to about 1.3M prompts",
)


class DSpark(DFlash):
    """Reads [last token, mask, mask, ...]; each place predicts the token after it, the first too.

    One pass gives the states of the block and logits from them; the Markov head adds to these what
    the token drafted before tells, so that a node's children depend on its token, and on nothing
    else of its path. What is drawn from these logits has exactly their distribution, on trees too.

    The confidence head predicts the probability that a token will be accepted, from the state and
    the token before it: before the token is drawn. Sampled at temperature 1 that is the overlap
    of the two distributions (alpha), which it is trained towards. A policy that ends a draft by it
    stays lossless, for the decision on a token then depends on none that it could favour (the
    paper's appendix A; a cut after the token is seen would not be).
    """

    about = About("A DSpark", "2607.05147")
    published = (
        *_PAPER(
            {"Qwen3 4B": (None, 6.11), "Qwen3 8B": (None, 6.17)}, prompts="GSM8K; temperature 1"
        ),
        *_PAPER(
            {"Qwen3 4B": (None, 5.38), "Qwen3 8B": (None, 5.52)}, prompts="HumanEval; temperature 1"
        ),
        *_PAPER(
            {"Qwen3 4B": (None, 3.64), "Qwen3 8B": (None, 3.72)}, prompts="MT-bench; temperature 1"
        ),
    )
    first_place = 0
    config: DSparkConfig
    state_type = DSparkState

    def __init__(self, config: DSparkConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        width, rank = spec.hidden_size, config.markov_rank
        self.markov_head = MarkovHead(spec.vocab_size, rank, width, config.markov == "gated")
        self.confidence_head = ConfidenceHead(width + rank)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return DFlash's token losses and, by place, the cross-entropy of the confidence to alpha.

        The token before each place is the text's. alpha is a constant: its own loss is total
        variation. Both have the weight exp(-(k - 1) / gamma) of their place.
        """
        blocks = self._blocks(batch, chance)
        states = self._states(blocks, batch, features)
        embedded, read = self.markov_head(blocks.tokens[:, :-1], states)
        head, last = OutputHead.of(features.readout), self.markov_head.markov_w2

        def compare(states: Tensor) -> list[Sums]:
            whole = replace(head, added=last.weight)
            return self._sums(states, whole, blocks, batch, features, overlap=True)

        sums = within_calls([last], torch.cat([states, read], dim=-1), compare)
        losses = self._terms(sums)
        logits = self.confidence_head(states, embedded)
        alpha = torch.cat([overlap for *_, overlap in sums]).T.to(wide_dtype(logits))
        each = functional.binary_cross_entropy_with_logits(
            logits.to(alpha.dtype), alpha, reduction="none"
        )
        told = blocks.drafted[:, 1:]
        by_place = torch.where(told, each, 0).sum(0).unbind()
        for k, (weight, total) in enumerate(zip(self.place_weights, by_place, strict=True)):
            weight *= self.config.confidence_weight
            losses[f"confidence_{k + 1}"] = LossTerm(weight, total, told[:, k].sum())
        return losses

    def expand(
        self, state: LayerState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        """Return the block's logits with what each node's own token adds."""
        assert isinstance(state, DSparkState)
        logits = super().expand(state, newest, parents)
        before = state.last if newest is None else newest
        assert before is not None
        state.embedded, read = self.markov_head(before, self.newest_states(state, before.shape[1]))
        added = self.markov_head.markov_w2(read)
        return logits + added[..., : logits.shape[-1]]  # an export's probe has a smaller head

    def confidence(self, state: LayerState) -> Float[Tensor, "batch width"]:
        """Return the predicted acceptance of the tokens that the last `expand` gave logits of."""
        assert isinstance(state, DSparkState)
        assert state.embedded is not None, "expand comes before confidence"
        states = self.newest_states(state, state.embedded.shape[1])
        return self.confidence_head(states, state.embedded).sigmoid()

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return DeepSpec's layout, whose keys stand beside each other; tensors as DFlash's."""
        config, tensors = super().to_serving()
        config |= config.pop("dflash_config")
        config |= {
            "architectures": ["Qwen3DSparkModel"],
            "sample_from_anchor": True,
            "markov_rank": self.config.markov_rank,
            "markov_head_type": MARKOV_TYPES[self.config.markov],
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        return config, tensors
