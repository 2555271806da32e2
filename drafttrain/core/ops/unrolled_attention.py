"""Attention over a text and over branches drafted from it, without a matrix of scores.

torch's flash kernels return each query's log-sum-exp with its output, so outputs over several sets
of keys can be merged exactly; given the merged output and log-sum-exp, their backward is that of
the merged attention (as in ring attention: Liu et al., 2023, arXiv:2310.01889).
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from drafttrain.core.ops.layer_calls import wide_dtype

_aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


class _Mixture(NamedTuple):
    """A kernel's output, and what its backward pass needs."""

    mixed: Tensor  # batch head seq head_dim
    logsumexp: Tensor  # batch head seq, in float32 at least
    kernel: str
    extra: tuple[Any, ...] = ()


def unrolled_attention(
    queries: Float[Tensor, "batch head seq head_dim"],
    past: list[tuple[Float[Tensor, "..."], Float[Tensor, "..."]]],
    mask: Bool[Tensor, "batch 1 seq key"] | None,
) -> Float[Tensor, "batch head seq head_dim"]:
    """Return attention, causal over the keys of depth 0 and at the own index over later depths.

    past: keys and values by depth, "batch kv_head seq head_dim"; heads share them in groups. mask:
    which keys of depth 0 a query sees (None: causal); with one, these may be more or fewer than the
    queries. Exact: one attention and a diagonal per depth, merged by their log-sum-exps.
    """
    flat = [tensor for pair in past for tensor in pair]
    return _Unrolled.apply(mask, queries, *flat)


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mask: Tensor | None, queries: Tensor, keys: Tensor, values: Tensor, *later: Tensor
    ) -> Tensor:
        bias = None if mask is None else _additive(mask, queries.dtype)
        first = _attend(queries, keys, values, bias)
        mixed, total = first.mixed, first.logsumexp
        if later:
            mixed, total = _merged(first, queries, keys, later)
        # The mask is saved, not its additive form, which is as large as a layer's scores.
        ctx.save_for_backward(mask, queries, keys, values, mixed, total, *later)
        ctx.kernel, ctx.extra = first.kernel, first.extra
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, queries, keys, values, mixed, total, *later = ctx.saved_tensors
        bias = None if mask is None else _additive(mask, queries.dtype)
        merged = _Mixture(mixed, total, ctx.kernel, ctx.extra)
        d_queries, d_keys, d_values = _attend_backward(grad, queries, keys, values, bias, merged)
        if not later:
            return None, d_queries, d_keys, d_values
        grouped, grads = _grouped(queries, keys), _grouped(grad, keys)
        d_grouped = d_queries.reshape(grouped.shape)
        wide, scale = wide_dtype(queries), queries.shape[-1] ** -0.5
        logs = total.reshape(grouped.shape[:-1])
        own = (grads * _grouped(mixed, keys)).sum(-1, dtype=wide)
        d_later = []
        for k, v in zip(later[0::2], later[1::2], strict=True):
            k, v = k[:, :, None], v[:, :, None]
            weight = ((grouped * k).sum(-1, dtype=wide) * scale - logs).exp_()
            d_score = (grads * v).sum(-1, dtype=wide).sub_(own).mul_(weight).mul_(scale)
            weight, d_score = weight.to(grad.dtype)[..., None], d_score.to(grad.dtype)[..., None]
            d_grouped.addcmul_(d_score, k)
            d_later += [_over_group(d_score, grouped), _over_group(weight, grads)]
        return None, d_grouped.reshape(queries.shape), d_keys, d_values, *d_later


