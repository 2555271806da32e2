"""Predictions of speedup from costs and acceptance, against arithmetic done by hand."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from test_drafters import random_drafter
from test_evaluate import settings

from drafttrain.core.types import Counters, DecodeStats, PromptResult
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.decode.costs import Costs
from drafttrain.decode.policy import DynamicTree, Policy, chain, tree_of_widths
from drafttrain.evaluation.config import TuneSettings
from drafttrain.evaluation.cost import measure_costs
from drafttrain.evaluation.optimal_tree import OptimalTree
from drafttrain.evaluation.tune import Tuning, choose, in_order, predict, whole_lengths
from drafttrain.evaluation.tune_choice import CHAIN, Chosen, read_tuned, write_tuned
from drafttrain.report.tune import ChosenDepth, DepthPrediction, headline
from drafttrain.target.model import load_target

COSTS = Costs(
    [1, 2],
    [10, 20],
    plain={(1, 10): 1.0, (1, 20): 2.0, (2, 10): 1.5, (2, 20): 2.5},
    verify={(d, b, c): 0.5 + 0.1 * d + 0.5 * b for d, b, c in product((1, 2), (1, 2), (10, 20))},
    draft={(d, b, c): 0.2 * d for d, b, c in product((1, 2), (1, 2), (10, 20))},
)


def result(
    method: str, prompt: str, tokens: int, counters: Counters | None = None, depth: int = 0
) -> PromptResult:
    passes = tokens - 1 if counters is None else counters.num_drafts
    stats = DecodeStats(counters or Counters(), counters or Counters(), passes)
    return PromptResult(prompt, 0, "math", method, 0, 8, tuple(range(tokens)), stats, depth)


def test_costs_are_interpolated_between_what_was_measured() -> None:
    assert COSTS.plain_s(1, 10.0) == 1.0
    assert COSTS.plain_s(1, 15.0) == pytest.approx(1.5)
    assert COSTS.plain_s(2, 15.0) == pytest.approx(2.0)
    assert COSTS.plain_s(1, 500.0) == 2.0  # beyond the last: the last
    assert COSTS.cycle_s(2, 1, 12.0) == pytest.approx(1.2 + 0.4)


def test_a_shallower_chain_accepts_what_the_first_tokens_of_a_deeper_one_do() -> None:
    counters = Counters(10, 30, 12, [7, 4, 1])
    assert whole_lengths(counters, [1, 2, 3]) == pytest.approx({1: 1.7, 2: 2.1, 3: 2.2})


def test_predicted_batches_are_those_that_are_decoded() -> None:
    prompts = [Prompt(name, "math", "math", ("?",)) for name in "abcd"]
    blocks = [result("autoregressive", name, 9) for name in "acbda"]  # a in two blocks
    assert [r.prompt_id for r in in_order(blocks, prompts)] == ["a", "b", "c", "d"]


def test_the_prediction_is_that_of_the_formula() -> None:
    counters = Counters(4, 8, 4, [3, 1])
    results = [
        result("autoregressive", "a", 9),  # 8 steps, context 8 + 4.5
        result("eagle3", "a", 9, counters, depth=2),
    ]
    predictions = predict(results, COSTS, [1, 2], 1)
    assert [(p.task, p.depth) for p in predictions] == [
        ("math", 1),
        ("math", 2),
        ("all", 1),
        ("all", 2),
    ]
    plain = 1.0 + 0.25  # at context 12.5
    for p, length, cycle in ((predictions[0], 1.75, 1.3), (predictions[1], 2.0, 1.6)):
        assert p.acceptance_length == length
        assert p.predicted == pytest.approx(length * plain / cycle)


def test_a_predicted_acceptance_length_counts_no_bonus_of_a_cut_draft() -> None:
    """Nine tokens after the prefill's, by 4 drafts of which the end of the answer cut the last."""
    counters = Counters(4, 8, 6, [4, 2], num_cut_drafts=1)
    results = [
        result("autoregressive", "a", 10),
        result("eagle3", "a", 10, counters, depth=2),
    ]
    one, two = predict(results, COSTS, [1, 2], 1)[:2]
    assert two.acceptance_length == counters.acceptance_length == 9 / 4
    # Drafts of one token yield 2 each, of two 2.5: nine tokens take 5 of them instead of 4.
    assert one.acceptance_length == pytest.approx(9 / 5)
    for p, cycle in ((one, 1.3), (two, 1.6)):
        assert p.predicted == pytest.approx(p.acceptance_length * 1.3 / cycle)


def test_rows_of_a_batch_leave_as_they_end() -> None:
    short, long = Counters(2, 2, 2, [2]), Counters(4, 4, 4, [4])  # all accepted: length 2
    results = [
        result("autoregressive", "a", 5),
        result("autoregressive", "b", 9),
        result("eagle3", "a", 5, short, depth=1),
        result("eagle3", "b", 9, long, depth=1),
    ]
    (one, _) = predict(results, COSTS, [1], 2)
    # Two rows for 4 steps, one for 4 more, at the mean context 8 + 3.5.
    plain = 4 * COSTS.plain_s(2, 11.5) + 4 * COSTS.plain_s(1, 11.5)
    ours = 2 * COSTS.cycle_s(1, 2, 11.5) + 2 * COSTS.cycle_s(1, 1, 11.5)
    assert one.predicted == pytest.approx(plain / ours)


