"""What `tune` chose, as `evaluate` takes it: from a file that anyone may have written."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from drafttrain.commands.setup.evaluation import as_tuned
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import EvaluateConfig
from drafttrain.decode.adaptive import Adaptive
from drafttrain.decode.policy import chain, tree_of_ranks
from drafttrain.evaluation.config import EvalConfig

pytestmark = pytest.mark.usefixtures("plain_pictures")

TREE = [[0], [1], [0, 0]]
OPTIMAL = "eval.policy=optimal_tree eval.tree_nodes=16 eval.tree_width=4"


def cells(*names: str) -> list[dict[str, float]]:
    sizes = {"depth": (1, 2, 4), "batch": (1, 8), "context": (64, 256)}
    every = product(*(sizes[name] for name in names))
    return [dict(zip(names, sizes_of, strict=True)) | {"ms": 2.0} for sizes_of in every]


def tuned(**changes: Any) -> dict[str, Any]:
    """A file of a chain: depth 2 at batch 1, but 4 in math; depth 1 at batch 8."""
    cell, deep = cells("batch", "context"), cells("depth", "batch", "context")
    return {
        "policy": "eval.policy=chain",
        "weights": "step-000010",
        "temperature": 0.0,
        "batches": {
            "1": {"all": {"depth": 2}, "tasks": {"math": {"depth": 4}, "chat": {"depth": 2}}},
            "8": {"all": {"depth": 1}, "tasks": {}},
        },
        "trees": {},
        "acceptance": [0.6, 0.5],
        "costs_ms": {"plain": cell, "read": cell, "verify": deep, "draft": deep},
    } | changes


def settings(*overrides: str) -> EvalConfig:
    return typed(compose("evaluate", ["drafter=ngram", *overrides]), EvaluateConfig).eval


def taken(folder: Path, content: Any, *overrides: str) -> EvalConfig:
    (folder / "tuned.json").write_text(json.dumps(content))
    return as_tuned(settings(*overrides), str(folder))


def test_a_depth_is_taken_task_by_task(tmp_path: Path) -> None:
    found = taken(tmp_path, tuned(), "eval.depth=auto")
    assert (found.depth, found.deepest) == (2, 4)
    assert found.of_tasks == {"math": chain(4)}
    assert found.policy_at(2) == chain(2)
    assert taken(tmp_path, tuned(), "eval.depth=auto", "eval.batch_size=6").depth == 1
    assert taken(tmp_path, tuned(), "eval.depth=3") == settings("eval.depth=3")


@pytest.mark.parametrize("sweep", ["eval.depths=[1,2]", "eval.engine=vllm"])
def test_a_sweep_of_depths_and_vllm_take_one_depth(sweep: str, tmp_path: Path) -> None:
    found = taken(tmp_path, tuned(), "eval.depth=auto", sweep)
    assert found.depth == 2
    assert not found.of_tasks


def test_an_adaptive_chain_takes_costs_and_acceptance(tmp_path: Path) -> None:
    found = taken(tmp_path, tuned(), "eval.policy=adaptive", "eval.depth=auto")
    policy = found.policy_at(found.depth)
    assert isinstance(policy, Adaptive)
    assert policy.depth == 4
    assert policy.costs.cycle_s(2, 1, 100) == pytest.approx(0.004)
    assert taken(tmp_path, tuned(), "eval.policy=adaptive", "eval.rule=block").rule == "block"


def test_what_a_policy_does_not_use_is_not_part_of_its_settings(tmp_path: Path) -> None:
    """Otherwise a `tune` that chose the same again would refuse an evaluation's report."""
    one = taken(tmp_path, tuned(), "eval.depth=auto")
    assert taken(tmp_path, tuned(acceptance=[0.7]), "eval.depth=auto") == one


def trees(paths: Any, depth: int = 2) -> dict[str, Any]:
    return tuned(policy=OPTIMAL, trees={"1": {str(depth): paths}}) | {
        "batches": {"1": {"all": {"depth": depth}}}
    }


def test_a_tree_is_taken(tmp_path: Path) -> None:
    found = taken(tmp_path, trees(TREE), "eval.policy=optimal_tree", "eval.depth=auto")
    assert found.policy_at(found.depth) == tree_of_ranks(TREE)


AUTO, ADAPTIVE = ["eval.depth=auto"], ["eval.policy=adaptive", "eval.depth=auto"]
BUILT = ["eval.policy=optimal_tree", "eval.depth=auto"]
COSTS = tuned()["costs_ms"]
HOLE = [cell for cell in cells("depth", "batch", "context") if cell["depth"] != 2]
FOREIGN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "depth 0": (tuned(batches={"1": {"all": {"depth": 0}}}), AUTO),
    "a huge depth": (tuned(batches={"1": {"all": {"depth": 2**53}}}), AUTO),
    "a task's depth": (
        tuned(batches={"1": {"all": {"depth": 1}, "tasks": {"math": {"depth": 0}}}}),
        AUTO,
    ),
    "no batch": (tuned(batches={}), AUTO),
    "no acceptance": (tuned(acceptance=[]), ADAPTIVE),
    "a gap": (tuned(costs_ms=COSTS | {"draft": HOLE}), ADAPTIVE),
    "no costs": (tuned(costs_ms={}), ADAPTIVE),
    "a context of 0": (
        tuned(costs_ms={k: [c | {"context": 0} for c in v] for k, v in COSTS.items()}),
        ADAPTIVE,
    ),
    "no tree": (trees([]), BUILT),
    "a node without a name": (trees([[]]), BUILT),
    "a sibling missing": (trees([[1], [1, 0]]), BUILT),
    "a node twice": (trees([[0], [0], [0, 0]]), BUILT),
    "a tree less deep than it says": (trees([[0]]), BUILT),
    "a node with many children": (trees([*([rank] for rank in range(5)), [0, 0]]), BUILT),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_tune_did_not_write_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, asked = FOREIGN[name]
    with pytest.raises(ValueError, match=r"tuned\.json must be what `tune` wrote, but .* again"):
        taken(tmp_path, content, *asked)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["eval.depth=auto", "eval.temperature=1"], "chosen at eval.temperature 1.0, but it was"),
        ([*BUILT], "chosen under eval.policy=optimal_tree"),
        (["eval.policy=adaptive", "eval.depth=5"], "eval.depth must be auto or at most 4"),
        ([*ADAPTIVE, "eval.batch_size=9"], "eval.batch_size must be at most 8, the largest batch"),
        ([*ADAPTIVE, "eval.batch_sizes=[1,32]"], "eval.batch_sizes must be at most 8, the largest"),
    ],
)
def test_what_it_was_not_chosen_for_is_refused(
    overrides: list[str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        taken(tmp_path, tuned(), *overrides)


def test_a_batch_smaller_than_any_that_was_timed_is_refused(tmp_path: Path) -> None:
    costs = {kind: [c for c in cells if c["batch"] > 1] for kind, cells in COSTS.items()}
    told = "eval.batch_size must be at least 8, the smallest batch that `tune` timed"
    with pytest.raises(ValueError, match=told):
        taken(tmp_path, tuned(costs_ms=costs), *ADAPTIVE)
    assert taken(tmp_path, tuned(costs_ms=costs), *ADAPTIVE, "eval.batch_size=8")
