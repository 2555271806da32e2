"""The layers that drafters are made of, named as in Llama checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.ops.grouped_attention import grouped_attention
from drafttrain.core.ops.packed_weights import packed_linear
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.types import TargetSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), computed in float32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, values: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
        """Return values scaled to unit root mean square, times the weight."""
        training = torch.is_grad_enabled() and self.weight.requires_grad
        if training and values.device.type == "cpu" and not torch.compiler.is_compiling():
            return _Normed.apply(values, self.weight, self.eps)
        return rms_norm(values, self.weight, self.eps)


def rms_norm(
    values: Float[Tensor, "*shape width"], weight: Float[Tensor, " width"], eps: float
) -> Float[Tensor, "*shape width"]:
    """Return the norm in the dtype of `values`, by torch's kernel, which computes in float32.

    Autocast would return float32 on CUDA but not on a CPU: later operations would get another
    dtype, and the backward pass would keep a float32 copy of the input.
    """
    with torch.autocast(values.device.type, enabled=False):
        return functional.rms_norm(values, weight.shape, weight.to(values.dtype), eps)


class _Normed(torch.autograd.Function):
    """The norm in five passes, forward and backward: torch has a fused kernel for GPUs only."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(values.dtype, torch.float32)
        norms = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=wide)
        scales = norms.square_().div_(values.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(values, weight, scales)
        return (values * scales).mul_(weight).to(values.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        values, weight, scales = ctx.saved_tensors
        unit = values * scales
        times = grad * unit
        d_weight = times.flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        along = (times @ weight.to(times.dtype)).div_(-values.shape[-1])
        d_values = (grad * weight).to(unit.dtype).addcmul_(unit, along[..., None]).mul_(scales)
        return d_values.to(values.dtype), d_weight, None


class Rotation(NamedTuple):
    """Cosines and sines of rotary embeddings at given positions."""

    cos: Float[Tensor, "*batch seq head_dim"]
    sin: Float[Tensor, "*batch seq head_dim"]


def rotation(
    positions: Int[Tensor, "*batch seq"], head_dim: int, theta: float, dtype: torch.dtype
) -> Rotation:
    """Return the rotation of each position (RoFormer; Llama's half-split layout), in `dtype`."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * theta ** (-half / head_dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return Rotation(torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1))


def rotate(
    heads: Float[Tensor, "batch head seq head_dim"], turn: Rotation
) -> Float[Tensor, "batch head seq head_dim"]:
    """Return queries or keys, rotated."""
    cos, sin = turn.cos.unsqueeze(-3), turn.sin.unsqueeze(-3)
    if heads.requires_grad and torch.is_grad_enabled():
        return _Rotated.apply(heads, cos, sin)
    return _rotated(heads, cos, sin)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the heads with each pair (i, i + half) rotated; the tables hold each angle twice."""
    half = heads.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second = heads.split(half, dim=-1)
    if torch.compiler.is_compiling():  # it fuses them, and handles `out=` of a view wrongly (2.13)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    turned = torch.empty_like(heads)
    one, other = turned.split(half, dim=-1)
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=other).addcmul_(first, sin)
    return turned


class _Rotated(torch.autograd.Function):
    """A rotation whose backward is the opposite one: a third of the passes of the plain form."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def document_mask(
    document: Int[Tensor, "batch seq"], on_host: Int[Tensor, "batch seq"] | None = None
) -> Bool[Tensor, "batch 1 seq seq"] | None:
    """Return which keys each query may see, or None where a causal mask is enough.

    Padding is on the right of the document, so a causal mask alone hides it from a row's only
    document; a row that holds several needs the block-diagonal mask. on_host: the same numbers on
    the CPU, if they are there: without them the host waits for the device.
    """
    known = document if on_host is None else on_host
    if bool(((known == known[:, :1]) | (known < 0)).all()):
        return None
    same = document[:, None, :, None] == document[:, None, None, :]
    causal = torch.ones(document.shape[1], document.shape[1], device=document.device).tril().bool()
    # A query at padding must see something, or its softmax is NaN: it sees padding.
    return same & causal


ByHead = tuple[
    Float[Tensor, "batch head seq head_dim"],
    Float[Tensor, "batch kv_head seq head_dim"],
    Float[Tensor, "batch kv_head seq head_dim"],
]


class LentLinear(nn.Linear):
    """A linear layer whose weights others may use within its own call (`within_calls`)."""

    def forward(self, values: Any, use: Callable[[Any], Any] | None = None) -> Any:
        """Return the product, or `use(values)` with tensors or collections of them."""
        if use is None:
            return packed_linear(values, self.weight, self.bias)
        return use(values)


def within_calls(modules: Sequence[nn.Module], inputs: Any, use: Callable[[Any], Any]) -> Any:
    """Return `use(inputs)`, computed while each of `modules`, all LentLinear, is being called.

    For weights that are not used in a plain product: if parameters are sharded over ranks, the
    hooks of a module make its weights whole during its call only. Inputs and results are tensors or
    collections of them, which the hooks follow to the backward pass.
    """
    if not modules:
        return use(inputs)
    first, *others = modules
    return first(inputs, use=lambda inner: within_calls(others, inner, use))


@dataclass(frozen=True)
class LayerShape:
    """The shape of one decoder layer, with every size resolved."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool  # of q, k and v
    attention_output_bias: bool
    qk_norm: bool  # Qwen3 normalises queries and keys before rotation

    @classmethod
    def of(cls, spec: TargetSpec) -> "LayerShape":
        """Return the shape of the target's own layers, without scaling, biases and inner norms."""
        sizes = (spec.hidden_size, spec.intermediate_size)
        heads = (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim)
        return cls(*sizes, *heads, spec.rms_norm_eps, spec.rope_theta, None, False, False, False)

    def rotation(self, positions: Int[Tensor, "*batch seq"], dtype: torch.dtype) -> Rotation:
        """Return the rotation of each position, in `dtype`."""
        if self.rope_scaling is None:
            return rotation(positions, self.head_dim, self.rope_theta, dtype)
        frequencies, factor = self._scaled
        device = positions.device
        if device not in self._frequencies:  # once: the host waits, and a graph must not
            self._frequencies[device] = frequencies.to(device)
        angles = positions[..., None].float() * self._frequencies[device]
        angles = torch.cat([angles, angles], dim=-1)
        return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))

    @cached_property
    def _frequencies(self) -> dict[torch.device, Float[Tensor, " pair"]]:
        return {}

    @cached_property
    def _scaled(self) -> tuple[Float[Tensor, " pair"], float]:
        """Return Transformers' scaled frequencies, and the factor of cosines and sines."""
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        assert self.rope_scaling is not None
        parameters = {**self.rope_scaling, "rope_theta": self.rope_theta}
        config = LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            rope_parameters=parameters,
        )
        with torch.device("cpu"):  # a drafter may be described on the meta device
            return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v may read a wider input."""

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim, eps = shape.head_dim, shape.rms_norm_eps
        width, bias = self.num_heads * self.head_dim, shape.attention_bias
        self.q_proj = LentLinear(input_width, width, bias=bias)
        self.k_proj = LentLinear(input_width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = LentLinear(input_width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=shape.attention_output_bias)
        self.q_norm = RMSNorm(self.head_dim, eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps) if shape.qk_norm else None

    def project(self, values: Float[Tensor, "batch seq input"], turn: Rotation) -> ByHead:
        """Return rotated queries and keys, and values, by head."""
        return self._by_head((self.q_proj(values), self.k_proj(values), self.v_proj(values)), turn)

    def keys_and_values(
        self, values: Float[Tensor, "batch seq input"], turn: Rotation
    ) -> tuple[Float[Tensor, "batch kv_head seq head_dim"], ...]:
        """Return rotated keys, and values, by head, for an input that asks no queries."""
        keys = self._turned(self.k_proj(values), self.k_norm, turn)
        return keys, self._heads(self.v_proj(values))

    def _by_head(self, flat: Sequence[Tensor], turn: Rotation) -> ByHead:
        queries, keys, own = flat
        turned = self._turned(queries, self.q_norm, turn), self._turned(keys, self.k_norm, turn)
        return (*turned, self._heads(own))

    def _turned(self, flat: Tensor, norm: RMSNorm | None, turn: Rotation) -> Tensor:
        heads = self._heads(flat)
        return rotate(heads if norm is None else norm(heads), turn)

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def joined(
        self, values: Float[Tensor, "batch seq width"]
    ) -> tuple[Float[Tensor, "batch seq heads"], Float[Tensor, "heads rest"]]:
        """Return the projection of the first part of the input, and the matrix for the rest.

        Queries, keys and values are concatenated; the projection includes the bias.
        """
        parts = (self.q_proj, self.k_proj, self.v_proj)

        def project(values: Tensor) -> tuple[Tensor, Tensor]:
            bias = None if self.q_proj.bias is None else torch.cat([part.bias for part in parts])
            weight, width = torch.cat([part.weight for part in parts]), values.shape[-1]
            return functional.linear(values, weight[:, :width], bias), weight[:, width:]

        return within_calls(parts, values, project)

    def merge(
        self, mixed: Float[Tensor, "batch head seq head_dim"]
    ) -> Float[Tensor, "batch seq width"]:
        """Return the heads joined and projected back to the layer's width."""
        batch, _, seq, _ = mixed.shape
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))

    def by_head(self, projected: Float[Tensor, "batch seq heads"], turn: Rotation) -> ByHead:
        """Return rotated queries and keys, and values, from a projection made by `joined`."""
        widths = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        flat = projected.split([heads * self.head_dim for heads in widths], dim=-1)
        queries, keys, own = self._by_head(flat, turn)
        return queries, keys, own.clone()  # a view would keep the unrotated projection in memory


def attend_cached(
    heads: ByHead, cache: RaggedCache, number: int
) -> Float[Tensor, "batch head new head_dim"]:
    """Append keys and values to a layer of a cache, within a pass of its `run`, and attend."""
    queries, keys, own = heads
    all_keys, all_values = cache.update(keys, own, number)
    if cache.mask is not None:
        return grouped_attention(queries, all_keys, all_values, cache.mask)
    return functional.scaled_dot_product_attention(
        queries, all_keys, all_values, is_causal=queries.shape[2] > 1, enable_gqa=True
    )


class MLP(nn.Module):
    """Gated feed-forward layer (SwiGLU)."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=False)
        self.up_proj = nn.Linear(width, inner_width, bias=False)
        self.down_proj = nn.Linear(inner_width, width, bias=False)

    def forward(self, values: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
        """Return down(silu(gate) * up)."""
        gate, up = self.gate_proj(values), self.up_proj(values)
        if gate.requires_grad and torch.is_grad_enabled():
            return self.down_proj(_Gated.apply(gate, up))
        return self.down_proj(functional.silu(gate) * up)


class _Gated(torch.autograd.Function):
    """silu(gate) * up without keeping silu(gate), which is large and cheap to recompute."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, functional.silu(gate).mul_(grad)
