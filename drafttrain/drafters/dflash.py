"""DFlash: a block of tokens drafted in one pass over injected features (arXiv:2602.06036, 2026)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.losses import DepthLossConfig, FirstMiss
from drafttrain.core.ops.chunked_losses import (
    OutputHead,
    Sums,
    TargetProbs,
    chunked_losses,
    loss_terms,
)
from drafttrain.core.ops.grouped_attention import grouped_attention
from drafttrain.core.ops.layer_calls import compiled, dtype_of, recomputed
from drafttrain.core.ops.layers import RMSNorm, Rotation, attend_cached
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import attention_mask, host_of
from drafttrain.core.readout import Readout
from drafttrain.core.transfer import send
from drafttrain.core.tree import Branches
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.drafters.base import TrainingChance, last_of, start_with
from drafttrain.drafters.serving.dflash_layout import DFlashLayout
from drafttrain.drafters.shared.layer import LayerConfig, LayerState, layers_to_capture
from drafttrain.drafters.shared.parallel import (
    BlockLayer,
    ParallelDrafter,
    ParallelState,
    mask_token,
)
from drafttrain.drafters.shared.publications import About, quoted
from drafttrain.runtime import limits

RANDOM, FIXED = "random", "fixed"  # where blocks begin in training
EVERY_LAYER, INPUT = "every_layer", "input"  # where the fused features enter


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DepthLossConfig, LayerConfig):
    """Shape and loss of DFlash; null takes the target's own value, or the published layers."""

    layers: limits.DistinctLayers | None
    num_captures: limits.PositiveInt
    fusion: Annotated[str, limits.one_of(EVERY_LAYER, INPUT)]
    num_layers: limits.PositiveInt
    block_size: Annotated[int, limits.at_least(2)]
    mask_token_id: int | None
    num_anchors: limits.PositiveInt
    anchors: Annotated[str, limits.one_of(RANDOM, FIXED)]
    gamma: limits.PositiveFloat

    layout = DFlashLayout()

    def build(self, spec: TargetSpec) -> "DFlash":
        return DFlash(self, spec)


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return `count` layers from the second to the third last, evenly spread, as published.

    Of a target too shallow for so many different ones: fewer, spread over all its layers.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    usual = [1 + round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    if num_layers < 4 or len(set(usual)) < count:
        usual = [1 + round(i * (num_layers - 2) / (count - 1)) for i in range(count)]
    return tuple(sorted({layer for layer in usual if layer >= 0}))


@dataclass
class DFlashState(ParallelState):
    """The features of committed tokens as keys and values, and the block, once it is drafted.

    hidden: the states at the places of the block that draft, by depth.
    """

    last: Int[Tensor, "batch 1"] | None = None  # the anchor of the next block


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch, by their anchors: `columns` has those of each row, padded.

    rows, slots: the places of the real ones. tokens: what the text has there, the anchor first,
    then one for each depth; drafted: which of them are trained.
    """

    columns: Int[Tensor, "batch anchor"]
    rows: Int[Tensor, " block"]
    slots: Int[Tensor, " block"]
    drafted: Bool[Tensor, "block token"]
    tokens: Int[Tensor, "block token"]


_ALL_TASKS = "mean of all tasks; greedy, batch 1"
_PAPER = partial(
    quoted,
    "arXiv:2602.06036",
    "chain, blocks of 16",
    trained_on="answers by the target to about 800k prompts",
)


class DFlash(ParallelDrafter):
    """Reads [last token, mask, mask, ...]; the k-th mask predicts the k-th token after the last.

    The tokens of a block see each other, and the features of all positions before the anchor. They
    are drafted independently of each other: all nodes of a tree's level have the same children.
    """

    about = About("A DFlash", "2602.06036")
    published = (
        *_PAPER({"Qwen3 4B": (2.85, 4.35)}, prompts="MT-bench; greedy, batch 1", hardware="H200"),
        *_PAPER({"Qwen3 4B": (4.91, 6.54)}, prompts=_ALL_TASKS, hardware="H200"),
        *_PAPER({"Qwen3 8B": (4.86, 6.49)}, prompts=_ALL_TASKS),
    )
    first_place = 1  # of a block's that drafts: the anchor itself, at 0, does not
    config: DFlashConfig
    layers: Any  # of BlockLayer
    state_type = DFlashState

    def __init__(self, config: DFlashConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, spec.hidden_size)
        layers = config.layers or spread_layers(spec.num_layers, config.num_captures)
        self.captures = layers_to_capture(layers, spec)
        self.mask_token_id = mask_token(config.mask_token_id, spec)
        self.max_depth: int = config.block_size - self.first_place
        self.unroll = self.max_depth
        self.depth_terms = tuple(f"depth_{k}" for k in range(1, self.max_depth + 1))
        self.place_weights = [exp(-k / config.gamma) for k in range(self.max_depth)]  # of places
        width, eps = spec.hidden_size, self.shape.rms_norm_eps
        self.fc = nn.Linear(len(self.captures) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = nn.ModuleList(self.layer() for _ in range(config.num_layers))
        self.norm = RMSNorm(width, eps)
        self.embed_tokens = self.own_embedding()

    def layer(self) -> BlockLayer:
        """Return one of its layers, with initial weights."""
        return BlockLayer(self.shape)

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Copy the target's final norm, and its embedding to one of the drafter's own."""
        start_with(self.norm, readout.norm)
        if self.embed_tokens is not None:
            start_with(self.embed_tokens, readout.embedding)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the token losses by place in the block, weighted by exp(-(k - 1) / gamma).

        In training a conversation has at most `num_anchors` blocks, drawn anew in each step from
        those that begin at a trained token and draft the next; they end before the first token that
        is not trained (DeepSpec, modeling/dspark/common.py). Else every block that drafts a trained
        token counts.
        """
        blocks = self._blocks(batch, chance)
        states = self._states(blocks, batch, features)
        return self._terms(
            self._sums(states, OutputHead.of(features.readout), blocks, batch, features)
        )

    def _states(
        self, blocks: Blocks, batch: Batch, features: TargetFeatures
    ) -> Float[Tensor, "block depth hidden"]:
        size, readout = self.config.block_size, features.readout
        starts = batch.positions.gather(1, blocks.columns)[..., None]
        places = (starts + torch.arange(size, device=starts.device)).flatten(1)
        tokens = torch.full_like(places, self.mask_token_id)
        tokens[:, ::size] = batch.tokens.gather(1, blocks.columns)
        hidden, context = self.embed(readout, tokens), self.read(features)
        turns = [self.shape.rotation(at, hidden.dtype) for at in (places, batch.positions)]
        # A few blocks at a time: the scores of all pairs of blocks would be computed in vain.
        parts = blocks.columns.tensor_split(min(size, blocks.columns.shape[1]), dim=1)
        masks = [self._mask(batch, part) for part in parts]
        causal = attention_mask(batch)
        for layer in self.layers:
            if self.config.fusion == INPUT:
                read = layer.input_layernorm(context)
                hidden = recomputed(self._step, layer, hidden, read, turns, masks)
                context = recomputed(self._advance, layer, context, turns[1], causal)
            else:
                hidden = recomputed(self._step, layer, hidden, context, turns, masks)
        states = self.norm(hidden).unflatten(1, (-1, size))[blocks.rows, blocks.slots]
        return states[:, self.first_place :]

    def _blocks(self, batch: Batch, chance: TrainingChance) -> Blocks:
        host, size = host_of(batch), self.max_depth + 1
        # By anchor and place in its block. A position is at least its place in the block, and more
        # if both are in the same text and a feature comes before the anchor.
        tokens, trained, positions = (
            functional.pad(values, (0, size - 1)).unfold(1, size, 1)
            for values in (host.tokens, host.loss_mask, host.positions)
        )
        drafted = trained & (positions > torch.arange(size))
        if self.training:  # as when decoding: the anchor is of an answer, and a block ends with it
            drafted &= trained.cumprod(-1).bool()
        drafted[..., 0] = False
        chosen = drafted.any(-1)
        if self.training and self.config.anchors == FIXED:
            chosen &= _places_in_answer(host) % self.max_depth == 0
        if self.training and chosen.shape[1] > self.config.num_anchors:
            like = torch.empty(*chosen.shape, 1)
            drawn = chance.uniform_like(like, host.document)[..., 0]
            # Draws of 24 bits: exact beside the number of their conversation, above which they lie.
            first = 2.0 * host.document.double()
            drawn = first + drawn.where(chosen, 1.0)
            order = drawn.sort(dim=1).values
            before = torch.searchsorted(order, drawn) - torch.searchsorted(order, first)
            chosen &= before < self.config.num_anchors
        most = max(1, int(chosen.sum(1).max()))
        columns = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        rows, slots = chosen.gather(1, columns).nonzero(as_tuple=True)
        at = columns[rows, slots]
        found = (columns, rows, slots, drafted[rows, at], tokens[rows, at])
        return Blocks(*(send(values, batch.tokens.device) for values in found))

    def _mask(self, batch: Batch, anchors: Tensor) -> Bool[Tensor, "batch 1 query key"]:
        """Return what the tokens of these anchors' blocks see: the context, then these blocks."""
        size, document = self.config.block_size, batch.document
        same = document[:, None] == document.gather(1, anchors)[..., None]
        places = torch.arange(document.shape[1], device=document.device)
        seen = same & (places < anchors[..., None])
        own = torch.eye(anchors.shape[1], dtype=torch.bool, device=document.device)
        own = own.repeat_interleave(size, 1).expand(len(anchors), -1, -1)
        return torch.cat([seen, own], dim=2).repeat_interleave(size, 1)[:, None]

    def _step(
        self,
        layer: BlockLayer,
        hidden: Float[Tensor, "batch seq hidden"],
        context: Float[Tensor, "batch context hidden"],
        turns: Sequence[Rotation],
        masks: Sequence[Tensor],
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return a layer's output for all blocks; each mask is of the next of them."""
        queries, keys, values, *kept = compiled(layer.enter, hidden, turns[0])
        context_keys, context_values = compiled(layer.self_attn.keys_and_values, context, turns[1])
        sizes, mixed = [mask.shape[2] for mask in masks], []
        own = (heads.split(sizes, dim=2) for heads in (queries, keys, values))
        for mask, asking, its_keys, its_values in zip(masks, *own, strict=True):
            its_keys = torch.cat([context_keys, its_keys], dim=2)
            its_values = torch.cat([context_values, its_values], dim=2)
            # torch's own attention has no fused kernel for a mask and shared keys on a GPU.
            mixed.append(unrolled_attention(asking, [(its_keys, its_values)], mask))
        return compiled(layer.finish, hidden, torch.cat(mixed, dim=2), *kept)

    def _advance(
        self,
        layer: BlockLayer,
        context: Float[Tensor, "batch context hidden"],
        turn: Rotation,
        causal: Bool[Tensor, "batch 1 context context"] | None,
    ) -> Float[Tensor, "batch context hidden"]:
        """Return what the next layer reads of the context; None: each row is one text."""
        queries, keys, values = compiled(layer.enter, context, turn)
        mixed = unrolled_attention(queries, [(keys, values)], causal)
        return compiled(layer.finish, context, mixed)

    def _sums(
        self,
        states: Float[Tensor, "block depth width"],
        head: OutputHead,
        blocks: Blocks,
        batch: Batch,
        features: TargetFeatures,
        overlap: bool = False,
    ) -> list[Sums]:
        """Return the losses of each depth; overlap: see `chunked_losses`."""
        config, length = self.config, batch.tokens.shape[1]
        anchors, order = blocks.columns[blocks.rows, blocks.slots], torch.arange(len(states))
        order = send(order, states.device)
        found, counted = [], torch.ones_like(blocks.drafted[:, 0])
        for k, weight in enumerate(self.place_weights, start=1):
            target_probs = first_miss = None
            if config.stops_at_miss:
                first_miss = FirstMiss.begin(counted, order, 1)
            if config.needs_target_probs or overlap:
                at = blocks.rows * length + (anchors + k - 1).clamp(max=length - 1)
                final = features.final_hidden.flatten(0, 1)
                target_probs = TargetProbs(features.readout, final, at, None)
            sums = chunked_losses(
                config,
                [weight],
                [head],
                [states[:, k - 1]],
                order.where(blocks.drafted[:, k], -1)[None],
                blocks.tokens[:, k],
                target_probs,
                against_text=True,
                first_miss=first_miss,
                overlap=overlap,
            )
            found.append(sums)
            if first_miss is not None:  # a place that is not trained is no miss
                counted = first_miss.right[0] | ~blocks.drafted[:, k]
        return found

    def _terms(self, sums: Sequence[Sums]) -> Losses:
        terms = {}
        for k, (weight, each) in enumerate(zip(self.place_weights, sums, strict=True), start=1):
            terms[f"depth_{k}"] = replace(loss_terms([weight], each)[0], uncovered=None)
        return terms

    def read(self, features: TargetFeatures) -> Float[Tensor, "batch seq hidden"]:
        """Return the fused features: the context, of every layer or of the first."""
        dtype = dtype_of(self)
        captured = [features.captured[layer].to(dtype) for layer in self.captures]
        return self.hidden_norm(self.fc(torch.cat(captured, dim=-1)))

    def observe(
        self, state: LayerState, tokens: Tensor, counts: Sequence[int], features: TargetFeatures
    ) -> None:
        """Append the features as keys and values of each layer; the last token starts a block."""
        assert isinstance(state, DFlashState)
        context = self.read(features)
        turn = state.turn(context.shape[1])

        def run(context: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            turn = Rotation(cos, sin)
            for number, layer in enumerate(self.layers):
                if self.config.fusion == INPUT:
                    mixed = attend_cached(layer.enter(context, turn), state.cache, number)
                    context = layer.finish(context, mixed)
                else:
                    state.cache.update(*layer.self_attn.keys_and_values(context, turn), number)
            return ()

        state.cache.run(run, [context, turn.cos, turn.sin], list(counts))
        state.committed = list(state.cache.lengths)
        state.last = last_of(tokens[..., None], counts)[..., 0]
        self.restart(state)

    def draft(self, state: ParallelState) -> Float[Tensor, "batch depth vocab"]:
        """Return the block's logits, from its anchor and the features before it."""
        assert isinstance(state, DFlashState)
        assert state.last is not None, "observe comes before expand"
        size, readout, cache = self.config.block_size, state.readout, state.cache
        tokens = functional.pad(state.last, (0, size - 1), value=self.mask_token_id)
        places = torch.arange(size, device=tokens.device)[None]
        cache.branches = Branches(torch.ones_like(places).bool().expand(1, size, -1), places)
        turn = state.turn(size)

        def run(tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            hidden = self.embed(readout, tokens)
            for number, layer in enumerate(self.layers):
                queries, keys, values, *kept = layer.enter(hidden, Rotation(cos, sin))
                keys, values = cache.update(keys, values, number)
                assert cache.mask is not None, "a tree's pass has one"
                mixed = grouped_attention(queries, keys, values, cache.mask)
                hidden = layer.finish(hidden, mixed, *kept)
            hidden = self.norm(hidden)[:, self.first_place :]
            return readout.logits(hidden.to(readout.head.dtype)), hidden

        inputs = [tokens, turn.cos, turn.sin]
        key = readout.embedding.data_ptr(), readout.head.data_ptr()
        logits, state.hidden = cache.run(run, inputs, key=key)
        cache.rollback(state.committed)
        return logits

    def newest_states(self, state: DFlashState, width: int) -> Float[Tensor, "batch width hidden"]:
        """Return the block's state at the newest depth, for each node of the level before."""
        assert state.hidden is not None
        return state.hidden[:, state.depth - 1, None].expand(-1, width, -1)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return z-lab's layout, which counts a layer's output where we count the next's input."""
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **self.serving_keys(),
            "num_hidden_layers": self.config.num_layers,
            "num_target_layers": self.spec.num_layers,
            "block_size": self.config.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": [layer - 1 for layer in self.captures],
                **({} if self.config.fusion == EVERY_LAYER else {"fusion": self.config.fusion}),
            },
        }
        return config, dict(self.state_dict())


def _places_in_answer(batch: Batch) -> Int[Tensor, "batch seq"]:
    """Return how many trained tokens stand right before each trained token in its text."""
    columns = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    before = functional.pad(batch.loss_mask, (1, 0))[:, :-1] & (batch.positions > 0)
    first = columns.where(batch.loss_mask & ~before, 0).cummax(1).values
    return columns - first
