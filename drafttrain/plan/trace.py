"""The cost of a drafter, counted by running its own step and its own draft without weights.

Its weights and the target's states are `Outline`s: CPU tensors without values or memory. What the
drafter's code allocates and multiplies is counted. (torch's FakeTensorMode takes ten times as
long; the plain meta device has no autocast, and its attention is not a flash kernel's.)
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry

from drafttrain.core.ops.chunked_losses import CHUNK_ELEMENTS, FEWEST_POSITIONS, chunk_limits
from drafttrain.core.ops.layer_calls import LayerCalls
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, TargetFeatures, TargetSpec, weighted_sum
from drafttrain.drafters.base import Drafter, DrafterConfig, TrainingChance, draft_vocab_size
from drafttrain.runtime.untrusted_input import shown
from drafttrain.training.engine.optimizer import muon_matrices, newton_schulz_flops

aten = torch.ops.aten
CPU = torch.device("cpu")
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
TRACED = 64  # tokens of the smaller step that is traced, at least; the larger has twice as many


class UnknownCostError(ValueError):
    """The cost of a target or a drafter is not known without loading it."""


@dataclass(frozen=True)
class Load:
    """One micro batch on one rank (rows x length tokens), and the step it is part of."""

    rows: int
    length: int
    ranks: int
    ranks_here: int  # ranks on one machine
    tokens_per_step: int
    loss_share: float
    dtype: str
    checkpointing: bool
    low: bool  # the drafter's weights in bfloat16, with float32 masters
    on_cpu: bool
    averaged: bool = False  # whether a moving average of the weights is kept

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch."""
        return self.rows * self.length

    @property
    def width(self) -> int:
        """Bytes of a value."""
        return 2 if self.dtype == "bfloat16" else 4


@dataclass(frozen=True)
class Pass:
    """One pass of a drafter in drafting, for one row; zero where parallel heads need no pass."""

    flops: int
    flops_per_key: int  # in addition, for each token that it attends to
    weights: int  # that it multiplies by, the drafter's and the target's
    layers: int  # of attention


@dataclass(frozen=True, eq=False)
class Step:
    """Forward and backward of a micro batch: operations by token, and bytes while it runs.

    The last axis of the bytes is (fixed, for each token); the first one is that of allocations.
    """

    flops: float
    flops_per_key: float  # in addition, for each token that a token attends to
    operations: int  # of one micro batch, however many tokens it has
    kept: np.ndarray  # at the end of the forward pass
    forward: np.ndarray  # after each allocation; the largest counts
    backward: np.ndarray
    chunk: float  # tokens, trained or not, per chunk of the losses
    copies: int  # bytes of the weights that autocast rounds, which the others include

    def peak(self, tokens: float) -> float:
        """Return the bytes besides weights, their copies and gradients, and features."""
        one = [1.0, min(tokens, self.chunk)]  # the losses take as much for more tokens
        losses = (self.forward @ one).max() - self.kept @ one
        kept, back = self.kept @ [1.0, tokens], (self.backward @ [1.0, tokens]).max()
        return float(max(kept + losses, back)) - self.copies


@dataclass(frozen=True)
class DraftCost:
    """The cost of drafting for one row."""

    key_values: int  # numbers per token in the drafter's cache
    first: Pass  # reads what was verified, and drafts a token
    further: Pass  # reads its own token, and drafts the next


def untrained(recompute: bool) -> Step:
    """Raise AssertionError: a drafter that is used as it is has no training step."""
    raise AssertionError("the drafter is not trained")


