"""Build the engine that trains a module."""

import torch
from torch import nn

from drafttrain.core.ops.layer_calls import AS_WRITTEN, LayerCalls
from drafttrain.runtime.hardware import dtype_name
from drafttrain.runtime.ranks import join_ranks
from drafttrain.runtime.settings import require
from drafttrain.training.engine.config import ADAMW, DeepSpeedConfig, OptimizerConfig
from drafttrain.training.engine.deepspeed import DeepSpeedEngine, Zero3Engine, ZeroEngine
from drafttrain.training.engine.engine import Engine, Forward
from drafttrain.training.engine.optimizer import build_optimizer
from drafttrain.training.engine.plain import PlainEngine


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
    optimizer: OptimizerConfig = ADAMW,
    ema_decay: float = 0.0,
) -> Engine:
    """Return the engine of `module`, with the module on its device and rank 0's weights everywhere.

    The optimizer's moments and the weights that it updates are float32; with dtype bfloat16 the
    forward runs under autocast, and with weights_dtype bfloat16 the module holds rounded weights.
    max_grad_norm: of the summed gradient, over all parameters; 0 is off. ema_decay: of the
    average; 0 keeps none.
    """
    key, given, known = "hardware.train_dtype", dtype_name(dtype), ("float32", "bfloat16")
    why = "; float16 would need its losses scaled: use bfloat16"
    require(given in known, key, "be float32 or bfloat16", given, why)
    low = weights_dtype == torch.bfloat16
    need = "be bfloat16 if hardware.weights_dtype is"
    other = "; set hardware.weights_dtype=float32, or both to bfloat16"
    require(not low or dtype == torch.bfloat16, key, need, given, other)
    if low:
        deepspeed.check_low_weights()
    trainable = [p for p in module.parameters() if p.requires_grad]
    assert trainable, "the module has nothing to train"
    assert all(p.dtype == torch.float32 for p in trainable), "what is trained must be float32"
    ranks = join_ranks(device, with_group=deepspeed.enabled)
    module.to(ranks.device)
    ranks.broadcast_in_place([p.data for p in module.parameters()] + list(module.buffers()))
    optimizer.check(deepspeed)
    offloads = deepspeed.offloads_optimizer
    updates = build_optimizer(optimizer, module, betas, eps, weight_decay, offloads)
    forward = Forward(module, None if dtype == torch.float32 else dtype, layer_calls)
    arguments = (forward, updates, ranks, max_grad_norm, low, ema_decay)
    if not deepspeed.enabled:
        return PlainEngine(*arguments)
    stage = deepspeed.stage
    kind = Zero3Engine if stage == 3 else ZeroEngine if stage else DeepSpeedEngine
    return kind(*arguments, config=deepspeed)
