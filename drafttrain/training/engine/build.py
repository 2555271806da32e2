"""From a module to the engine that steps it."""

import torch
from torch import nn

from drafttrain.core.ops.layer_calls import AS_WRITTEN, LayerCalls
from drafttrain.runtime.ranks import join_ranks
from drafttrain.training.engine.config import DeepSpeedConfig
from drafttrain.training.engine.deepspeed import open_deepspeed
from drafttrain.training.engine.engine import Engine, Forward
from drafttrain.training.engine.plain import PlainEngine
from drafttrain.training.optim import parameter_groups


def build_engine(
    module: nn.Module,
    deepspeed: DeepSpeedConfig,
    *,
    device: str,
    dtype: torch.dtype,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    weights_dtype: torch.dtype = torch.float32,
    layer_calls: LayerCalls = AS_WRITTEN,
) -> Engine:
    """Move `module` to its device, give every rank rank 0's weights, and build its optimizer.

    AdamW's moments (Loshchilov & Hutter 2019) are float32, and so are the weights that it updates;
    with dtype bfloat16 the forward runs under autocast. With weights_dtype bfloat16 the module
    holds the weights rounded, and the optimizer their float32 masters. max_grad_norm: largest
    global norm of the summed gradient; 0 is off. Parameters that do not require a gradient are not
    updated. layer_calls: how layers are called in the forward.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        got = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"hardware.train_dtype must be float32 or bfloat16, got {got}; "
            "float16 would need its losses scaled: use bfloat16"
        )
    low = weights_dtype == torch.bfloat16
    if low and dtype != torch.bfloat16:
        raise ValueError(
            "hardware.train_dtype must be bfloat16 where hardware.weights_dtype is, got float32; "
            "set hardware.weights_dtype=float32, or both to bfloat16"
        )
    if low:
        deepspeed.check_low_weights()
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    assert trainable, "the module has nothing to train"
    for name, parameter in trainable.items():
        assert parameter.dtype == torch.float32, f"{name} is trained and must be float32"
    ranks = join_ranks(device, with_group=deepspeed.enabled)
    module.to(ranks.device)
    ranks.broadcast_in_place([p.data for p in module.parameters()] + list(module.buffers()))
    optimizer = torch.optim.AdamW(
        parameter_groups(module, weight_decay),
        lr=0.0,
        betas=betas,
        eps=eps,
        fused=deepspeed.offloads_optimizer or None,  # on the CPU: one pass over each tensor
    )
    forward = Forward(module, None if dtype == torch.float32 else dtype, layer_calls)
    if not deepspeed.enabled:
        return PlainEngine(forward, optimizer, ranks, max_grad_norm, low)
    return open_deepspeed(forward, optimizer, ranks, max_grad_norm, low, deepspeed)
