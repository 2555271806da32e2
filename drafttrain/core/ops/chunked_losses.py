"""Token losses, a chunk of positions at a time: the logits of a whole batch never exist.

Logits over a vocabulary are by far the largest tensors of a training step. A chunk's logits give
their loss and at once its gradient, and are released: only the gradients of the states and of the
head's weight stay (Liger's fused linear cross-entropy, Hsu et al., 2024, arXiv:2410.10989). The
target's distribution of a chunk is computed once, for all depths or heads that predict its tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.losses import FirstMiss, TokenLossConfig
from drafttrain.core.ops.layer_calls import wide_dtype
from drafttrain.core.ops.products import multiplies_into_float32, wide_linear
from drafttrain.core.readout import Readout
from drafttrain.core.types import LossTerm
from drafttrain.core.vocab import DraftVocab

# Logits of a chunk: few enough for a CPU's cache, enough to occupy a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}
FEWEST_POSITIONS = 128  # with fewer, reading the head's weight takes longer than the product
_limits: ContextVar[tuple[int, int, str] | None] = ContextVar("chunk_limits", default=None)


@contextmanager
def chunk_limits(elements: int, fewest: int, device_type: str = "cpu") -> Iterator[None]:
    """Compute in the block as this type of device does, in chunks of these limits: for a plan."""
    token = _limits.set((elements, fewest, device_type))
    try:
        yield
    finally:
        _limits.reset(token)


def limits_of_chunks(device: torch.device) -> tuple[int, int, str]:
    """Return how many logits a chunk has at most, its fewest positions, and the type of device."""
    usual = CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"], FEWEST_POSITIONS
    return _limits.get() or (*usual, device.type)


@dataclass(frozen=True)
class OutputHead:
    """How states become logits: cap * tanh(scale * (states @ weight.T + bias) / cap).

    added: a second weight, of the columns of the states after those of the first: their product is
    added to the logits as it is.
    """

    weight: Float[Tensor, "vocab width"]
    bias: Float[Tensor, " vocab"] | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    added: Float[Tensor, "vocab rank"] | None = None

    @classmethod
    def of(cls, readout: Readout) -> "OutputHead":
        """Return the target's own head."""
        return cls(readout.head, readout.head_bias, readout.logit_scale, readout.soft_cap)


@dataclass(frozen=True)
class TargetProbs:
    """The inputs of the target's distribution and most likely token at each position to predict."""

    readout: Readout
    final_hidden: Float[Tensor, "row hidden"]
    places: Int[Tensor, " position"]  # the row of the state that the target predicts from
    vocab: DraftVocab | None  # renormalise over it, and leave out positions outside it


Sums = tuple[Tensor, ...]


class _ChunkProbs(NamedTuple):
    probs: Tensor | None
    choices: Tensor  # in the drafter's vocabulary; -1: outside it
    kept: Tensor | None  # the positions of the chunk that are kept, or a mask of them; None: all


def chunked_losses(
    config: TokenLossConfig,
    weights: Sequence[float],
    heads: Sequence[OutputHead],
    states: Sequence[Float[Tensor, "_ width"]],
    places: Int[Tensor, "depth position"],
    labels: Int[Tensor, " position"],
    target_probs: TargetProbs | None,
    against_text: bool = False,
    first_miss: FirstMiss | None = None,
    overlap: bool = False,
) -> Sums:
    """Return the losses of every depth (or parallel head), with gradients to states and heads.

    By depth: sums of losses, positions, correct positions, positions outside the vocabulary.
    overlap: after them sum min(target_probs, draft_probs) of each depth and position, a constant;
    zero where a position is not predicted. Only over the target's whole vocabulary.

    heads: one for each depth, or one for all. states: by depth. places: the row of states[depth]
    from which a position is predicted at that depth, -1 where it is not. labels: the text's tokens
    in the drafter's vocabulary. target_probs: may be None for losses on the text alone.
    against_text: correct means equal to the text, not to the target's choice. first_miss: leaves
    losses out of their sums, and nothing out of the counts; positions outside the vocabulary are
    misses.

    The sums must be differentiated together and once, weighted by `weights` times any number (as in
    `weighted_sum`). Otherwise the chunks are computed a second time on a CPU; another device stops
    with an error, because the host would have to wait for it to know. Not twice differentiable.
    """
    device = places.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    whole = target_probs is not None and target_probs.vocab is None
    assert whole or not overlap, "an overlap is with the target's whole distribution"
    given = (places, labels, target_probs, against_text, first_miss, overlap)
    task = _Task(config, tuple(heads), dtype, *given)
    parameters = [(head.weight, head.bias, head.added) for head in heads]
    tensors = (*states, *(tensor for kind in zip(*parameters, strict=True) for tensor in kind))
    if torch.is_grad_enabled():
        sums, *counts, found = _Chunked.apply(task, tuple(weights), *tensors)
    else:  # inside a Function gradients are always off: it could not know
        done = _Pass(task, weights, tensors, [False] * len(tensors))
        sums, counts, found = done.loss, [done.correct, done.uncovered], done.overlap
    return sums, (places >= 0).sum(1), *counts, *([found] if overlap else [])


