"""What `tune` chose, on disk: the depth by task at each batch size, and the trees behind it."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.evaluation.tune import Tuning
from drafttrain.report.tune import TunedChoice
from drafttrain.report.write import as_data
from drafttrain.runtime.disk import write_whole
from drafttrain.runtime.untrusted_input import (
    Amount,
    Count,
    Depth,
    UntrustedError,
    read_typed,
    shown,
)

TUNED = "tuned.json"
CHAIN = "eval.policy=chain"
SIZE = re.compile(r"[1-9]\d{0,8}", re.ASCII)

Paths = list[list[int]]  # of a tree's nodes: the ranks on the way to each


@dataclass(frozen=True)
class Chosen:
    """The choice at one batch size: the depth in all and by task, and a tree by depth if it has.

    speculate: whether speculation pays in all; if not, `depth` is the least slow one. A task's
    depth is 0 where speculation does not pay on it. acceptance: how often each position of the
    deepest chain was accepted, where the one before it was. costs_ms: those of passes, by kind; see
    `Costs.of_records`.
    """

    depth: int
    tasks: dict[str, int]
    trees: dict[int, Paths] = field(default_factory=dict)
    acceptance: list[float] = field(default_factory=list)
    costs_ms: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    speculate: bool = True


def write_tuned(
    folder: Path,
    choices: Mapping[str, TunedChoice],
    found: Tuning,
    conditions: Mapping[str, Any],
    *,
    policy: str,
    weights: str,
    temperature: float,
) -> Path:
    """Write the choice and the data behind it where `evaluate` and `export` find it.

    policy: its settings, as on the command line. weights: names those of the drafter.
    """
    file = folder / TUNED
    record = {
        "policy": policy,
        "weights": weights,
        "temperature": temperature,
        "batches": as_data(choices),
        "trees": {
            size: {depth: tree.paths for depth, tree in trees.items()}
            for size, trees in found.trees.items()
        },
        "acceptance": found.acceptance,
        "predictions": [asdict(p) | {"error": p.error} for p in found.predictions],
        "costs_ms": found.costs.records(),
        "conditions": dict(conditions),
    }
    write_whole(file, json.dumps(record, indent=2) + "\n")
    return file


@dataclass(frozen=True)
class _Depth:
    depth: Depth
    speculate: bool = True


@dataclass(frozen=True)
class _Choice:
    all: _Depth  # over all tasks
    tasks: dict[str, _Depth] = field(default_factory=dict)


@dataclass(frozen=True)
class _Tuned:
    batches: dict[str, _Choice]  # by batch size
    policy: str
    weights: str
    temperature: float
    trees: dict[str, dict[str, list[list[Count]]]] = field(default_factory=dict)
    acceptance: list[Amount] = field(default_factory=list)
    costs_ms: dict[str, list[dict[str, Amount]]] = field(default_factory=dict)


def read_tuned(
    run: Path,
    batch_size: int,
    *,
    policy: str = CHAIN,
    weights: str | None = None,
    temperature: float | None = None,
) -> Chosen | None:
    """Return what `tune` chose for a run at a batch size (or the nearest one tried).

    ValueError if it was chosen under another policy, for other weights or at another temperature
    (None: not known, or of no account).
    """
    file = run / TUNED
    if not file.is_file():
        return None
    try:
        found = read_typed(_Tuned, file)
        sizes = {int(size): each for size, each in found.batches.items() if SIZE.fullmatch(size)}
        if not sizes:
            raise UntrustedError("it must hold a depth by batch size")
        nearest = min(sizes, key=lambda size: abs(size - batch_size))
        choice, trees = sizes[nearest], found.trees.get(str(nearest), {})
        chosen = Chosen(
            choice.all.depth,
            {task: each.depth if each.speculate else 0 for task, each in choice.tasks.items()},
            {int(depth): paths for depth, paths in trees.items() if SIZE.fullmatch(depth)},
            [min(share, 1.0) for share in found.acceptance],
            found.costs_ms,
            choice.all.speculate,
        )
    except UntrustedError as error:
        raise ValueError(
            f"{file} must be what `tune` wrote, but cannot be read ({error}); run tune again, or "
            "remove it"
        ) from error
    for what, then, here in (
        ("under", found.policy, policy),
        ("for the weights of", found.weights, weights),
        ("at eval.temperature", found.temperature, temperature),
    ):
        if here is not None and then != here:
            raise ValueError(
                f"{file} must hold a depth chosen {what} {here}, but it was chosen {what} "
                f"{shown(then)}; run tune again"
            )
    return chosen