def _merged(
    first: _Mixture, queries: Tensor, keys: Tensor, later: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return the output over the keys of depth 0 and the later diagonals, and its log-sum-exp."""
    scale = queries.shape[-1] ** -0.5
    grouped = _grouped(queries, keys)
    scores = [(grouped * k[:, :, None]).sum(-1, dtype=wide_dtype(queries)) for k in later[0::2]]
    lse = first.logsumexp.reshape(grouped.shape[:-1])
    stacked = torch.stack([lse, *(score * scale for score in scores)], dim=-1)
    total = stacked.logsumexp(-1)
    weights = (stacked - total[..., None]).exp().to(queries.dtype).unbind(-1)
    mixed = first.mixed.reshape(grouped.shape) * weights[0][..., None]
    for weight, v in zip(weights[1:], later[1::2], strict=True):
        mixed.addcmul_(weight[..., None], v[:, :, None])
    # In the layout of the flash kernels: heads next to each other, ready for the projection.
    return mixed.reshape(queries.shape), total.reshape(first.logsumexp.shape)


def _grouped(heads: Tensor, keys: Tensor) -> Tensor:
    """Return "batch kv_head group seq head_dim"."""
    batch, _, seq, width = heads.shape
    return heads.reshape(batch, keys.shape[1], -1, seq, width)


def _over_group(weight: Tensor, heads: Tensor) -> Tensor:
    if heads.shape[2] == 1:
        return (weight * heads).squeeze(2)
    return (weight * heads).sum(2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> _Mixture:
    if queries.device.type == "cpu":
        mixed, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, bias is None, attn_mask=bias
        )
        return _Mixture(mixed, logsumexp, "cpu")
    width = queries.shape[-1]
    if bias is None and queries.dtype in HALF and width % 8 == 0 and width <= 256:  # its limits
        answer = _aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, True)
        return _Mixture(answer[0], answer[1], "flash", tuple(answer[2:8]))
    seq, aligned, parts = queries.shape[2], _aligned(bias, keys), []
    for own in _members(queries, keys):
        answer = _aten._scaled_dot_product_efficient_attention(
            own, keys, values, aligned, True, 0.0, bias is None
        )
        # Its log-sum-exps are padded to a multiple of 32 queries.
        parts.append((answer[0], answer[1][..., :seq]))
        state = answer[2:4]  # of the dropout, which there is none of
    mixed, logsumexp = (_joined(list(heads)) for heads in zip(*parts, strict=True))
    return _Mixture(mixed, logsumexp, "efficient", tuple(state))


def _attend_backward(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, of: _Mixture
) -> tuple[Tensor, Tensor, Tensor]:
    if of.kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, queries, keys, values, of.mixed, of.logsumexp, 0.0, bias is None, attn_mask=bias
        )
    if of.kernel == "flash":
        starts_q, starts_k, longest_q, longest_k, state, unused = of.extra
        d_queries, d_keys, d_values = _aten._scaled_dot_product_flash_attention_backward(
            *(grad, queries, keys, values, of.mixed, of.logsumexp.contiguous()),
            *(starts_q, starts_k, longest_q, longest_k, 0.0, True, state, unused),
        )
        return d_queries, d_keys, d_values
    seed, offset = of.extra
    room = -of.logsumexp.shape[-1] % 32
    padded = torch.nn.functional.pad(of.logsumexp, (0, room), value=torch.inf)
    all_parts = (_members(part, keys) for part in (grad, queries, of.mixed, padded))
    aligned, found = _aligned(bias, keys), []
    for slope, own, mixed, total in zip(*all_parts, strict=True):
        # In half precision the kernel takes its own output's layout for granted: with another the
        # gradients of queries and keys are wrong, silently.
        laid_out = mixed.transpose(1, 2).contiguous().transpose(1, 2)
        answer = _aten._scaled_dot_product_efficient_attention_backward(
            *(slope, own, keys, values, aligned, laid_out, total.contiguous()),
            *(seed, offset, 0.0, [True, True, True, False], bias is None),
        )
        found.append(answer[:3])
    d_own, d_keys, d_values = zip(*found, strict=True)
    return _joined(list(d_own)), _summed(list(d_keys)), _summed(list(d_values))


def _summed(parts: list[Tensor]) -> Tensor:
    """Return the sum, rounded once."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _members(heads: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    """Return the first head of every group, the second, ...: each as many heads as keys have.

    For a kernel that takes no groups: keys and values are not copied for every query head.
    """
    return heads.unflatten(1, (keys.shape[1], -1)).unbind(2)


def _joined(members: list[Tensor]) -> Tensor:
    """Return what `_members` took apart."""
    return members[0] if len(members) == 1 else torch.stack(members, dim=2).flatten(1, 2)


def _aligned(bias: Tensor | None, queries: Tensor) -> Tensor | None:
    """Return the bias for every head, with rows aligned to 16 bytes, as the kernel requires."""
    if bias is None:
        return None
    width = bias.shape[-1]
    room = torch.nn.functional.pad(bias, (0, -width % 16))
    return room[..., :width].expand(-1, queries.shape[1], -1, -1)