def loss_terms(weights: Sequence[float], sums: Sums) -> list[LossTerm]:
    """Return the sums of `chunked_losses` as loss terms, one per depth."""
    columns = [column.unbind() for column in sums[:4]]
    return [LossTerm(weight, *row) for weight, *row in zip(weights, *columns, strict=True)]


@dataclass(frozen=True)
class _Task:
    """The inputs of the losses that are not differentiated."""

    config: TokenLossConfig
    heads: tuple[OutputHead, ...]
    dtype: torch.dtype | None  # of matrix products, if autocast sets it
    places: Tensor
    labels: Tensor
    target_probs: TargetProbs | None
    against_text: bool
    first_miss: FirstMiss | None
    overlap: bool

    def cast(self, tensor: Tensor | None) -> Any:
        """Return a tensor in the dtype of matrix products."""
        return tensor if tensor is None or self.dtype is None else tensor.to(self.dtype)


class _Pass:
    """One pass over all chunks: sums by depth, and the gradient of their weighted sum.

    tensors: states by depth, the heads' weights, their biases, their added weights; `wanted` marks
    those whose gradient is needed, and `gradients` holds it.
    """

    def __init__(
        self,
        task: _Task,
        factors: Sequence[float],
        tensors: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> None:
        self.task, self.factors, self.backward = task, factors, any(wanted)
        depths, device = len(task.places), task.places.device
        self.states: list[Any] = list(tensors[:depths])
        self.budget, self.fewest, device_type = limits_of_chunks(device)
        self.fused = multiplies_into_float32(device_type)
        heads = len(task.heads)
        weights, self.biases, added = (
            tensors[start : start + heads] for start in range(depths, len(tensors), heads)
        )
        self.copies: dict[int, Tensor] = {}
        self.weights, self.added = [*map(task.cast, weights)], [*map(task.cast, added)]
        self.read_weights = [*map(self._as_read, weights, self.weights)]
        self.read_added = [*map(self._as_read, added, self.added)]
        self.wide = wide_dtype(self.weights[0])
        # A state's gradient is written once, a parameter's summed over chunks in float32 or wider.
        self.gradients = [
            torch.zeros_like(tensor, dtype=tensor.dtype if i < depths else wide_dtype(tensor))
            if want and tensor is not None
            else None
            for i, (tensor, want) in enumerate(zip(tensors, wanted, strict=True))
        ]
        self.of_states = self.gradients[:depths]
        self.of_weights = self.gradients[depths : depths + heads]
        self.of_biases = self.gradients[depths + heads : depths + 2 * heads]
        self.of_added = self.gradients[depths + 2 * heads :]
        self.loss = torch.zeros(depths, dtype=self.wide, device=device)
        self.correct = torch.zeros(depths, dtype=torch.long, device=device)
        self.uncovered = torch.zeros(depths, dtype=torch.long, device=device)
        by_position = task.places.shape if task.overlap else (depths, 0)
        self.overlap = torch.zeros(by_position, dtype=self.wide, device=device)
        self.target = None
        if task.target_probs is not None:
            self.target = OutputHead.of(task.target_probs.readout)
            rounded = task.cast(self.target.weight)
            self.target_dtype = rounded.dtype
            self.target_weight = self._as_read(self.target.weight, rounded)
        with torch.autocast(device.type, enabled=False):
            self._run()

    def _run(self) -> None:
        task = self.task
        heads = [*task.heads, *([] if self.target is None else [self.target])]
        size = max(self.fewest, self.budget // max(len(head.weight) for head in heads))
        for start in range(0, task.places.shape[1], size):
            piece = slice(start, start + size)
            places, labels, chunk = task.places[:, piece], task.labels[piece], self._chunk(piece)
            at = torch.arange(start, start + len(labels), device=labels.device)
            if chunk is not None and chunk.kept is not None:
                known = (places >= 0).sum(1)
                if chunk.kept.dtype == torch.bool:
                    places = places.masked_fill(~chunk.kept, -1)
                else:
                    places, labels = places[:, chunk.kept], labels[chunk.kept]
                    at = at[chunk.kept]
                self.uncovered += known - (places >= 0).sum(1)
            choices = labels if chunk is None or task.against_text else chunk.choices
            probs = None if chunk is None else chunk.probs
            overlap = self.overlap[:, piece]
            for index, head in enumerate(task.heads):
                depths = range(len(places)) if len(task.heads) == 1 else range(index, index + 1)
                together = max(1, self.budget // max(1, len(labels) * len(head.weight)))
                for group in (depths[i : i + together] for i in range(0, len(depths), together)):
                    self._compare(index, group, at, places, labels, choices, probs, overlap)

    def _as_read(self, weight: Tensor | None, rounded: Tensor | None) -> Any:
        """Return a weight as `wide_linear` takes it; several heads may have the same one."""
        if weight is None or rounded is None or self.fused or rounded.dtype == wide_dtype(rounded):
            return rounded
        readout = None if self.task.target_probs is None else self.task.target_probs.readout
        if readout is not None and weight is readout.head:
            return readout.float32_head()
        if id(weight) not in self.copies:
            self.copies[id(weight)] = weight.to(wide_dtype(weight))
        return self.copies[id(weight)]

    def _logits(
        self, head: OutputHead, weight: Tensor, bias: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits in float32 at least, and the derivative of their soft cap, if any."""
        logits = wide_linear(hidden, weight, bias, self.fused)
        if head.scale != 1.0:
            logits = logits.mul_(head.scale)
        if head.soft_cap is None:
            return logits, None
        bent = logits.div_(head.soft_cap).tanh_()
        return head.soft_cap * bent, 1 - bent.square()

    def _chunk(self, piece: slice) -> _ChunkProbs | None:
        """Return the target's distribution and choices at a chunk of positions, as constants."""
        target = self.task.target_probs
        if target is None or self.target is None:
            return None
        hidden = target.final_hidden[target.places[piece]].to(self.target_dtype)
        logits, _ = self._logits(self.target, self.target_weight, self.target.bias, hidden)
        logits = logits.to(self.wide)
        best = logits.max(-1)
        if target.vocab is None:
            needed = self.task.config.needs_target_probs or self.task.overlap
            return _ChunkProbs(logits.softmax(-1) if needed else None, best.indices, None)
        choices, ids = target.vocab.draft_ids[best.indices], target.vocab.target_ids
        if self.task.config.of_rejection:
            return _ChunkProbs(logits.softmax(-1).index_select(1, ids), choices, None)
        # A NaN must reach the loss, where it is caught, and not count as a token left out.
        kept = (choices >= 0) | best.values.isnan()
        probs = None
        if kept.device.type != "cpu":  # the host would wait for their number: all are compared
            if self.task.config.needs_target_probs:
                probs = logits.index_select(1, ids).softmax(-1)
            return _ChunkProbs(probs, choices.clamp(min=0), kept)
        kept = kept.nonzero()[:, 0]
        if self.task.config.needs_target_probs:
            probs = logits.index_select(1, ids)[kept].softmax(-1)  # 2 ms, not 13 by two indices
        return _ChunkProbs(probs, choices[kept].clamp(min=0), kept)

    def _compare(
        self,
        index: int,
        depths: range,
        at: Tensor,
        places: Tensor,
        labels: Tensor,
        choices: Tensor,
        probs: Tensor | None,
        overlap: Tensor,
    ) -> None:
        """Add a chunk's losses at several depths of one head, and their gradients."""
        config, head, first_miss = self.task.config, self.task.heads[index], self.task.first_miss
        added = self.added[index]
        rows = places[depths.start : depths.stop]
        known, rows = rows >= 0, rows.clamp(min=0)
        picked = [self.states[d].index_select(0, r) for d, r in zip(depths, rows, strict=True)]
        hidden = torch.cat(picked).mul_(known.flatten()[:, None]).to(self.weights[index].dtype)
        width = self.weights[index].shape[1]
        hidden, more = hidden[:, :width], hidden[:, width:]
        logits, curve = self._logits(head, self.read_weights[index], self.biases[index], hidden)
        if added is not None:
            more = more.to(added.dtype)
            logits += wide_linear(more, self.read_added[index], fused=self.fused)
        factors = []
        for depth, here, part in zip(depths, known, logits.chunk(len(depths)), strict=True):
            hits = part.gather(-1, choices.clamp(min=0)[:, None])[:, 0] >= part.amax(-1)
            hits &= here & (choices >= 0)
            self.correct[depth] += hits.sum()
            if self.task.overlap and probs is not None:
                common = torch.minimum(part.softmax(-1), probs).sum(-1)
                overlap[depth] = torch.where(here, common, 0)
            if first_miss is not None:
                here = here & first_miss.counts(depth, at)
                first_miss.right[depth, at] = hits & here
            if self.backward:
                losses, times = config.token_loss_and_gradient(part, probs, labels)
                factors.append(here[:, None].to(self.wide) * times * self.factors[depth])
            else:
                losses = config.token_loss(part, probs, labels)
            self.loss[depth] += torch.where(here, losses, 0).sum()
        if not self.backward:
            return
        # From the gradients of the logits, each row times its factor.
        factor = torch.cat(factors)
        if added is not None:  # neither scaled nor capped
            slopes = logits.to(added.dtype)
            back_more = (slopes @ added).mul_(factor)
            total = self.of_added[index]
            if total is not None:
                total.add_(slopes.T @ (more * factor).to(more.dtype))
        factor = factor * head.scale
        slopes = logits if curve is None else logits.mul_(curve)
        bias = self.of_biases[index]
        if bias is not None:
            bias.add_((slopes * factor).sum(0))
        slopes = slopes.to(hidden.dtype)
        if any(self.of_states[depth] is not None for depth in depths):
            back = (slopes @ self.weights[index]).mul_(factor)
            back = back if added is None else torch.cat([back, back_more.to(back.dtype)], dim=1)
            for depth, r, part in zip(depths, rows, back.chunk(len(depths)), strict=True):
                into = self.of_states[depth]
                if into is not None:
                    into.index_add_(0, r, part.to(into.dtype))
        total = self.of_weights[index]
        if total is not None:
            hidden = (hidden * factor).to(hidden.dtype)
            if total.dtype == hidden.dtype:
                total.addmm_(slopes.T, hidden)
            else:
                total.add_(slopes.T @ hidden)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, task: _Task, factors: tuple[float, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.task, ctx.factors, ctx.wanted = task, factors, ctx.needs_input_grad[2:]
        done = _Pass(task, factors, tensors, ctx.wanted)
        ctx.gradients = done.gradients
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(done.correct, done.uncovered, done.overlap)
        return done.loss, done.correct, done.uncovered, done.overlap

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        factors = ctx.factors
        if grad.device.type != "cpu":
            scale: float | Tensor | None = _common_on_device(grad, factors)
        else:
            scale = _common(grad.tolist(), factors)
        if scale is None:
            gradients, factors, scale = None, grad.tolist(), 1.0
        if gradients is None:
            gradients = _Pass(ctx.task, factors, ctx.saved_tensors, ctx.wanted).gradients
        scaled = [g if g is None else g.mul_(scale) for g in gradients]
        pairs = zip(scaled, ctx.saved_tensors, strict=True)
        return None, None, *(g if g is None else g.to(tensor.dtype) for g, tensor in pairs)


def _common(grads: Sequence[float], factors: Sequence[float]) -> float | None:
    """Return the number c with grads = c * factors; None if there is none."""
    ratios = [grad / factor for grad, factor in zip(grads, factors, strict=True)]
    same = all(abs(ratio - ratios[0]) <= 1e-6 * abs(ratios[0]) for ratio in ratios)
    return ratios[0] if same else None


def _common_on_device(grads: Tensor, factors: Sequence[float]) -> Tensor:
    """Return the number c with grads = c * factors; without one, the device stops with an error.

    The host does not wait for the answer, so it cannot compute the chunks a second time.
    """
    ratios = torch.stack([g / factor for g, factor in zip(grads.unbind(), factors, strict=True)])
    off = (ratios - ratios[0]).abs() > 1e-6 * ratios[0].abs()  # a NaN passes: the engine refuses it
    torch._assert_async(~off.any(), "the losses of one call must be weighted by its weights")
    return ratios[0] + 0 * ratios.sum()