@dataclass(frozen=True)
class DrafterCost:
    """The size of a drafter, and its cost in training and serving."""

    num_parameters: int
    draft_vocab: int
    draft: Callable[[], DraftCost]
    step: Callable[[bool], Step] = untrained  # recomputing layers' activations or not
    num_trained: int = 0
    num_muon: int = 0  # of the trained, those that Muon would update
    muon_flops: tuple[float, ...] = ()  # of its update, by matrix
    num_kept: int = 0  # numbers of the target's matrices that it has copies of, as buffers
    num_rows: int = 0  # numbers of the rows of the target's head that it copies, never saved
    largest: int = 0  # weights of its largest tensor
    captures: tuple[int, ...] = ()
    max_depth: int | None = None
    served_width: float | None = None  # bytes of a number while serving; None: as in training

    @property
    def num_served(self) -> int:
        """How many numbers it drafts with: its parameters and the copies that it keeps."""
        return self.num_parameters + self.num_kept + self.num_rows


class Count:
    """Counts what operations on outlines allocate and multiply while it is open."""

    current: ClassVar["Count | None"] = None

    def __init__(self, weights: Iterable[Tensor] = (), known: Iterable[Any] = ()) -> None:
        self.now = self.flops = self.flops_per_key = self.copies = self.key_values = self.layers = 0
        self.operations = 0  # that a device would launch kernels for
        self.history: list[int] = []  # bytes after each allocation
        self.kept = self.end = 0  # bytes, and allocations, when the forward pass ended
        self.used: dict[int, int] = {}  # weights that products read, by storage
        self._weights = {_storage(w): w.numel() for w in weights if isinstance(w, Outline)}
        known = [_storage(tensor) for tensor in known if isinstance(tensor, Outline)]
        self._alive = dict.fromkeys([*self._weights, *known], 0)

    def __enter__(self) -> "Count":
        Count.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Count.current = None

    def see(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operation on meta tensors."""
        if op is ATTENTION:  # two products
            self.layers += 1
            self.flops_per_key += 4 * args[0].numel()
            self.key_values += sum(heads.shape[1] * heads.shape[3] for heads in args[1:3])
        elif op is ATTENTION_BACKWARD:
            self.flops_per_key += 8 * args[1].numel()
        elif formula := flop_registry.get(getattr(aten, op.__name__.removesuffix("_"), op)):
            self.flops += formula(*args, **kwargs, out_val=result)
            read = {_storage(tensor) for tensor in args if isinstance(tensor, Tensor)}
            self.used |= {key: self._weights[key] for key in read & self._weights.keys()}
        elif op is aten._to_copy and _storage(args[0]) in self._weights:
            self.copies += result.nbytes
        held = len(self.history)
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._alive:
                self._hold(tensor.untyped_storage())
        self.operations += len(self.history) > held or op.__name__.endswith("_")  # not views

    def _hold(self, storage: torch.UntypedStorage) -> None:
        self._alive[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.history.append(self.now)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


class Outline(Tensor):
    """A CPU tensor without values, around a tensor of the meta device.

    If the program asks for a value, it answers as for a regular batch: `all` is true, `any` is
    false, no place is left out, and numbers are zero.
    """

    meta: Tensor
    rare: bool

    @staticmethod
    def __new__(cls, meta: Tensor, rare: bool = False) -> "Outline":
        """Wrap a meta tensor."""
        made = Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=CPU
        )
        made.meta, made.rare = meta, rare
        return made

    @classmethod
    def of(cls, *shape: int, dtype: torch.dtype) -> "Outline":
        return cls(torch.empty(shape, dtype=dtype, device="meta"))

    def tolist(self) -> Any:
        return torch.zeros(self.shape, dtype=self.dtype).tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on the meta device, and count it."""
        op = func.overloadpacket
        if op is aten._local_scalar_dense:
            return not args[0].rare if args[0].dtype == torch.bool else 0
        if op is aten.index:
            args = (args[0], _by_place(args[1]))
        outer: dict[int, Tensor] = {}  # whose the meta tensors are

        def inside(value: Any) -> Any:
            if isinstance(value, Tensor):
                meta = value.meta if isinstance(value, Outline) else value.to("meta")
                outer[id(meta)] = value
                return meta
            return torch.device("meta") if isinstance(value, torch.device) else value

        def outside(meta: Tensor) -> Tensor:  # an argument is itself
            return outer[id(meta)] if id(meta) in outer else Outline(meta, op is aten.any)

        args, kwargs = tree_map(inside, (args, kwargs or {}))
        result = _places(args[0]) if op is aten.nonzero else func(*args, **kwargs)
        if Count.current is not None:
            Count.current.see(op, args, kwargs, result)
        return tree_map_only(Tensor, outside, result)


def _places(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.long)


def _by_place(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            places = _places(index.meta) if isinstance(index, Outline) else index.nonzero()
            found += places.unbind(1)
        else:
            found.append(index)
    return found


class NoNoise(TrainingChance):
    """Feature noise as an outline: it takes memory, and has no values."""

    def uniform_like(self, values: Tensor, document: Tensor) -> Tensor:
        return torch.empty_like(values)


def trace(
    config: DrafterConfig,
    spec: TargetSpec,
    target: Callable[[], Any],
    load: Load,
) -> DrafterCost:
    """Return the cost of the drafter that `config` builds; other steps and a draft run on demand.

    target: returns Transformers' configuration of the target. ValueError where the drafter does not
    fit the target; UnknownCostError where its code needs values.
    """
    device_type = "cpu" if load.on_cpu else "cuda"
    dtype, budget = getattr(torch, load.dtype), CHUNK_ELEMENTS[device_type]
    trained = load.tokens * load.loss_share
    chunk = min(trained, max(FEWEST_POSITIONS, budget // spec.vocab_size))
    with torch.device("meta"):
        drafter = config.build(spec)
        with _unknown(config.name):
            drafter.outline(target)
    sizes = [parameter.numel() for parameter in drafter.parameters()]

    @functools.cache
    def step(recompute: bool) -> Step:
        with _unknown(config.name):
            _outline(drafter, torch.bfloat16 if load.low else torch.float32)
            with LayerCalls(recompute).active():
                return _step(drafter, dtype, load.loss_share, chunk, budget, device_type)

    @functools.cache
    def draft() -> DraftCost:
        with _unknown(config.name):
            _outline(drafter, dtype)
            return _draft(drafter, dtype)

    vocab = draft_vocab_size(drafter)
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    by_muon = muon_matrices(drafter)
    step(False)
    return DrafterCost(
        num_parameters=sum(sizes),
        num_trained=sum(p.numel() for p in trainable),
        num_muon=sum(p.numel() for p in by_muon),
        muon_flops=tuple(newton_schulz_flops(*p.shape) for p in by_muon),
        num_kept=sum(b.numel() for b in drafter.buffers() if b.dim() > 1),
        num_rows=vocab * spec.hidden_size if drafter.copies_head and vocab < spec.vocab_size else 0,
        largest=max(sizes),
        captures=drafter.captures,
        draft_vocab=vocab,
        max_depth=drafter.max_depth,
        draft=draft,
        step=step,
    )


@contextmanager
def _unknown(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any drafter's code, or of torch where values are needed
        raise UnknownCostError(f"drafter={name} cannot be planned: {shown(error, 400)}") from error


def _step(
    drafter: Drafter, dtype: torch.dtype, share: float, chunk: float, budget: int, device_type: str
) -> Step:
    """Return the cost of a step, from two small ones whose difference is the cost per token.

    Everything but the weights' own share grows with the tokens; the losses up to a chunk of them.
    """
    # So many that each step has a block, or a row of depths, for every part that it is cut into.
    tokens = max(TRACED, math.ceil((drafter.unroll + 2) / share))
    few = max(1, round(tokens * share))
    small, large = (
        _traced(
            *(drafter, dtype, times * tokens, times * few),
            *(int(budget * times * few / chunk), device_type),
        )
        for times in (1, 2)
    )
    one, two = (np.array([count.kept, *count.history]) for count in (small, large))
    kept, lines = np.split(np.stack([2 * one - two, (two - one) / tokens], axis=1), [1])
    return Step(
        flops=large.flops / (2 * tokens),
        flops_per_key=large.flops_per_key / (2 * tokens),
        operations=large.operations,
        kept=kept[0],
        forward=lines[: large.end],
        backward=lines[large.end :],
        chunk=chunk / share,
        copies=large.copies,
    )


def _traced(
    drafter: Drafter, dtype: torch.dtype, tokens: int, trained: int, budget: int, device_type: str
) -> Count:
    """Return the counts of forward and backward of one row with so many trained tokens."""
    readout, batch, features = _inputs(drafter, dtype, tokens, trained)
    parameters = list(drafter.parameters())
    for parameter in parameters:
        if parameter.requires_grad:  # gradients are counted separately
            parameter.register_post_accumulate_grad_hook(_forget)
    known = [*drafter.buffers(), *features.captured.values(), features.final_hidden]
    known += [readout.embedding, readout.head]
    with Count(parameters, known) as count, chunk_limits(budget, trained, device_type):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses = drafter(batch, features, NoNoise())
        count.kept, count.end = count.now, len(count.history)
        weighted_sum(losses).backward()
    return count


@torch.no_grad()
def _draft(drafter: Drafter, dtype: torch.dtype) -> DraftCost:
    """Return the cost of reading a text and drafting twice, for one row."""
    readout, batch, features = _inputs(drafter, dtype, TRACED, 0)
    weights = [*drafter.parameters(), *drafter.buffers(), readout.head]
    if drafter.copies_head and drafter.vocab is not None:
        weights.append(readout.with_rows(drafter.vocab.target_ids).head)
    last = {layer: hidden[:, -1:] for layer, hidden in features.captured.items()}
    newest = TargetFeatures(last, features.final_hidden[:, -1:], readout)
    token = batch.tokens[:, -1:]
    state = drafter.begin(readout, token[:, 0], 2 * TRACED)
    drafter.observe(state, batch.tokens, [TRACED], features)
    drafter.expand(state, None)

    with Count(weights) as first:
        drafter.observe(state, token, [1], newest)
        drafter.expand(state, None)
    with Count(weights) as further:
        drafter.expand(state, token)
    passes = [
        Pass(c.flops, c.flops_per_key, sum(c.used.values()), c.layers) for c in (first, further)
    ]
    return DraftCost(first.key_values, *passes)


def _inputs(
    drafter: Drafter, dtype: torch.dtype, tokens: int, trained: int
) -> tuple[Readout, Batch, TargetFeatures]:
    """Return one row of a text whose last tokens are trained, with the target's features for it."""
    vocab, width = drafter.spec.vocab_size, drafter.spec.hidden_size
    places = torch.arange(tokens)[None]
    zeros = torch.zeros_like(places)
    states = [Outline.of(1, tokens, width, dtype=dtype) for _ in (*drafter.captures, None)]
    embedding, head = (Outline.of(vocab, width, dtype=dtype) for _ in range(2))
    readout = Readout(embedding, head)
    captured: dict[int, Tensor] = dict(zip(drafter.captures, states, strict=False))
    batch = Batch(zeros, places >= tokens - trained, places, zeros)
    return readout, batch, TargetFeatures(captured, states[-1], readout)


def _outline(drafter: Drafter, dtype: torch.dtype) -> None:
    """Replace weights, and buffers without values, by outlines; weights become `dtype`."""
    made: dict[Tensor, Any] = {}

    def outlined(tensor: Tensor, dtype: torch.dtype) -> Any:
        if tensor not in made:
            made[tensor] = Outline.of(*tensor.shape, dtype=dtype)
            if isinstance(tensor, nn.Parameter):
                made[tensor] = nn.Parameter(made[tensor], requires_grad=tensor.requires_grad)
        return made[tensor]

    for module in drafter.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = outlined(weight, dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and (isinstance(buffer, Outline) or buffer.is_meta):
                module._buffers[name] = outlined(buffer, buffer.dtype)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _storage(tensor: Tensor) -> int:
    meta = tensor.meta if isinstance(tensor, Outline) else tensor
    return meta.untyped_storage()._cdata
