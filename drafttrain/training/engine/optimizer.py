"""The optimizers: AdamW, or Muon for the matrices within layers and AdamW for the rest."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from drafttrain.training.engine.config import OptimizerConfig

# Names of modules that have a row for each token of a vocabulary.
VOCABULARY_MODULES = ("embed_tokens", "embed_out", "lm_head", "lm_heads", "head")


class MuonAndAdamW:
    """Muon and AdamW, each for its own parameters, used as one optimizer of torch's."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._both = muon, adamw
        self.param_groups = [*muon.param_groups, *adamw.param_groups]
        self.state = adamw.state = muon.state

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._both:
            optimizer.zero_grad()


def build_optimizer(
    config: OptimizerConfig,
    module: nn.Module,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    on_host: bool,
) -> Any:
    """Return the optimizer of a module: matrices decay, vectors do not.

    AdamW: Loshchilov & Hutter 2019 (arXiv:1711.05101). Muon: Jordan et al. 2024, with the step
    sizes of arXiv:2502.16982, at which AdamW's learning rate and decay fit it as well; embeddings
    and heads, which have a row for each token of a vocabulary, stay with AdamW. on_host: DeepSpeed
    keeps the moments in the host's memory.
    """
    by_muon = muon_matrices(module) if config.muon else []
    taken = set(by_muon)
    optimizers: list[Any] = []  # torch makes none of no parameters
    if by_muon:
        muon = torch.optim.Muon(
            parameter_groups(by_muon, weight_decay),
            lr=0.0,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
    if others := [p for p in module.parameters() if p.requires_grad and p not in taken]:
        adamw = torch.optim.AdamW(
            parameter_groups(others, weight_decay),
            lr=0.0,
            betas=betas,
            eps=eps,
            fused=on_host or None,  # on the CPU: one pass over each tensor
        )
        optimizers.append(adamw)
    return MuonAndAdamW(*optimizers) if len(optimizers) > 1 else optimizers[0]


def muon_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that Muon updates: matrices that are trained, but embeddings and heads.

    Those are nn.Embedding, modules with a name in VOCABULARY_MODULES, and the parameters that a
    module lists as `vocabulary_matrices`. Sizes decide nothing: a layer may be as wide as a
    vocabulary.
    """
    tables: set[nn.Parameter] = set()
    for name, part in module.named_modules():
        last = re.sub(r"(\.\d+)+$", "", name).rpartition(".")[2]  # of lm_heads.0: lm_heads
        if isinstance(part, nn.Embedding) or last in VOCABULARY_MODULES:
            tables.update(part.parameters(recurse=False))
        tables.update(map(part.get_parameter, getattr(part, "vocabulary_matrices", ())))
    return [p for p in module.parameters() if p.requires_grad and p.ndim == 2 and p not in tables]


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the operations by which Muon orthogonalises a matrix, in five steps of three products.

    With the shorter side m and the longer n, a step takes 4 m^2 n + 2 m^3.
    """
    short, long = sorted((rows, columns))
    return 5.0 * (4 * short**2 * long + 2 * short**3)


def balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """Return a rank for each cost: the largest first, each to the rank with the least so far."""
    totals, chosen = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = chosen[index] = totals.index(min(totals))
        totals[rank] += costs[index]
    return chosen


def parameter_groups(
    parameters: Sequence[nn.Parameter],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Return torch's parameter groups: matrices decay, vectors (biases, norm scales) do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
