"""P-EAGLE: EAGLE-3 that drafts all tokens in one pass (arXiv:2602.01469, 2026)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.ops.layer_calls import compiled, device_of, recomputed
from drafttrain.core.ops.layers import ByHead, Rotation, attend_cached
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import Predictions, attention_mask, host_of, positions_to_predict
from drafttrain.core.transfer import send, send_numbers
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.drafters.base import TrainingChance
from drafttrain.drafters.eagle3 import Eagle3, FusingConfig, Hidden
from drafttrain.drafters.serving.p_eagle_layout import PEagleLayout
from drafttrain.drafters.shared.layer import LayerState
from drafttrain.drafters.shared.parallel import (
    Attend,
    BlockLayer,
    ParallelDrafter,
    ParallelState,
    mask_token,
)
from drafttrain.drafters.shared.publications import About
from drafttrain.runtime import limits


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(FusingConfig):
    """Shape and loss of P-EAGLE; null takes the target's own value, or the usual layers."""

    num_layers: limits.PositiveInt
    mask_token_id: int | None
    cod_ratio: limits.PositiveFraction

    layout = PEagleLayout()

    def build(self, spec: TargetSpec) -> "PEagle":
        return PEagle(self, spec)


@dataclass(frozen=True)
class Chains:
    """The slots of a batch that hold a mask: chain i of a row follows position columns[row, i].

    Longest first: the slots at depth d, from 1, are those of the first sizes[d - 1] chains of each
    row, some of which are padding. predictions: by slots.
    """

    columns: Int[Tensor, "batch chain"]
    sizes: Sequence[int]
    predictions: Predictions


def keep_share(
    trained: Bool[Tensor, "batch seq depth"],
    drawn: Float[Tensor, "batch seq"],
    document: Int[Tensor, "batch seq"],
    ratio: float,
) -> Bool[Tensor, "batch seq depth"]:
    """Return the slots that conditional drop-token keeps, of those that predict a trained token.

    Of a conversation's n positions trained at depth 0, n * ratio**d are kept at depth d, rounded,
    or all that there are; from depth 2 on, each of them is kept at the depth before too
    (arXiv:2602.01469; as in speculators, where n is of a whole row, its share is at least 0.2, and
    is rounded down). drawn: a uniform for each position; the least ones are kept longest.
    """
    order = drawn.argsort(dim=1, stable=True)
    order = order.gather(1, document.gather(1, order).argsort(dim=1, stable=True))
    sorted_document = document.gather(1, order).contiguous()
    starts, ends = (
        torch.searchsorted(sorted_document, sorted_document, side=side)
        for side in ("left", "right")
    )

    def counted(slots: Tensor) -> Tensor:
        return functional.pad(slots.gather(1, order).cumsum(1), (1, 0))

    whole = counted(trained[..., 0])
    share = whole.gather(1, ends) - whole.gather(1, starts)
    kept = [trained[..., 0]]
    for depth in range(1, trained.shape[2]):
        pool = trained[..., depth] if depth == 1 else trained[..., depth] & kept[-1]
        before = counted(pool)
        ranks = before[:, :-1] - before.gather(1, starts)  # from 0, within the conversation's pool
        least = ranks < (share * ratio**depth).round()
        kept.append(pool & torch.zeros_like(pool).scatter(1, order, least))
    return torch.stack(kept, dim=-1)


