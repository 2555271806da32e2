"""report.json and compare.json, byte for byte, from fixed measurements: keys, order and numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT
from test_report import built, many_prompts

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import PromptResult
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.build import certified, sweep_point
from drafttrain.report.comparison import compare_runs, comparison_document, comparison_figures
from drafttrain.report.config import CompareSettings, VerdictSettings
from drafttrain.report.pages import write_report
from drafttrain.report.results import Check, Divergence, ExtraMemory, LosslessCheck, TimingInfo
from drafttrain.report.tables import certificate_table, sweep_table
from drafttrain.report.write import write_pages

GOLDEN = ROOT / "tests" / "golden"
DIVERGENCE = Divergence(prompt="prompt 1", position=3, gap=0.25, noise=1e-5, tie=False)


def fixed_results(pace: float = 1.0, seed: int = 0) -> list[PromptResult]:
    """Eight prompts by four methods; one prompt's plain pass is disturbed, one has two turns."""
    results = many_prompts(seed, prompts=8, blocks=3)
    results += [
        replace(result, method="before", stats=replace(result.stats, draft_s=0.0))
        for result in results
        if result.method == "ngram"
    ]
    results += [replace(result, turn=1) for result in results if result.prompt_id == "prompt 2"]
    for place, result in enumerate(results):
        times = 12.0 if (result.method, result.prompt_id) == ("autoregressive", "prompt 5") else 1.0
        times = pace if result.method == "eagle3" else times
        stats = replace(result.stats, verify_s=times * result.stats.verify_s)
        tokens = result.tokens
        if (result.method, result.prompt_id, result.block) == ("eagle3", "prompt 0", 1):
            tokens = (*tokens[:-1], tokens[-1] + 1)
        results[place] = replace(result, stats=stats, tokens=tokens)
    return results


def write_fixed(folder: Path, pace: float = 1.0, seed: int = 0) -> None:
    """Write the report of fixed measurements, with every section that a report can have."""
    results = fixed_results(pace, seed)
    point = {"drafter": "eagle3", "temperature": 0.0, "resampling": Resampling(200, 0)}
    sweep = [
        sweep_point(fixed_results(0.9 * pace, seed), depth=1, batch_size=1, **point),
        sweep_point(results, depth=2, batch_size=1, **point),
        sweep_point(fixed_results(2.0 * pace, seed), depth=2, batch_size=4, **point),
    ]
    checks = [
        Check("greedy output, float32", False, 0.5, "1", "1 of 2 identical", [DIVERGENCE]),
        Check("one-step distribution", True, 1e-7, "1e-6", "at most 1e-07 apart", []),
        Check("distribution of the text", None, 0.1, "none", "0.1 apart", []),
    ]
    section = certified(checks, rule="greedy", lossless=True, dtype="float32", num_prompts=2)
    report = built(
        results,
        draft_sampling=Sampling(0.5, 3, 0.9),
        max_new_tokens=200,
        lossless=LosslessCheck("greedy", True, "float32", 1, 2, [DIVERGENCE], ""),
        certificate=section,
        sweep=sweep,
        tables=[certificate_table(section), sweep_table(sweep, {0.0: "greedy"})],
        timing=TimingInfo("bfloat16", 2, 3, "cpu", "float32"),
        provenance={
            "commit": "abc",
            "checkpoint": "/x/step-000010",
            "target_fingerprint": "ab" * 32,
            "hardware": {"cpu": "one", "gpus": []},
            "share": float("nan"),
            "path": Path("/x"),
        },
        prompts={
            "source": "tiny.jsonl",
            "sha256": "cd" * 32,
            "template": "chat",
            "template_kwargs": {},
            "num_prompts": 8,
            "skipped": {},
            "overlap": None,
        },
        resamples=200,
        verdict=VerdictSettings(1.05, 3.6, "EUR"),
        memory=ExtraMemory(3 * 2**20, 1024),
    )
    write_report(report, folder)


def fixed_files(place: Path) -> dict[str, str]:
    """Return report.json and compare.json of two fixed runs, nothing of their training on record.

    `place` is the working directory: the runs are named relative to it.
    """
    write_fixed(place / "a/evaluations/default")
    write_fixed(place / "b/evaluations/default", pace=0.7, seed=1)
    settings = CompareSettings(
        runs=["a", "b"],
        evaluation="default",
        baseline=None,
        all_pairs=True,
        resamples=200,
        seed=0,
        name="ours",
        dir="compared",
    )
    found = compare_runs(settings, {"command": "compare"})
    document, figures = comparison_document(found), comparison_figures(found)
    write_pages(place / "compared", "compare", document, figures, found)
    files = (place / "a/evaluations/default/report.json", place / "compared/compare.json")
    return {file.name: file.read_text() for file in files}


def test_report_json_and_compare_json_are_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed report is a visible diff: python scripts/update_golden.py."""
    monkeypatch.chdir(tmp_path)
    found = fixed_files(tmp_path)
    for name, text in found.items():
        assert text == (GOLDEN / name).read_text(), name
    rows = json.loads(found["compare.json"])["rows"]
    assert {row["method"] for row in rows} == {"a", "b", "ngram", "before"}
