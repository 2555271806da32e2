"""DFlash-2: DFlash with convolutions within the block, and a selector (inco.ai/blog/dflash2, 2026).

It was chosen before LiLiCorr (arXiv:2608.20530), which with these convolutions has the better
matched result (GSM8K: 7.72 to 7.25 tokens, 5.26x to 5.06x; measured by its authors,
NVIDIA/Model-Optimizer#2342). Its definition is the clearer one: a single equation gives a token's
distribution after any token, also one that is not among the candidates, so on trees and along any
text, where LiLiCorr's is a network over the candidates with a loss of three terms; and of the two
(vLLM serves both) the speculators format holds this one alone. Its authors published no trainer:
the loss is that of speculators 0.9.0.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.ops.chunked_losses import OutputHead, limits_of_chunks
from drafttrain.core.ops.layer_calls import recomputed, wide_dtype
from drafttrain.core.ops.layers import LayerShape, Rotation
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, LossTerm, TargetFeatures, TargetSpec
from drafttrain.drafters.base import TrainingChance
from drafttrain.drafters.dflash import EVERY_LAYER, Blocks, DFlash, DFlashConfig, DFlashState
from drafttrain.drafters.serving.dflash2_layout import SIZES, DFlash2Layout
from drafttrain.drafters.shared.layer import LayerState
from drafttrain.drafters.shared.parallel import BlockLayer
from drafttrain.drafters.shared.publications import About, quoted
from drafttrain.runtime import limits
from drafttrain.runtime.settings import require


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """Shape and loss of DFlash-2; see DFlashConfig for what it shares."""

    conv_kernel_size: limits.PositiveInt
    conv_group_size: limits.PositiveInt
    selector_rank: limits.PositiveInt
    selector_top_k: limits.PositiveInt
    selector_weight: limits.PositiveFloat

    layout = DFlash2Layout()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "fusion", self.fusion == EVERY_LAYER, f"be {EVERY_LAYER}: blocks are convolved"
        )
        inside = self.conv_kernel_size <= self.block_size
        most = f"be at most drafter.block_size ({self.block_size})"
        self.require("conv_kernel_size", inside, most)

    def build(self, spec: TargetSpec) -> "DFlash2":
        return DFlash2(self, spec)


class BlockConvolution(nn.Module):
    """Two convolutions within a block, of a sublayer's input and of its output.

    Conv(x)_t = sum_i (base_i + delta_t,i) * x_(t-i), by channel; before the block x is zero. The
    input gives delta, of which each group of channels has one. It begins as the identity.
    """

    def __init__(self, width: int, block_size: int, num_taps: int, group_size: int) -> None:
        super().__init__()
        self.block_size, self.num_taps, self.group_size = block_size, num_taps, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, width))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(width, 2 * num_taps * (width // group_size), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def deltas(self, values: Float[Tensor, "batch seq width"]) -> tuple[Tensor, ...]:
        """Return delta of the input's convolution and of the output's, "batch seq tap group"."""
        return self.kernel_projection(values).unflatten(-1, (2, self.num_taps, -1)).unbind(2)

    def forward(
        self,
        values: Float[Tensor, "batch seq width"],
        delta: Float[Tensor, "batch seq tap group"],
        side: int,
    ) -> Float[Tensor, "batch seq width"]:
        """Return blocks convolved, as inputs (side 0) or as outputs (side 1)."""
        blocks, found = values.unflatten(1, (-1, self.block_size)), torch.zeros_like(values)
        base = self.base_kernel[side].to(values.dtype)
        for tap in range(self.num_taps):
            before = functional.pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size]
            kernel = base[tap] + delta[:, :, tap].repeat_interleave(self.group_size, dim=-1)
            found = found + kernel * before.flatten(1, 2)
        return found


class ConvolvedLayer(BlockLayer):
    """A layer of DFlash whose attention and feed-forward are each between two convolutions.

    The features, which attention reads as keys and values, are not convolved.
    """

    def __init__(self, shape: LayerShape, config: DFlash2Config) -> None:
        super().__init__(shape)
        sizes = config.block_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv = BlockConvolution(shape.hidden_size, *sizes)
        self.mlp_conv = BlockConvolution(shape.hidden_size, *sizes)

    def enter(
        self, hidden: Float[Tensor, "batch seq hidden"], turn: Rotation
    ) -> tuple[Tensor, ...]:
        normed = self.input_layernorm(hidden)
        first, last = self.attention_conv.deltas(normed)
        return *self.self_attn.project(self.attention_conv(normed, first, 0), turn), last

    def finish(
        self,
        hidden: Float[Tensor, "batch seq hidden"],
        mixed: Float[Tensor, "batch head seq head_dim"],
        *kept: Tensor,
    ) -> Float[Tensor, "batch seq hidden"]:
        hidden = hidden + self.attention_conv(self.self_attn.merge(mixed), *kept, 1)
        normed = self.post_attention_layernorm(hidden)
        first, last = self.mlp_conv.deltas(normed)
        return hidden + self.mlp_conv(self.mlp(self.mlp_conv(normed, first, 0)), last, 1)


class CandidateSelector(nn.Module):
    """What the token before and the state add to candidates' logits: <A(before) * H(h), B(c)>."""

    vocabulary_matrices = ("predecessor_codebook", "successor_codebook")

    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        before: Int[Tensor, "*node"],
        states: Float[Tensor, "*node hidden"],
        candidates: Int[Tensor, "*node candidate"],
    ) -> Float[Tensor, "*node candidate"]:
        """Return the scores of candidates after the tokens before."""
        context = functional.embedding(before, self.predecessor_codebook)
        context = context * self.hidden_projection(states)
        successors = functional.embedding(candidates, self.successor_codebook)
        return (context[..., None, :] * successors).sum(-1)


