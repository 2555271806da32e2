"""The optimizer's step with Muon on several CPU ranks: each rank all matrices, or its share.

The matrices are those of an EAGLE drafter by its width: fc, attention with a quarter of the heads
for keys, and a feed-forward layer three times as wide. Both ways take turns in the same processes;
medians of the seconds from one barrier to the next, after one step of each that does not count.

    torchrun --nproc_per_node 2 benchmarks/muon.py --widths 64 256 576 1024
"""

import argparse
import statistics
import time

import torch
from torch import nn

from drafttrain.config.groups import content_of
from drafttrain.core.types import Losses, LossTerm
from drafttrain.training.engine.build import build_engine
from drafttrain.training.engine.config import DeepSpeedConfig, OptimizerConfig
from drafttrain.training.engine.plain import PlainEngine


class Matrices(nn.Module):
    """The matrices of an EAGLE drafter, and a loss that reaches all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = [(2, 1), (1, 1), (1, 0.25), (1, 0.25), (1, 1), (1, 3), (1, 3), (3, 1)]
        sizes = [(int(width * a), int(width * b)) for a, b in shapes]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)

    def forward(self) -> Losses:
        squares = [parameter.square().sum() for parameter in self.parameters()]
        return {"squares": LossTerm(1.0, torch.stack(squares).sum(), torch.tensor(1))}


def seconds(width: int, repeats: int) -> tuple[list[float], list[float], bool]:
    """Return the seconds of steps by both ways, and whether this rank is the first."""
    engine = build_engine(
        Matrices(width),
        DeepSpeedConfig(**content_of("deepspeed", "none")),
        device="cpu",
        dtype=torch.float32,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        max_grad_norm=0.5,
        optimizer=OptimizerConfig(**content_of("optimizer", "muon")),
    )
    assert isinstance(engine, PlainEngine)
    shares = engine._rank_of
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + repeats):
        for place, rank_of in enumerate(({}, shares)):
            engine._rank_of = rank_of
            engine.backward(engine.losses()["squares"].sum, last=True)
            engine.ranks.barrier()
            started = time.perf_counter()
            engine.step(lr=1e-3)
            engine.ranks.barrier()
            found[place].append(time.perf_counter() - started)
    return found[0][1:], found[1][1:], engine.is_main


def main() -> None:
    """Print a row for each width."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 576, 1024])
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for width in asked.widths:
        alone, shared, is_main = seconds(width, asked.repeats)
        if is_main:
            all_ms, share_ms = (1000 * statistics.median(each) for each in (alone, shared))
            ratio = share_ms / all_ms
            print(f"| {width} | {all_ms:.1f} | {share_ms:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
