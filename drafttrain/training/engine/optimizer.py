"""The optimizers: AdamW, or Muon for the matrices within layers and AdamW for the rest."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from drafttrain.training.engine.config import OptimizerConfig


class MuonAndAdamW:
    """Muon and AdamW, each for its own parameters, used as one optimizer of torch's."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._both = muon, adamw
        self.param_groups = [*muon.param_groups, *adamw.param_groups]
        self.state = adamw.state = muon.state

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        for optimizer in self._both:
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for optimizer in self._both:
            optimizer.zero_grad()


def build_optimizer(
    config: OptimizerConfig,
    trainable: Sequence[nn.Parameter],
    vocab_sizes: Collection[int],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    on_host: bool,
    parts: Mapping[nn.Parameter, str] = MappingProxyType({}),
) -> Any:
    """Return the optimizer of these parameters: matrices decay, vectors do not.

    AdamW: Loshchilov & Hutter 2019 (arXiv:1711.05101). Muon: Jordan et al. 2024, with the step
    sizes of arXiv:2502.16982, at which AdamW's learning rate and decay fit it as well; embeddings
    and heads, which have a row for each token of a vocabulary, stay with AdamW. on_host: DeepSpeed
    keeps the moments in the host's memory. parts: of parameters with a learning rate of their own;
    each group of the optimizer is of one part, `part` (of all others: "").
    """
    by_muon: list[nn.Parameter] = []
    if config.muon:
        sizes = set(vocab_sizes)
        by_muon = [p for p in trainable if p.ndim == 2 and not sizes & set(p.shape)]
    taken = set(by_muon)
    adamw = torch.optim.AdamW(
        by_part(parameter_groups([p for p in trainable if p not in taken], weight_decay), parts),
        lr=0.0,
        betas=betas,
        eps=eps,
        fused=on_host or None,  # on the CPU: one pass over each tensor
    )
    if not by_muon:
        return adamw
    muon = torch.optim.Muon(
        by_part([{"params": by_muon}], parts),
        lr=0.0,
        weight_decay=weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonAndAdamW(muon, adamw)


def parameter_groups(
    parameters: Sequence[nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Return torch's parameter groups: matrices decay, vectors (biases, norm scales) do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def by_part(
    groups: Sequence[dict[str, Any]], parts: Mapping[nn.Parameter, str]
) -> list[dict[str, Any]]:
    """Return torch's parameter groups, divided so that each is of one part."""
    divided = []
    for group in groups:
        names = [parts.get(parameter, "") for parameter in group["params"]]
        for name in dict.fromkeys(names):
            own = [p for p, part in zip(group["params"], names, strict=True) if part == name]
            divided.append(group | {"params": own, "part": name})
    return divided