class PEagle(ParallelDrafter, Eagle3):
    """Pairs fused features with the next token; deeper, a learned state with a mask's embedding.

    A slot at depth d after position n sees the pairs up to n, and the slots of its own chain before
    it. The first layer is EAGLE-3's, the others are plain.
    """

    about = About("A P-EAGLE", "2602.01469")
    published = ()  # as printed, speedups over EAGLE-3: none over plain decoding
    config: PEagleConfig

    def __init__(self, config: PEagleConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        self.max_depth = config.unroll
        self.mask_token_id = mask_token(config.mask_token_id, spec)
        # Named as in served files: `midlayer` is layer 0 there.
        numbers = range(1, config.num_layers)
        self.layers = nn.ModuleDict({str(number): BlockLayer(self.shape) for number in numbers})
        # A module, so that it is whole during its call where weights are sharded.
        self.mask_hidden = nn.Embedding(1, self.fc.in_features)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the token losses of every depth, weighted by decay**depth, from one pass.

        In training `keep_share` draws anew, in each step, which slots count (conditional
        drop-token). Else every slot that predicts a trained token does. The target's distribution
        and labels are as in EAGLE-3.
        """
        chains, length = self._chains(batch, chance), batch.tokens.shape[1] - 1
        sizes = [length, *chains.sizes]
        masks = len(batch.tokens), sum(chains.sizes)
        tokens = batch.tokens.new_full(masks, self.mask_token_id)
        tokens = torch.cat([batch.tokens[:, 1:], tokens], dim=1)
        hidden = self.read(features, length)
        hidden = torch.cat([hidden, self.masked().expand(*masks, -1)], dim=1)
        starts = batch.positions.gather(1, chains.columns)
        places = [starts[:, :size] + depth for depth, size in enumerate(chains.sizes, start=1)]
        positions = torch.cat([batch.positions[:, :-1], *places], dim=1)
        turn = self.shape.rotation(positions, hidden.dtype)
        document = batch.document[:, :-1]
        causal = attention_mask(batch, pairs=True)
        order = torch.arange(length, device=document.device)
        seen = document.gather(1, chains.columns)[..., None] == document[:, None]
        seen = (seen & (order <= chains.columns[..., None]))[:, None]

        def attend(number: int, heads: ByHead) -> Tensor:
            queries, keys, values = (part.split(sizes, dim=2) for part in heads)
            mixed = []
            for depth, size in enumerate(sizes):
                past = [(keys[0], values[0])]
                for d in range(1, depth + 1):
                    past.append((keys[d][:, :, :size], values[d][:, :, :size]))
                mask = seen[:, :, :size] if depth else causal
                mixed.append(unrolled_attention(queries[depth], past, mask))
            return torch.cat(mixed, dim=2)

        hidden = self._layers(self.embed(features.readout, tokens), hidden, turn, attend)
        by_depth = self.norm(hidden).split(sizes, dim=1)
        states = [state.flatten(0, 1) for state in by_depth]
        return self.compare(states, chains.predictions, batch, features)

    def _chains(self, batch: Batch, chance: TrainingChance) -> Chains:
        host, steps = host_of(batch), self.unroll
        length = host.tokens.shape[1] - 1
        # By position and depth: the slot at depth d after position n predicts token n + 2 + d.
        trained, positions = (
            functional.pad(values[:, 2:], (0, steps)).unfold(1, steps, 1)
            for values in (host.loss_mask, host.positions)
        )
        depths = torch.arange(steps)
        kept = trained & (positions >= depths + 2)  # else the position is of another text
        if self.training and self.config.cod_ratio < 1:
            like = torch.empty(*host.document.shape, 1)
            drawn = chance.uniform_like(like, host.document)[:, :length]
            kept = keep_share(kept, drawn[..., 0], host.document[:, :length], self.config.cod_ratio)
        lengths = (kept * depths).amax(-1)
        columns = lengths.argsort(dim=1, descending=True, stable=True)
        counts = (lengths[..., None] >= depths[1:]).sum(1).amax(0).tolist()
        sizes = [max(1, count) for count in counts]
        rows, predicted = positions_to_predict(host, 2)
        after = predicted - 2 - depths[:, None]  # the position that a chain follows, by depth
        ranks = columns.argsort(dim=1)
        inside = after >= 0
        after = after.clamp(min=0)
        inside &= kept[rows, after, depths[:, None]]
        slots = torch.cat([after[:1], ranks[rows, after[1:]]])
        places = rows * torch.tensor([length, *sizes])[:, None] + slots
        found = columns[:, : max(sizes, default=1)], rows, predicted, places.where(inside, -1)
        columns, *parts = (send(part, batch.tokens.device) for part in found)
        return Chains(columns, sizes, Predictions(*parts))

    def _layers(self, embedded: Hidden, hidden: Hidden, turn: Rotation, attend: Attend) -> Hidden:
        """Return the last layer's output before the norm; attend: attention of layer `number`."""
        hidden = recomputed(self._first, embedded, hidden, turn, attend)
        for number, layer in enumerate(self.layers.values(), start=1):
            hidden = recomputed(self._further, layer, number, hidden, turn, attend)
        return hidden

    def _first(self, embedded: Hidden, hidden: Hidden, turn: Rotation, attend: Attend) -> Hidden:
        residual, *heads = compiled(self._enter, embedded, hidden, turn)
        return compiled(self._leave_first, residual, attend(0, tuple(heads)))

    def _enter(self, embedded: Hidden, hidden: Hidden, turn: Rotation) -> tuple[Tensor, ...]:
        inputs, residual = self.midlayer.inputs(embedded, hidden)
        return residual, *self.midlayer.self_attn.project(inputs, turn)

    def _leave_first(self, residual: Hidden, mixed: Tensor) -> Hidden:
        return self.midlayer.finish(residual, self.midlayer.self_attn.merge(mixed))

    def _further(
        self, layer: Any, number: int, hidden: Hidden, turn: Rotation, attend: Attend
    ) -> Hidden:
        mixed = attend(number, compiled(layer.enter, hidden, turn))
        return compiled(layer.finish, hidden, mixed)

    def masked(self) -> Float[Tensor, "1 1 hidden"]:
        """Return the fused state of a slot that holds a mask."""
        first = torch.zeros(1, 1, dtype=torch.long, device=device_of(self))
        return self.fuse(list(self.mask_hidden(first).chunk(len(self.captures), dim=-1)))

    def advance(
        self, state: LayerState, tokens: Tensor, hidden: Tensor, counts: list[int] | None
    ) -> Float[Tensor, "batch depth hidden"]:
        """Append pairs of tokens and features; return what the next tokens are drafted from.

        The same pass reads the slots after each row's last pair, which the cache then forgets.
        """
        assert isinstance(state, ParallelState)
        assert counts is not None, "a chain is drafted in the pass that observes"
        self.restart(state)
        room = self.unroll - 1
        real = torch.arange(tokens.shape[1] + room, device=tokens.device)
        real = real < send_numbers(counts, tokens.device)[:, None]
        tokens = functional.pad(tokens, (0, room)).where(real, self.mask_token_id)
        hidden = functional.pad(hidden, (0, 0, 0, room)).where(real[..., None], self.masked())
        return super().advance(state, tokens, hidden, counts)

    def through(
        self, state: LayerState, turn: Rotation, tokens: Tensor, hidden: Tensor, last: Tensor | None
    ) -> Tensor:
        assert last is not None

        def attend(number: int, heads: ByHead) -> Tensor:
            return attend_cached(heads, state.cache, number)

        hidden = self._layers(self.embed(state.readout, tokens), hidden, turn, attend)
        places = last[:, None] + torch.arange(self.unroll, device=last.device)
        return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))

    def draft(self, state: ParallelState) -> Float[Tensor, "batch depth draft_vocab"]:
        """Return the logits of every depth."""
        assert state.hidden is not None, "observe comes before expand"
        return self.logits(state.readout, state.hidden)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = super().to_serving()
        config["num_hidden_layers"] = self.config.num_layers
        config["ptd_token_id"] = self.mask_token_id
        config["n_predict"] = self.unroll
        tensors["mask_hidden"] = tensors.pop("mask_hidden.weight")[None]
        return config, tensors
