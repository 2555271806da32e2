"""What the scripts of benchmarks/ make of reports and measurements."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from test_report import many_prompts, report_of, two_prompts


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def test_counters_are_compared_and_times_are_not() -> None:
    counted = {"num_accepted_tokens_per_position": [1], "vocab_size": 9, "train/num_steps": 3}
    counted |= {"batch_size": 2, "num_shared_ngrams": 1, "tokens_per_pass_difference_to_ngram": 1}
    timed = ["draft_s", "seconds", "time_ms", "perf/tokens_per_s", "tokens_per_second", "speedup"]
    timed += ["kv_bytes", "others_cores", "blocks", "perf/data_wait_share", "perf/break_even"]
    timed.append("predicted_speedup")
    found = importlib.import_module("same").steady(counted | dict.fromkeys(timed, 1))
    assert found == counted


def test_repeats_of_a_prompt_are_no_prompts_of_their_own() -> None:
    ratio = importlib.import_module("decode").ratio
    by_prompt = np.array([1.0, 1.1, 1.3, 1.6, 1.9])
    once, often = (ratio(np.tile(by_prompt, (n, 1)), np.ones((n, 5))) for n in (1, 40))
    assert once["ratio"] == often["ratio"] == pytest.approx(1.3)
    assert (often["low"], often["high"]) == (once["low"], once["high"])
    assert once["low"] < 1.1 < 1.6 < once["high"]


def test_a_timed_step_is_the_drafters_own_and_agrees_with_its_plain_form() -> None:
    train = importlib.import_module("train")
    small = train.setting(256, 64, 1, 24, 2, "cpu")
    assert train.agree(train.ours(small, "float32"), train.plain(small, "float32")) < 1e-3


@pytest.mark.parametrize(
    ("report", "lacks"),
    [
        (report_of(many_prompts(prompts=8, blocks=1)), "one point of a sweep at depth 2"),
        (report_of(two_prompts()), "an interval of the speedup"),
    ],
)
def test_a_report_without_what_speeds_needs_is_named(
    report: dict[str, Any], lacks: str, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(SystemExit, match=f"{tmp_path.name} must be an evaluation .*{lacks}"):
        importlib.import_module("families").speeds([tmp_path])


def test_a_run_without_prompt_lookup_beside_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of([one for one in two_prompts() if one.method != "ngram"])
    place = tmp_path / "run/evaluations/default"
    place.mkdir(parents=True)
    (place / "report.json").write_text(json.dumps(report))
    monkeypatch.setattr("sys.argv", ["table.py", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="run has no ngram beside its drafter"):
        importlib.import_module("table").main()


@pytest.mark.parametrize("batch", [False, True])
def test_a_table_of_batches_has_no_column_of_slower_targets(
    batch: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    families = importlib.import_module("families")
    found = json.loads((ROOT / "tests/golden/compare.json").read_text())
    monkeypatch.setattr(families, "BASELINE", found["rows"][0]["drafter"])
    for row in found["rows"]:
        row["slower_targets"] = [] if batch else row["slower_targets"]
    (tmp_path / "compare.json").write_text(json.dumps(found))
    families.table(tmp_path)
    head, _, first, *_ = capsys.readouterr().out.splitlines()
    assert ("a target of" in head) == (not batch)
    assert head.count("|") == first.count("|")