def test_a_task_whose_answers_end_with_the_prefill_has_no_speedup() -> None:
    counters = Counters(4, 8, 4, [3, 1])
    decoded = [result("autoregressive", "a", 9), result("eagle3", "a", 9, counters, depth=2)]
    at_once = [
        result(name, "b", 1, Counters(), depth)
        for name, depth in (("autoregressive", 0), ("eagle3", 2))
    ]
    at_once = [replace(each, task="yes or no") for each in at_once]
    found = predict([*decoded, *at_once], COSTS, [1, 2], 1)
    assert found == predict(decoded, COSTS, [1, 2], 1)
    assert {p.task for p in found} == {"math", "all"}
    with pytest.raises(ValueError, match=r"^eval\.prompts must have an answer of more than one"):
        predict(at_once, COSTS, [1, 2], 1)


def test_the_choice_goes_by_measurement_where_there_is_one(tmp_path: Path) -> None:
    predictions = [
        DepthPrediction("math", 1, 1, 1.5, 1.9, 1.2),
        DepthPrediction("math", 1, 2, 1.8, 1.4, 1.3),
        DepthPrediction("all", 1, 1, 1.5, 1.9, 1.2),
        DepthPrediction("all", 1, 2, 1.8, 1.4, 1.3),
        DepthPrediction("all", 8, 1, 1.5, 0.9, None),
        DepthPrediction("all", 8, 2, 1.8, 0.8, None),
    ]
    chosen = choose(predictions)
    assert chosen["1"].all == ChosenDepth(depth=2, speedup=1.3, speculate=True)
    assert chosen["8"].all == ChosenDepth(depth=1, speedup=0.9, speculate=False)
    assert predictions[0].error == pytest.approx(1.9 / 1.2 - 1)
    assert read_tuned(tmp_path, 1) is None
    told: dict[str, Any] = {"policy": CHAIN, "weights": "step-000010", "temperature": 0.0}
    trees = {1: {2: OptimalTree([[0], [1], [0, 0]], {})}}
    found = Tuning(predictions, COSTS, trees, [0.7, 0.5])
    write_tuned(tmp_path, chosen, found, {"threads": 1}, **told)
    rest: tuple[Any, ...] = ([0.7, 0.5], COSTS.records())
    expected = Chosen(2, {"math": 2}, {2: [[0], [1], [0, 0]]}, *rest)
    assert read_tuned(tmp_path, 1) == expected
    nearest = Chosen(1, {}, {}, *rest, speculate=False)
    assert read_tuned(tmp_path, 7) == nearest  # the nearest batch that was weighed
    assert read_tuned(tmp_path, 1, weights="step-000010") == expected
    with pytest.raises(ValueError, match=r"chosen for the weights of step-000020, but it was"):
        read_tuned(tmp_path, 1, weights="step-000020")
    assert read_tuned(tmp_path, 1, temperature=0.0) == expected
    with pytest.raises(ValueError, match=r"chosen at eval\.temperature 1\.0, but it was"):
        read_tuned(tmp_path, 1, temperature=1.0)
    with pytest.raises(ValueError, match=r"chosen under eval\.policy=dynamic_tree, but it was"):
        read_tuned(tmp_path, 1, policy="eval.policy=dynamic_tree")
    written = json.loads((tmp_path / "tuned.json").read_text())
    assert written["costs_ms"]["plain"][0] == {"batch": 1, "context": 10, "ms": 1000.0}
    (tmp_path / "tuned.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tuned\.json must be what `tune` wrote"):
        read_tuned(tmp_path, 1)


@pytest.mark.parametrize(
    ("nodes", "told"),
    [("1+1", "depth 2, 1.30"), ("4+11", r"depth 2 \(4\+11 nodes\), 1.30"), ("", "depth 2, 1.30")],
)
def test_the_answer_names_a_tree(nodes: str, told: str) -> None:
    chosen = choose([DepthPrediction("all", 1, 2, 1.8, 1.4, 1.3, nodes)])
    assert re.search(f"Batch 1: speculate at {told} times as fast", headline(chosen))


def tune_settings(**changes: Any) -> TuneSettings:
    values: dict[str, Any] = {"name": "x", "depths": [1], "batch_sizes": [1], "contexts": [8]}
    values |= {"overwrite": False, "rounds": 1, "measure": True, "trees": "fastest"}
    return TuneSettings(**(values | changes))


TREES: dict[int, Policy] = {1: tree_of_widths([3]), 3: DynamicTree(3, 2, 6)}


@pytest.mark.parametrize(
    ("name", "policies"),
    [*((name, {1: chain(1), 3: chain(3)}) for name in ("eagle3", "medusa", "ngram")),
     *((name, TREES) for name in ("eagle3", "medusa"))],
)  # fmt: skip
def test_costs_are_measured_for_every_cell(
    name: str, policies: dict[int, Policy], tiny_target_dir: Path
) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    tuned = tune_settings(contexts=[8, 16], rounds=2)
    drafter = random_drafter(name, target)
    costs = measure_costs(target, drafter, lambda _: policies, [1, 3], settings(), tuned)
    assert set(costs.plain) == {(1, 8), (1, 16), (3, 8), (3, 16)}
    assert set(costs.verify) == {(d, *cell) for d in (1, 3) for cell in costs.plain}
    assert set(costs.draft) == set(costs.verify)
    assert all(value > 0 for value in [*costs.plain.values(), *costs.verify.values()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": []}, r"tune\.depths must not be empty, got \[\]"),
        ({"batch_sizes": [0]}, r"tune\.batch_sizes must be at least 1, got \[0\]"),
        ({"rounds": 0}, r"tune\.rounds must be at least 1, got 0"),
    ],
)
def test_absurd_settings_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune_settings(**changes)