_MATCHED = partial(
    quoted,
    "NVIDIA/Model-Optimizer#2342",
    "chain of 15",
    trained_on="answers by the target to Nemotron Post-Training Dataset v2",
    hardware="H100",
)


class DFlash2(DFlash):
    """Reads [last token, mask, mask, ...] as DFlash does, with convolutions within the block.

    Of each place the `selector_top_k` most likely tokens are its candidates. A candidate c has the
    score U(c) + <A(b) * H(h), B(c)>: U its logit and h the state, both of the place; b the token
    before, drafted or last. Softmax over the candidates, after the temperature, is the distribution
    that is drawn from; no other token can be drafted. So a node's children depend on its token, and
    on nothing else of its path: trees are drafted as exactly as chains.

    The loss is DFlash's on U, and at each place `selector_weight` times the cross-entropy of the
    scores after the text's token before, with the weight of the place (speculators 0.9.0, models/
    dflash2). A token of the text that is no candidate replaces the least likely one there, so that
    each place has a label; when decoding, no token is put among the candidates. The label is the
    text's as in DFlash, where speculators takes the target's most likely token.
    """

    about = About("A DFlash-2", "2602.06036")  # DFlash's paper: it has none of its own
    published = (
        *_MATCHED({"Qwen3 8B": (5.06, 7.252)}, prompts="GSM8K; greedy, batch 1"),
        *_MATCHED({"Qwen3 8B": (6.49, 8.999)}, prompts="MATH500; greedy, batch 1"),
    )
    config: DFlash2Config

    def __init__(self, config: DFlash2Config, spec: TargetSpec) -> None:
        width, group, most = spec.hidden_size, config.conv_group_size, spec.vocab_size
        need = f"divide the hidden size of {spec.name}, {width}"
        require(width % group == 0, "drafter.conv_group_size", need, group)
        need = f"be at most {most:,}, the tokens of {spec.name}"
        require(
            config.selector_top_k <= most, "drafter.selector_top_k", need, config.selector_top_k
        )
        super().__init__(config, spec)
        self.depth_terms = ()  # DFlash's are not of the distributions that tokens are drawn from
        self.candidate_selector = CandidateSelector(most, width, config.selector_rank)

    def layer(self) -> BlockLayer:
        return ConvolvedLayer(self.shape, self.config)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return DFlash's token losses and, by place, the cross-entropy of the candidates' scores.

        until_first_miss leaves out of the latter what follows a wrong choice of the selector's.
        """
        blocks, readout = self._blocks(batch, chance), features.readout
        states = self._states(blocks, batch, features)
        losses = self._terms(self._sums(states, OutputHead.of(readout), blocks, batch, features))
        counted = torch.ones_like(blocks.drafted[:, 0])
        for k, weight in enumerate(self.place_weights, start=1):
            each, right = self._chosen(states[:, k - 1], blocks, k, readout)
            told = blocks.drafted[:, k]
            total = torch.where(told & counted, each, 0).sum()
            weight *= self.config.selector_weight
            losses[f"selector_{k}"] = LossTerm(weight, total, told.sum(), (right & told).sum())
            if self.config.stops_at_miss:  # a place that is not trained is no miss
                counted = (counted & right) | ~told
        return losses

    def _chosen(
        self, states: Float[Tensor, "block hidden"], blocks: Blocks, k: int, readout: Readout
    ) -> tuple[Float[Tensor, " block"], Bool[Tensor, " block"]]:
        """Return the loss of the scores at place k, and whether the text's token has the best."""
        before, labels = blocks.tokens[:, k - 1], blocks.tokens[:, k]
        candidates = self._candidates(states, readout)
        hits = candidates == labels[:, None]
        known = hits.any(-1)
        candidates[:, -1] = torch.where(known, candidates[:, -1], labels)
        places = torch.where(known, hits.int().argmax(-1), candidates.shape[1] - 1)

        def scored(states: Tensor) -> Tensor:
            logits = readout.logits_of(candidates, states.to(readout.head.dtype))
            return logits + self.candidate_selector(before, states, candidates)

        scores = recomputed(scored, states)
        losses = functional.cross_entropy(scores, places, reduction="none")
        return losses, known & (scores.argmax(-1) == places)

    @torch.no_grad()
    def _candidates(
        self, states: Float[Tensor, "block hidden"], readout: Readout
    ) -> Int[Tensor, "block candidate"]:
        """Return the most likely tokens of each state, a chunk of logits at a time."""
        budget, fewest, _ = limits_of_chunks(states.device)
        parts = states.split(max(fewest, budget // len(readout.head)))
        most = self.config.selector_top_k
        likely = (readout.float32_logits(part).topk(most) for part in parts)
        return torch.cat([found.indices for found in likely])

    def expand(
        self, state: LayerState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        """Return the scores of the candidates after each node's own token, and else -inf."""
        assert isinstance(state, DFlashState)
        logits = super().expand(state, newest, parents)
        before = state.last if newest is None else newest
        assert before is not None
        # One place of the block for all nodes of a level; an export's probe has a smaller head.
        likely = logits[:, :1].topk(min(self.config.selector_top_k, logits.shape[-1]))
        candidates = likely.indices.expand(-1, before.shape[1], -1)
        states = self.newest_states(state, before.shape[1])
        scores = likely.values.to(wide_dtype(logits)) + self.candidate_selector(
            before, states, candidates
        )
        nothing = scores.new_full(logits.shape, -torch.inf)
        return nothing.scatter(-1, candidates, scores)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return z-lab's layout: DFlash's, and the sizes of convolutions and selector."""
        config, tensors = super().to_serving()
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= {key: getattr(self.config, key) for key in SIZES}
        return config, tensors
