"""compare: numbers that a computation by hand confirms, seeds as one method, clear refusals."""

import hashlib
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import save_file
from test_report import built

from drafttrain.__main__ import main
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import TrainConfig
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import Counters, DecodeStats, PromptResult
from drafttrain.report.build import certified
from drafttrain.report.comparison import (
    Comparison,
    compare_runs,
    comparison_document,
    comparison_figures,
    comparison_summary,
    comparison_table,
)
from drafttrain.report.config import CompareSettings
from drafttrain.report.definitions import COMPARED, DEFINITIONS
from drafttrain.report.document import markdown as text_of
from drafttrain.report.phrases import cell
from drafttrain.report.results import Change, Check, Estimate, LosslessCheck, TimingInfo
from drafttrain.report.tables import rich_table
from drafttrain.report.write import as_data, as_json
from drafttrain.report.write import html as page_of
from drafttrain.runtime.run_folder import write_config
from drafttrain.runtime.untrusted_input import typed as read_as
from drafttrain.training.checkpoint import WEIGHTS_FILE, TrainState, _write_state

pytestmark = pytest.mark.usefixtures("plain_pictures")

FINGERPRINT = "ab" * 32
PARAMETERS = 12 + 8  # of the checkpoints below


def results(
    drafter: str = "eagle3",
    *,
    seed: int = 0,
    gain: float = 1.5,
    rate: float = 0.6,
    prompts: int = 16,
    references: tuple[str, ...] = ("ngram",),
) -> list[PromptResult]:
    """Prompts of two tasks by the plain loop, a drafter and references: lengths as `gain` says.

    The prompts and the plain loop's answers are the same for every seed; what is drafted differs.
    """
    length_of = np.random.default_rng(99).integers(20, 60, prompts)
    pace = np.random.default_rng(98).uniform(0.01, 0.03, prompts)  # slow and fast prompts
    random = np.random.default_rng(seed)
    found = []
    for index in range(prompts):
        length, task = int(length_of[index]), ("math", "coding")[index % 2]
        tokens = tuple(range(length))
        for method in ("autoregressive", drafter, *references):
            counters, seconds = Counters(), length * float(pace[index])
            if method != "autoregressive":
                factor, chance = (gain, rate) if method == drafter else (1.1, 0.2)
                for _ in range(length // 2):
                    counters.add(2, int(random.binomial(2, chance)))
                seconds /= factor * float(random.normal(1.0, 0.1))
            passes = counters.num_drafts or length - 1
            stats = DecodeStats(
                counters, counters, passes, 0.0, 0.3 * seconds, 0.6 * seconds, 0.1 * seconds
            )
            found.append(PromptResult(f"p{index}", 0, task, method, 0, 5, tokens, stats))
    return found


def write_run(
    folder: Path,
    measured: list[PromptResult],
    *,
    drafter: str = "eagle3",
    seed: int | None = 0,
    evaluation: str = "default",
    overrides: tuple[str, ...] = (),
    tokens: int = 1_000,
    **changes: Any,
) -> str:
    """A run folder with an evaluation, as `train` and `evaluate` leave it; seed None: untrained."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoints" / "step-000010"
    if seed is not None:
        told = [f"run.dir={folder}", f"run.name={folder.name}", f"run.seed={seed}", *overrides]
        write_config(typed(compose("train", told), TrainConfig), folder / "config.yaml")
        checkpoint.mkdir(parents=True, exist_ok=True)
        weights = {
            "weight": torch.zeros(3, 4),
            "bias": torch.zeros(8, dtype=torch.bfloat16),
            "target_ids": torch.arange(5),
        }
        save_file(weights, checkpoint / WEIGHTS_FILE)
        _write_state(checkpoint, TrainState(10, tokens, {}, None, FINGERPRINT, {}))
    source = changes.get("prompts", {}).get("source", "prompts.jsonl")
    prompts = {
        "source": source,
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
        "num_prompts": 16,
        "template": "chat",
        "template_kwargs": {},
    }
    arguments: dict[str, Any] = {
        "drafter": drafter,
        "max_new_tokens": 64,
        "timing": TimingInfo("float32", 2, 1, "cpu", "float32"),
        "provenance": {
            "checkpoint": f"/where/it/was/{checkpoint.name}" if seed is not None else "None",
            "target_fingerprint": FINGERPRINT,
            "hardware": {"cpu": "one", "gpus": []},
        },
        "notes": [],
        "resamples": 100,
    }
    arguments |= changes
    report = built(measured, **{**arguments, "prompts": prompts | changes.get("prompts", {})})
    place = folder / "evaluations" / evaluation
    place.mkdir(parents=True, exist_ok=True)
    (place / "report.json").write_text(as_json(as_data(report)))
    return str(folder)


def compared(*runs: str, **changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "runs": list(runs),
        "evaluation": "default",
        "baseline": None,
        "all_pairs": False,
        "resamples": 200,
        "seed": 0,
        "name": "ours",
        "dir": "unused",
    }
    comparison = compare_runs(CompareSettings(**{**told, **changes}), {"command": "compare"})
    data: dict[str, Any] = as_data(comparison)
    return data


def read(comparison: dict[str, Any]) -> Comparison:
    return read_as(Comparison, as_json(comparison), "it")


def comparison_html(comparison: dict[str, Any]) -> str:
    compared = read(comparison)
    return page_of(comparison_document(compared), comparison_figures(compared))


def comparison_markdown(comparison: dict[str, Any]) -> str:
    return text_of(comparison_document(read(comparison)))


def row_of(comparison: dict[str, Any], method: str) -> dict[str, Any]:
    (row,) = [row for row in comparison["rows"] if row["method"] == method]
    return row


def pair_of(comparison: dict[str, Any], method: str) -> dict[str, Any]:
    (pair,) = [pair for pair in comparison["differences"] if pair["method"] == method]
    return pair


def table_of(measured: list[PromptResult], method: str) -> np.ndarray:
    """Per prompt: accepted, drafts, tokens, seconds, plain tokens, plain seconds; by hand."""
    by_prompt: dict[tuple[str, str], list[float]] = {}
    for result in measured:
        if result.method == method:
            counters = result.stats.trimmed
            by_prompt[result.task, result.prompt_id] = [
                counters.num_accepted_tokens - counters.num_cut_drafts,
                counters.num_drafts,
                len(result.tokens),
                result.stats.total_s,
            ]
    for result in measured:
        if result.method == "autoregressive":
            by_prompt[result.task, result.prompt_id] += [len(result.tokens), result.stats.total_s]
    return np.array(list(by_prompt.values()))


def length_by_hand(rows: np.ndarray) -> float:
    return 1 + rows[:, 0].sum() / rows[:, 1].sum()


def speedup_by_hand(rows: np.ndarray) -> float:
    return (rows[:, 2].sum() / rows[:, 3].sum()) / (rows[:, 4].sum() / rows[:, 5].sum())


def studentized_by_hand(statistic: Any, num_prompts: int, resamples: int = 2_000) -> list[float]:
    """The bootstrap-t from its definition, with standard errors by the jackknife.

    statistic: takes the indices of the prompts drawn.
    """
    random = np.random.default_rng(12345)

    def with_error(drawn: np.ndarray) -> tuple[float, float]:
        left_out = np.array([statistic(np.delete(drawn, place)) for place in range(num_prompts)])
        off = left_out - left_out.mean()
        return statistic(drawn), math.sqrt((num_prompts - 1) / num_prompts * (off**2).sum())

    value, error = with_error(np.arange(num_prompts))
    drawn = (with_error(random.integers(0, num_prompts, num_prompts)) for _ in range(resamples))
    off = [(one - value) / own for one, own in drawn]
    low, high = np.quantile(off, [0.025, 0.975])
    return [value - high * error, value - low * error]


@pytest.mark.parametrize("quantity", ["acceptance_length", "speedup"])
def test_differences_and_their_intervals_are_those_computed_by_hand(
    quantity: str, tmp_path: Path
) -> None:
    by_hand = {"acceptance_length": length_by_hand, "speedup": speedup_by_hand}[quantity]
    one, two = results(seed=1), results(seed=2, gain=1.8, rate=0.7)
    a = write_run(tmp_path / "a", one)
    b = write_run(tmp_path / "b", two, overrides=("drafter.unroll=2",))
    comparison = compared(a, b, resamples=10_000)
    mine, theirs = table_of(two, "eagle3"), table_of(one, "eagle3")
    found = pair_of(comparison, "b")["summary"][quantity]
    assert found["value"] == pytest.approx(by_hand(mine) - by_hand(theirs), abs=1e-12)

    def difference(drawn: np.ndarray) -> float:
        return by_hand(mine[drawn]) - by_hand(theirs[drawn])

    assert found["ci95"] == pytest.approx(studentized_by_hand(difference, len(mine)), abs=0.02)
    unpaired = [row["summary"][quantity]["ci95"] for row in comparison["rows"][:2]]
    assert found["ci95"][1] - found["ci95"][0] < sum(high - low for low, high in unpaired)
    task = pair_of(comparison, "b")["tasks"]["coding"][quantity]
    odd = np.arange(1, len(mine), 2)
    assert task["value"] == pytest.approx(difference(odd), abs=1e-12)
    assert task["ci95"][0] < task["value"] < task["ci95"][1]


def test_a_row_over_all_prompts_says_what_the_runs_own_report_says(tmp_path: Path) -> None:
    measured = results()
    a = write_run(tmp_path / "a", measured, resamples=200)
    report = json.loads((tmp_path / "a/evaluations/default/report.json").read_text())
    comparison = compared(a)
    for method, part in (("a", report), ("ngram", report["methods"]["ngram"])):
        row = row_of(comparison, method)
        for scope, theirs in ((row["summary"], part["summary"]), *zip(row["tasks"].values(),
                              part["tasks"].values(), strict=True)):  # fmt: skip
            assert scope["acceptance_length"]["value"] == pytest.approx(
                theirs["acceptance_length"]["micro"]
            )
            assert scope["acceptance_length"]["ci95"] == pytest.approx(
                theirs["acceptance_length"]["ci95"]
            )
            assert scope["speedup"]["value"] == pytest.approx(theirs["speedup"]["value"])
            assert scope["speedup"]["ci95"] == pytest.approx(theirs["speedup"]["ci95"])
            assert scope["acceptance_rate"] == pytest.approx(theirs["acceptance_rate"])
            assert scope["draft_ms"] == pytest.approx(theirs["time_ms"]["draft"])
            for kind, value in theirs["tokens_per_second"].items():
                assert scope["tokens_per_second"][kind] == pytest.approx(value)


def test_runs_that_differ_only_in_their_seed_are_one_method(tmp_path: Path) -> None:
    measured = [results(seed=10 + seed, gain=(1.4, 1.7, 1.5)[seed]) for seed in range(3)]
    seeds = [
        write_run(tmp_path / f"demo-seed{seed}", measured[seed], seed=seed, tokens=100 * (1 + seed))
        for seed in range(3)
    ]
    other = write_run(tmp_path / "wide", results(seed=4), overrides=("drafter.unroll=2",), seed=7)
    comparison = compared(*seeds, other, baseline="wide", resamples=10_000)
    row = row_of(comparison, "demo")
    assert row["training"] == "3 training seeds (0, 1, 2)"
    assert row["runs"] == seeds
    assert row["drafter_parameters"] == PARAMETERS
    assert row["training_tokens"] == 200
    assert row_of(comparison, "wide")["training"] == "single run (seed 7)"
    tables = [table_of(part, "eagle3") for part in measured]
    own = [speedup_by_hand(table) for table in tables]
    speedup = row["summary"]["speedup"]
    assert speedup["by_run"] == pytest.approx(own)
    assert speedup["value"] == pytest.approx(np.mean(own))
    assert speedup["range"] == pytest.approx([min(own), max(own)])

    def mean(drawn: np.ndarray) -> float:
        return float(np.mean([speedup_by_hand(table[drawn]) for table in tables]))

    assert speedup["ci95"] == pytest.approx(studentized_by_hand(mean, 16), abs=0.02)
    wide = table_of(results(seed=4), "eagle3")
    found = pair_of(comparison, "demo")["summary"]["speedup"]
    assert found["value"] == pytest.approx(np.mean(own) - speedup_by_hand(wide))

    def difference(drawn: np.ndarray) -> float:
        return mean(drawn) - speedup_by_hand(wide[drawn])

    assert found["ci95"] == pytest.approx(studentized_by_hand(difference, 16), abs=0.03)


def test_seeds_in_a_folder_each_are_called_what_their_places_share(tmp_path: Path) -> None:
    wide = ("drafter.unroll=2",)
    runs = [
        write_run(tmp_path / f"s{seed}" / name, results(seed=seed), seed=seed, overrides=told)
        for seed in range(2)
        for name, told in (("narrow", ()), ("wide", wide))
    ]
    rows = compared(*runs)["rows"]
    assert [row["method"] for row in rows] == ["s/narrow", "s/wide", "ngram"]


def test_what_is_no_seed_is_not_grouped(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", results())
    again = write_run(tmp_path / "again", results(seed=1))
    lr = write_run(tmp_path / "lr", results(seed=2), seed=1, overrides=("trainer.lr=1e-3",))
    deep = write_run(tmp_path / "deep", results(seed=3), seed=1, depth=3)
    untrained = write_run(tmp_path / "found", results(seed=4), seed=None)
    moved = write_run(tmp_path / "moved", results(seed=5), seed=1, overrides=("hardware=cpu",))
    further = (f"run.init_from={a}",)  # it is longer trained, whatever its seed
    tuned = write_run(tmp_path / "tuned", results(seed=6), seed=2, overrides=further)
    low = ("hardware.train_dtype=bfloat16", "hardware.weights_dtype=bfloat16")
    rounded = write_run(tmp_path / "rounded", results(seed=7), seed=3, overrides=low)
    comparison = compared(a, again, lr, deep, untrained, moved, tuned, rounded)
    assert [row["runs"] for row in comparison["rows"] if not row["reference"]] == [
        [a, moved],
        [again],
        [lr],
        [deep],
        [untrained],
        [tuned],
        [rounded],
    ]
    assert [row["method"] for row in comparison["rows"] if row["reference"]] == [
        "ngram, depth 2",
        "ngram, depth 3",
    ]
    assert row_of(comparison, "found")["training"] == "single run, no training on record"
    assert row_of(comparison, "found")["drafter_parameters"] is None
    (flag,) = [flag for flag in comparison["flags"] if flag["kind"] == "repeated"]
    assert flag["row"] == "again"


def test_seeds_that_chose_other_depths_of_one_sweep_are_one_method(tmp_path: Path) -> None:
    sweep = {"of_depths": [2, 4]}
    a = write_run(tmp_path / "demo-seed0", results(seed=1), **sweep)
    b = write_run(tmp_path / "demo-seed1", results(seed=2), seed=1, depth=4, **sweep)
    other = write_run(tmp_path / "other", results(seed=3), seed=2, depth=4, of_depths=[4, 8])
    comparison = compared(a, b, other)
    assert row_of(comparison, "demo")["depths"] == [2, 4]
    assert row_of(comparison, "other")["depths"] == [4]
    assert "| demo | eagle3 | 2, 4 | 2 training seeds (0, 1) |" in comparison_markdown(comparison)


def test_speedups_beside_slower_targets_follow_from_passes_and_drafting(tmp_path: Path) -> None:
    fast, slow = results(seed=1), results("medusa", seed=2, gain=0.5)
    a = write_run(tmp_path / "a", fast)
    b = write_run(tmp_path / "b", slow, drafter="medusa")
    comparison = compared(a, b)
    for label, drafter, measured in (("a", "eagle3", fast), ("b", "medusa", slow)):
        mine = [r.stats for r in measured if r.method == drafter]
        plain = [r.stats for r in fast if r.method == "autoregressive"]
        passes, plain_passes = (sum(s.num_target_passes for s in one) for one in (mine, plain))
        draft_ms = 1000 * sum(s.draft_s for s in mine)
        pass_ms = 1000 * sum(s.verify_s for s in plain) / plain_passes
        *timed, free = row_of(comparison, label)["slower_targets"]
        assert [at["pass_ms"] for at in timed] == pytest.approx(
            [pass_ms, 3 * pass_ms, 10 * pass_ms]
        )
        for at in timed:
            by_hand = plain_passes / (passes + draft_ms / at["pass_ms"])
            assert at["speedup"]["value"] == pytest.approx(by_hand)
            assert at["speedup"]["ci95"][0] < by_hand < at["speedup"]["ci95"][1]
        assert free["pass_ms"] is None
        assert free["speedup"]["value"] == pytest.approx(plain_passes / passes)
    assert "## At the cost of slower targets" in comparison_markdown(comparison)


def test_an_answer_of_one_token_takes_no_pass_and_leaves_slower_targets_known(
    tmp_path: Path,
) -> None:
    none = DecodeStats(Counters(), Counters(), 0, 0.01)
    measured = [
        replace(one, tokens=(0,), stats=none) if one.prompt_id == "p3" else one for one in results()
    ]
    for at in compared(write_run(tmp_path / "a", measured))["rows"][0]["slower_targets"]:
        assert at["speedup"]["value"] > 1
        assert at["speedup"]["ci95"] is not None


@pytest.mark.usefixtures("real_pictures")
def test_a_rows_share_of_a_batch_is_not_called_a_pass(tmp_path: Path) -> None:
    alone, batch = (
        compared(write_run(tmp_path / f"batch {size}", results(), batch_size=size))
        for size in (1, 8)
    )
    assert "share" not in alone["definitions"]["draft_ms"]
    assert "that row's equal share of its time" in batch["definitions"]["draft_ms"]
    assert [at["pass_ms"] for at in batch["rows"][0]["slower_targets"]] == [None]
    assert "slower targets" not in comparison_markdown(batch)
    assert "tokens per draft" in comparison_html(batch)


def test_acceptance_by_position_is_the_mean_over_seeds_on_the_same_prompts(tmp_path: Path) -> None:
    a = write_run(tmp_path / "demo-seed0", results(seed=1))
    b = write_run(tmp_path / "demo-seed1", results(seed=2), seed=1)
    reports = [
        json.loads((Path(run) / "evaluations/default/report.json").read_text()) for run in (a, b)
    ]
    comparison = compared(a, b)
    for task, row in (("summary", None), ("tasks", "math")):
        own = [report[task][row] if row else report[task] for report in reports]
        rates = np.mean([one["acceptance_per_position"] for one in own], axis=0)
        found = row_of(comparison, "demo")[task]
        found = (found[row] if row else found)["acceptance_per_position"]
        assert found == pytest.approx(rates.tolist())
    fewer = write_run(tmp_path / "fewer", results(seed=3, prompts=8), seed=2)
    both = compared(fewer, a)["rows"][0]  # prompts of `a` are left out, and positions with them
    assert both["summary"]["acceptance_per_position"] == []


def test_references_are_the_mean_over_the_runs_beside_which_they_were_measured(
    tmp_path: Path,
) -> None:
    one = results(seed=1, references=("ngram", "two_model"))
    two = results("medusa", seed=2)
    a, b = write_run(tmp_path / "a", one), write_run(tmp_path / "ngram", two, drafter="medusa")
    comparison = compared(a, b, baseline="two_model")
    # A run is called ngram, so the method of that name is called something else.
    assert [row["method"] for row in comparison["rows"]] == [
        "a",
        "ngram",
        "ngram, depth 2, rule greedy, reference",
        "two_model",
    ]
    row = row_of(comparison, "ngram, depth 2, rule greedy, reference")
    assert row["training"] == "reference, measured beside 2 runs"
    values = [speedup_by_hand(table_of(part, "ngram")) for part in (one, two)]
    assert row["summary"]["speedup"]["by_run"] == pytest.approx(values)
    assert row["lossless"]["statement"].startswith("lossless by greedy; outputs of this")
    assert row["drafter_parameters"] is None
    found = pair_of(comparison, "a")["summary"]["speedup"]["value"]
    tables = [table_of(one, method) for method in ("eagle3", "two_model")]
    assert found == pytest.approx(speedup_by_hand(tables[0]) - speedup_by_hand(tables[1]))


def test_only_shared_prompts_count_and_their_number_is_stated(tmp_path: Path) -> None:
    more, fewer = results(seed=1), results(seed=2, prompts=10)
    a = write_run(tmp_path / "a", more)
    b = write_run(tmp_path / "b", fewer, overrides=("drafter.unroll=2",))
    comparison = compared(a, b)
    said = "10 prompts, shared by all runs; a has 6 more, left out here"
    assert comparison["prompts"]["statement"] == said
    assert comparison["prompts"]["by_run"] == {"a": 16, "b": 10}
    assert comparison["prompts"]["tasks"] == {"math": 5, "coding": 5}
    assert said not in [flag["text"] for flag in comparison["flags"]]  # it is told once
    value = row_of(comparison, "a")["summary"]["acceptance_length"]["value"]
    assert value == pytest.approx(length_by_hand(table_of(more, "eagle3")[:10]))
    assert said in comparison_markdown(comparison)
    other = [replace(result, prompt_id=f"x{result.prompt_id}") for result in fewer]
    write_run(tmp_path / "b", other)
    with pytest.raises(ValueError, match=r"runs must share prompts .* got none in common: .*b 10;"):
        compared(a, b)


def test_prompts_are_matched_by_id_not_by_order(tmp_path: Path) -> None:
    measured = results(seed=1)
    a = write_run(tmp_path / "a", measured)
    turned = measured[::-1]
    b = write_run(tmp_path / "b", turned, overrides=("drafter.unroll=2",))
    pair = pair_of(compared(a, b), "b")
    for part in (pair["summary"], *pair["tasks"].values()):
        for found in part.values():
            assert found["value"] == pytest.approx(0.0, abs=1e-12)
            assert found["ci95"] == pytest.approx([0.0, 0.0], abs=1e-12)
    assert pair["answer"] == "undecided"
    assert pair["statement"].startswith("Whether b is faster than a is undecided: speedup")


def test_an_answer_needs_an_interval_on_one_side_of_nothing(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", results(seed=1))
    fast = write_run(tmp_path / "fast", results(seed=2, gain=3.0), seed=1, depth=3)
    slow = write_run(tmp_path / "slow", results(seed=3, gain=0.7), seed=1, depth=4)
    comparison = compared(a, fast, slow, all_pairs=True)
    assert pair_of(comparison, "fast")["answer"] == "faster"
    first = comparison["differences"][0]
    assert first["statement"].startswith("fast is faster than a: speedup difference +1.")
    between = [(pair["method"], pair["other"]) for pair in comparison["differences"]]
    assert ("slow", "fast") in between
    assert len(between) == math.comb(len(comparison["rows"]), 2)
    assert {pair["other"] for pair in compared(a, fast, slow)["differences"]} == {"a"}
    by_method = {pair["method"]: pair for pair in comparison["differences"] if pair["other"] == "a"}
    assert by_method["slow"]["answer"] == "slower"
    alike = write_run(tmp_path / "alike", results(seed=5), seed=1, depth=5)
    pair = pair_of(compared(a, alike), "alike")
    low, high = pair["summary"]["speedup"]["ci95"]
    assert low < 0 < high
    assert pair["answer"] == "undecided"


def test_without_an_interval_nothing_is_decided(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", results(seed=1, prompts=1))
    b = write_run(tmp_path / "b", results(seed=2, prompts=1, gain=3.0), seed=1, depth=3)
    pair = pair_of(compared(a, b), "b")
    assert pair["summary"]["speedup"]["value"] > 1
    assert pair["summary"]["speedup"]["ci95"] is None
    assert pair["answer"] is None
    assert "is undecided" in pair["statement"]
    assert "(no interval)" in pair["statement"]


def test_what_cannot_be_computed_is_none(tmp_path: Path) -> None:
    nothing = [
        replace(result, stats=replace(result.stats, trimmed=Counters(), untrimmed=Counters()))
        for result in results(seed=1)
    ]
    rare = [
        result if result.prompt_id == "p0" or result.method != "eagle3" else empty
        for result, empty in zip(results(seed=1), nothing, strict=True)
    ]
    a = write_run(tmp_path / "a", nothing)
    b = write_run(tmp_path / "b", rare, seed=1, depth=3)
    c = write_run(tmp_path / "c", results(seed=1), depth=4)
    comparison = compared(c, b, a)
    json.dumps(comparison, allow_nan=False)
    assert row_of(comparison, "a")["summary"]["acceptance_length"]["value"] is None
    assert pair_of(comparison, "a")["summary"]["acceptance_length"]["value"] is None
    assert row_of(comparison, "b")["tasks"]["coding"]["acceptance_length"]["value"] is None
    found = pair_of(comparison, "b")["summary"]["acceptance_length"]
    assert found["value"] is not None
    assert found["ci95"][0] <= found["value"] <= found["ci95"][1]
    comparison_html(comparison)
    comparison_markdown(comparison)


def test_lossy_runs_are_flagged_wherever_they_appear(tmp_path: Path) -> None:
    lossy = LosslessCheck("typical", False, "float32", 1, 2, [], "")
    a = write_run(tmp_path / "a", results(seed=1))
    b = write_run(tmp_path / "b", results(seed=2, gain=3.0), seed=1, lossless=lossy)
    comparison = compared(a, b)
    said = "NOT lossless: typical; 1 of 2 greedy outputs identical"
    assert row_of(comparison, "b")["lossless"]["statement"].startswith(said)
    assert not row_of(comparison, "b")["lossless"]["lossless"]
    assert pair_of(comparison, "b")["statement"].endswith("NOT lossless: b.")
    assert ("lossy", "b") in [(flag["kind"], flag["row"]) for flag in comparison["flags"]]
    assert ("lossy", "ngram, rule typical") in [
        (flag["kind"], flag["row"]) for flag in comparison["flags"]
    ]
    # The runs' own flags come along, each once.
    assert ("timing", "a, b: all") in [(flag["kind"], flag["row"]) for flag in comparison["flags"]]
    assert said in comparison_html(comparison)
    assert said in comparison_markdown(comparison)
    assert " NO" in shown(comparison)


def test_a_flag_of_many_runs_is_told_once(tmp_path: Path) -> None:
    runs = []
    for seed in range(4):
        folder = write_run(tmp_path / f"run{seed}", results(seed=seed), seed=seed)
        file = Path(folder) / "evaluations/default/report.json"
        report = json.loads(file.read_text())
        text = f"the machine was busy: other processes used {1 + seed} cores"
        report["flags"] = [{"kind": "busy", "row": "all", "text": text}]
        file.write_text(json.dumps(report))
        runs.append(folder)
    (flag,) = [flag for flag in compared(*runs)["flags"] if flag["kind"] == "busy"]
    assert flag["row"] == "4 of 4 runs: all"
    told = "the machine was busy: other processes used 1 cores (so in run0; the reports of the"
    assert flag["text"].startswith(told)


def test_unlike_machines_and_unlike_texts_are_flagged(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", results(seed=1))
    shorter = [
        replace(result, tokens=result.tokens[:-1]) if result.prompt_id == "p3" else result
        for result in results(seed=2)
    ]
    timing = TimingInfo("bfloat16", 2, 1, "cpu", "float32")
    b = write_run(tmp_path / "b", shorter, seed=1, timing=timing)
    texts = {flag["kind"]: flag["text"] for flag in compared(a, b)["flags"] if "b:" not in
             flag["row"] and "a:" not in flag["row"]}  # fmt: skip
    assert texts == {
        "timing": "speeds were not measured with the same dtype (a: float32; b: bfloat16)",
        "text": "plain greedy decoding gave answers of another length than in a on 1 of 16 "
        "prompts: not the same text was drafted",
    }


def test_runs_whose_plain_loops_differ_are_not_ranked(tmp_path: Path) -> None:
    """The same prompts, plain: a third faster in one run; the other's speedup looked higher."""
    a = write_run(tmp_path / "a", results(seed=1))
    quick = [
        replace(
            result,
            stats=replace(
                result.stats,
                prefill_s=result.stats.prefill_s / 1.33,
                verify_s=result.stats.verify_s / 1.33,
            ),
        )
        if result.method == "autoregressive"
        else result
        for result in results(seed=2)
    ]
    b = write_run(tmp_path / "b", quick, overrides=("drafter.unroll=2",))
    comparison = compared(a, b)
    (flag,) = (flag for flag in comparison["flags"] if flag["kind"] == "plain_loops")
    assert flag["text"].startswith("the plain loops ran at clearly different speeds (tokens per")
    pair = pair_of(comparison, "b")
    assert pair["summary"]["speedup"]["ci95"][1] < 0, "by its interval it would be slower"
    assert pair["answer"] == "undecided"
    assert pair["statement"].endswith("; their plain loops ran at clearly different speeds.")
    alike = compared(a, write_run(tmp_path / "c", results(seed=2), overrides=("drafter.unroll=2",)))
    assert "plain_loops" not in {flag["kind"] for flag in alike["flags"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling": Sampling(1.0, 0, 1.0)}, "same eval.temperature .*a has 0.0 and .*b has 1.0;"),
        ({"sampling": Sampling(0.0, 0, 0.9)}, "same eval.top_p .*a has 1.0 and .*b has 0.9;"),
        ({"batch_size": 4}, "same eval.batch_size .*a has 1 and .*b has 4;"),
        ({"max_new_tokens": 8}, "same eval.max_new_tokens .*a has 64 and .*b has 8;"),
        ({"prompts": {"source": "x.jsonl"}}, "same eval.prompts .*a has prompts.jsonl and .*x.js"),
        (
            {"provenance": {"target_fingerprint": "cd" * 32}},
            "same target fingerprint .*a has abababababababab and .*b has cdcdcdcdcdcdcdcd;",
        ),
    ],
)
def test_runs_that_were_not_evaluated_alike_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    a = write_run(tmp_path / "a", results())
    b = write_run(tmp_path / "b", results(), **changes)
    with pytest.raises(ValueError, match=f"runs must have the {said}"):
        compared(a, b)


def test_prompts_of_other_texts_are_not_paired_by_their_ids(tmp_path: Path) -> None:
    def run(name: str, prompts: int = 16, **told: Any) -> str:
        about = {"source": "prompts.jsonl", "num_prompts": prompts} | told
        overrides = (f"drafter.unroll={2 + len(list(tmp_path.iterdir()))}",)
        measured = results(prompts=prompts)
        return write_run(tmp_path / name, measured, prompts=about, overrides=overrides)

    a, edited = run("a", sha256="12" * 32), run("edited", sha256="34" * 32)
    with pytest.raises(ValueError, match=r"same texts under eval.prompts .*a has 1212.*edited has"):
        compared(a, edited)
    again = run("again", sha256="12" * 32, source="/home/me/prompts.jsonl")
    assert compared(a, again)["prompts"]["num_prompts"] == 16, "the same texts by another path"
    same, fewer = run("same", sha256="12" * 32), run("fewer", 10, sha256="56")
    assert compared(a, same, fewer)["prompts"]["num_prompts"] == 10
    with pytest.raises(
        ValueError, match=r"same texts under eval\.prompts .*fewer has 56 .*other has"
    ):
        compared(a, fewer, run("other", 10, sha256="78"))


def test_prompts_that_became_other_text_are_not_compared(tmp_path: Path) -> None:
    about = {"source": "prompts.jsonl", "template": "chat"}
    thinking = [{}, {"enable_thinking": True}]
    a, b = (
        write_run(tmp_path / name, results(), prompts=about | {"template_kwargs": kwargs})
        for name, kwargs in zip("ab", thinking, strict=True)
    )
    with pytest.raises(ValueError, match=r"same data\.template_kwargs .*a has \{\} and .*_th"):
        compared(a, b)


@pytest.mark.parametrize("key", ["sha256", "template_kwargs"])
def test_a_report_that_another_version_wrote_is_refused_in_one_line(
    key: str, tmp_path: Path
) -> None:
    a, b = (write_run(tmp_path / name, results()) for name in "ab")
    change(tmp_path / "b", lambda report: report["prompts"].pop(key))
    with pytest.raises(ValueError, match=rf"report\.json must be a report .*{key}.*make it again"):
        compared(a, b)


def test_the_certificate_stands_beside_its_row(tmp_path: Path) -> None:
    checks = [Check("greedy_equality", passed, 0.0, "0", "text", []) for passed in (True, False)]
    told = {"rule": "greedy", "lossless": True, "dtype": "float32", "num_prompts": 2}
    a = write_run(tmp_path / "a", results(), certificate=certified(checks[:1], **told))
    b = write_run(tmp_path / "b", results(), depth=3, certificate=certified(checks, **told))
    comparison = compared(a, b)
    said = row_of(comparison, "a")["lossless"]["statement"]
    assert said.endswith("float32; certificate: certified: 1 of 1 checks passed on 2 prompts")
    assert said in comparison_markdown(comparison)
    failed = row_of(comparison, "b")["lossless"]["statement"]
    assert "NOT certified: greedy_equality failed" in failed
    assert {"kind": "certificate", "row": "b", "text": failed} in comparison["flags"]
    assert "certificate" not in [flag["kind"] for flag in comparison["flags"] if flag["row"] == "a"]


def change(folder: Path, edit: Any) -> None:
    file = folder / "evaluations/default/report.json"
    report = json.loads(file.read_text())
    edit(report)
    file.write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda report: report.pop("measurements"),
            "it: measurements: Field required; make it aga",
        ),
        (
            lambda report: report["measurements"][3].pop("seconds"),
            "it: measurements.3.seconds: Field re",
        ),
        (lambda report: report["measurements"].pop(), "ngram and autoregressive have different"),
        (lambda report: report["measurements"].append(report["measurements"][0]), "p0 of math is "),
        (lambda report: report.update(schema_version=99), "it has schema_version 99, not"),
        (lambda report: report.update(drafter="other"), "it has no measurements of other;"),
        (lambda report: report.update(sampling=None), "it: sampling: Input should be an object"),
        (lambda report: report["provenance"].clear(), "it: provenance.target_fingerprint: F"),
        (lambda report: report["provenance"].update(checkpoint=["x"]), "it: provenance.checkpoint"),
        (lambda report: report.update(depth="3"), "it: depth: Input should be a valid integer"),
        (lambda report: report["flags"].append(3), "it: flags."),
        (
            lambda report: report["measurements"][0]["seconds"].update(total=float("nan")),
            "it: measurements.0.seconds.total: Input should be",
        ),
        (lambda report: report.pop("lossless"), "it: lossless: Field required"),
        (lambda report: report["lossless"].pop("statement"), "lossless.statement: Field required"),
    ],
)
def test_a_broken_report_is_named(edit: Any, said: str, tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", results())
    change(tmp_path / "a", edit)
    with pytest.raises(
        ValueError, match=r"report\.json must be a report that `evaluate` "
    ) as error:
        compared(a)
    assert said in str(error.value)
    assert str(error.value).endswith(f"python -m drafttrain evaluate run.dir={a}")


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", results())
    write_run(tmp_path / "t1", results(), evaluation="sampled")
    with pytest.raises(ValueError, match=r"runs must name folders .*/no, which does not ex"):
        compared(a, str(tmp_path / "no"))
    said = r"t1 has no evaluation called default \(it has sampled: compare\.evaluation=\.\.\.\); "
    with pytest.raises(ValueError, match=rf"{said}make it: python -m drafttrain evaluate run\.d"):
        compared(a, str(tmp_path / "t1"))
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(ValueError, match=r"called hot; make it: .*dir=.*bare eval\.name=hot$"):
        compared(str(bare), evaluation="hot")


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runs must name at least one evaluated run, got \[\]: "):
        compared()
    with pytest.raises(
        ValueError, match=r"runs must name each run once, got \['x/a', 'y', 'x/\./a'\]$"
    ):
        compared("x/a", "y", "x/./a")
    with pytest.raises(ValueError, match=r"compare\.resamples must be at least 100, got 3"):
        compared("x", resamples=3)
    a = write_run(tmp_path / "a", results())
    with pytest.raises(
        ValueError, match=r"compare\.baseline must be one .* got 'b'; they are: a, n"
    ):
        compared(a, baseline="b")
    for known in ("a", a, "ngram"):
        compared(a, baseline=known)


def shown(comparison: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(rich_table(comparison_summary(read(comparison))))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("real_pictures")
def test_pages_hold_every_row_definition_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a<b>&", results(seed=1), target="<script>alert(1)</script>")
    b = write_run(
        tmp_path / "b", results(seed=2), seed=1, depth=3, target="<script>alert(1)</script>"
    )
    comparison = compared(a, b, all_pairs=True)
    page = comparison_html(comparison)
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/", "")
    assert page.count("<svg") == 4
    for svg in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.partition("</svg>")[0] + "</svg>")
    HTMLParser().feed(page)
    document = comparison_markdown(comparison)
    assert "<script" not in document
    assert "a&lt;b&gt;&amp;" in document
    for text in (page, document):
        for key in comparison["definitions"]:
            assert key in text
    assert set(COMPARED) <= set(comparison["definitions"]) <= set(COMPARED) | set(DEFINITIONS)
    for row in comparison["rows"]:
        assert row["training"] in page
    rows = [line for line in document.splitlines() if line.startswith("|")]
    assert all(line.count(" |") == rows[0].count(" |") for line in rows[:4])
    text = shown(comparison)
    first = row_of(comparison, "b")["summary"]
    told = Estimate(first["speedup"]["value"], first["speedup"]["ci95"])
    assert cell(told) in text, "80 columns hold the numbers whole"
    assert cell(Change(**pair_of(comparison, "b")["summary"]["acceptance_length"])) in text
    assert text.count("single run") == 2
    assert "…" not in text
    assert not re.search(r"\w-\s*\n", text), "no word is broken"


def test_the_trackers_table_has_a_row_per_method_and_task(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", results(seed=1))
    b = write_run(tmp_path / "b", results(seed=2), seed=1, depth=3)
    comparison = compared(a, b)
    columns, rows = comparison_table(read(comparison))
    assert len(rows) == 4 * 3
    assert all(len(row) == len(columns) for row in rows)
    cells = dict(zip(columns, rows[3], strict=True))
    assert (cells["method"], cells["task"], cells["num_prompts"]) == ("b", "all", 16)
    pair = pair_of(comparison, "b")["summary"]["speedup"]
    assert cells["speedup_difference"] == pair["value"]
    assert [cells["speedup_difference_low"], cells["speedup_difference_high"]] == pair["ci95"]
    assert rows[0][columns.index("speedup_difference")] is None
    assert cells["drafter_parameters"] == PARAMETERS


def test_the_command_writes_its_files_and_says_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("outputs/a"), results(seed=1))
    write_run(Path("outputs/b"), results(seed=2), seed=1)
    command = ["compare", "runs=[outputs/a,outputs/b]", "compare.resamples=200"]
    assert main(command) == 0
    place = tmp_path / "outputs" / "compare"
    assert {path.name for path in place.iterdir()} == {
        "compare.json",
        "compare.md",
        "compare.html",
        "metrics.jsonl",
    }
    first = json.loads((place / "compare.json").read_text())
    assert first["rows"][0]["training"] == "2 training seeds (0, 1)"
    assert "outputs/compare/compare.html" in capsys.readouterr().out
    assert main([*command, "compare.baseline=ngram", "compare.name=again"]) == 0
    second = json.loads((place / "compare.json").read_text())
    assert second["rows"] == first["rows"]
    assert second["baseline"] == "ngram"
    lines = (place / "metrics.jsonl").read_text().splitlines()
    tables = [json.loads(line)["table"] for line in lines]
    assert tables == ["comparison/comparison", "comparison/again"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            "",
            2,
            "compare.runs must name at least one evaluated run, got []: python -m drafttrain",
        ),
        ("runs=[]", 2, "compare.runs must name at least one evaluated run"),
        ("runs=a", 2, "compare.runs must be a list of texts such as [a,b], got a"),
        ("runs=[a,a]", 2, "compare.runs must name each run once, got ['a', 'a']"),
        ("runs=[nowhere]", 2, "runs must name folders of runs, got nowhere, which does not exist"),
        ("rnus=[a]", 2, "no section is called rnus"),
        ("compare.run=[a]", 2, "compare has no key run; did you mean runs?"),
        ("runs=[here] compare.baseline=x", 2, "here has no evaluation called default; make it: "),
        ("here", 2, "arguments must be section.key=value or section=choice, got 'here'; did you m"),
    ],
)
def test_a_mistake_at_the_command_line_is_one_line_and_writes_nothing(
    arguments: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert main(["compare", *arguments.split()]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {said}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    told = ["runs=[nowhere]", f"compare.dir={tmp_path}/file/x"]
    assert main(["compare", *told]) != 0
    assert capsys.readouterr().err.startswith("error: compare.dir must lie where files can be")


def test_help_shows_how_runs_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    assert "compare 'runs=[outputs/a,outputs/b]'" in text
    assert "compare.baseline=null" in text
    assert main(["compare", "--help", "compare"]) == 0
    text = capsys.readouterr().out
    assert "keys of compare:" in text
    assert "compare.resamples=2000" in text
    assert main(["compare", "--config", "runs=[a/b,/c/d]"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["compare"]["runs"] == ["a/b", "/c/d"]
    assert set(config["compare"]) == set(CompareSettings.__dataclass_fields__)


def test_weights_and_biases_gets_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), results(seed=1))
    assert main(["compare", "runs=[a]", "compare.resamples=100", "tracker=wandb"]) == 0
    tables = list(Path("outputs/compare/wandb").rglob("*.table.json"))
    assert len(tables) == 1
    assert list(Path("outputs/compare/wandb").rglob("media/images/**/*.png"))
    table = json.loads(tables[0].read_text())
    assert table["columns"][:3] == ["method", "training", "task"]
