"""The default policy, `auto`, drafts where that pays by costs and acceptance that it measured."""

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_as_tuned import tuned
from test_evaluation_commands import QUICK, model_of, prompts_of, run  # noqa: F401 (a fixture)

from drafttrain.__main__ import main
from drafttrain.decode.costs import Costs
from drafttrain.evaluation import tune

pytestmark = pytest.mark.usefixtures("plain_pictures")

PLAIN, CYCLE = 1.0, {1: 1.2, 2: 1.3, 3: 1.4}  # seconds of a plain step, and of a cycle by depth
SHORT = ["eval.max_new_tokens=40", "eval.resamples=100", "eval.lossless_prompts=1", "eval.depth=3"]
SHORT += ["eval.blocks=1"]


def costs(_: Any, __: Any, policies: Any, batches: Sequence[int], ___: Any, settings: Any) -> Costs:
    cells = list(product(batches, settings.contexts))
    deep = {(depth, *cell): CYCLE[depth] / 2 for depth in policies(1) for cell in cells}
    plain, read = dict.fromkeys(cells, PLAIN), dict.fromkeys(cells, 0.1)
    return Costs(batches, settings.contexts, plain, deep, deep, read)


@pytest.fixture(autouse=True)
def same_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a large target on any machine: what is decided then depends on acceptance alone."""
    monkeypatch.setattr(tune, "measure_costs", costs)


def evaluated(folder: Path, name: str, *told: str) -> dict[str, Any]:
    arguments = ["evaluate", f"run.dir={folder}", *SHORT, f"eval.name={name}", *told]
    assert main(arguments) == 0
    report: dict[str, Any] = json.loads((folder / f"evaluations/{name}/report.json").read_text())
    return report


def seconds(row: Mapping[str, Any]) -> float:
    """The seconds of a method by its counters."""
    drafted = row["num_draft_tokens"]
    return row["num_target_passes"] * PLAIN + drafted * (CYCLE[1] - PLAIN)  # deeper ones cost less


def test_a_bad_drafter_hardly_drafts_and_a_chain_by_name_does(
    run: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = evaluated(run, "auto", prompts_of(run))
    said = capsys.readouterr().out
    plain = report["methods"]["autoregressive"]
    line = "Drafts do not pay here: depth 1, the best that was tried, is 0."
    assert line in said
    assert any(note.startswith(line) for note in report["notes"])
    for row in (report["summary"], *report["tasks"].values()):
        assert row["num_drafts"] < 0.15 * row["num_target_passes"]
    assert seconds(report["summary"]) < plain["summary"]["num_target_passes"] * PLAIN * 1.04
    # A chain that is asked for by name drafts in every cycle, as before.
    chain = evaluated(run, "chain", prompts_of(run), "eval.policy=chain")["summary"]
    assert chain["num_drafts"] == chain["num_target_passes"]
    assert seconds(chain) > 1.3 * plain["summary"]["num_target_passes"] * PLAIN
    # What was measured is kept: the same decisions again, without timing anything.
    monkeypatch.setattr(tune, "measure_costs", None)
    again = evaluated(run, "again", prompts_of(run))
    assert again["summary"]["num_draft_tokens"] == report["summary"]["num_draft_tokens"]


def test_a_good_drafter_drafts_as_deep_as_pays(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (model,) = model_of(run)  # the target drafts for itself: everything is accepted
    own = ["drafter=two_model", f"drafter.path={model.removeprefix('model.path=')}"]
    report = evaluated(tmp_path, "auto", prompts_of(run), model, *own, *QUICK)
    assert "Drafts pay here: depth 3, the best that was tried, is 2." in capsys.readouterr().out
    plain = report["methods"]["autoregressive"]["summary"]["num_target_passes"]
    assert report["summary"]["num_target_passes"] < plain / 3
    assert not report["verdict"].startswith("Do not")


def answered(folder: Path, *told: str) -> dict[str, int]:
    """Answer a prompt by `generate`; return how many tokens each writer wrote."""
    out = folder / "answers.jsonl"
    arguments = ["generate", f"run.dir={folder}", "chat.prompt=Say hello.", f"chat.out={out}"]
    assert main([*arguments, "chat.max_new_tokens=60", "eval.depth=3", *told]) == 0
    (answer,) = json.loads(out.read_text())["answers"]
    out.unlink()
    return {
        name: sum(n for who, n in answer["pieces"] if who == name) for name, _ in answer["pieces"]
    }


def test_answers_are_not_drafted_where_that_loses(
    run: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = answered(run)
    said = capsys.readouterr()
    assert "Drafts do not pay here: depth 1, " in said.err
    assert "eval.policy=chain forces drafts.\n" in said.err
    assert written["plain"] > 0.85 * sum(written.values())
    assert answered(run, "eval.policy=chain")["plain"] == 1  # the prefill's
    assert "Drafts" not in capsys.readouterr().err


def test_an_export_follows_what_was_measured(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = shutil.ignore_patterns("quick", "evaluations")
    shutil.copytree(run, folder := tmp_path / "run", ignore=left)
    export = ["export", f"run.dir={folder}", "export.overwrite=true"]
    assert main(export) == 0
    assert '"num_speculative_tokens": 3' in capsys.readouterr().out
    kept = folder / "quick" / "0" / "tuned.json"
    kept.parent.mkdir(parents=True)
    best = {"depth": 2, "speculate": True, "speedup": 1.3}
    kept.write_text(json.dumps(tuned(weights="step-000002", batches={"1": {"all": best}})))
    assert main(export) == 0
    assert '"num_speculative_tokens": 2' in capsys.readouterr().out
    loses = {"all": best | {"speculate": False, "speedup": 0.9}}
    kept.write_text(json.dumps(tuned(weights="step-000002", batches={"1": loses})))
    assert main(export) == 0
    said = capsys.readouterr().out
    assert "warning: Drafts do not pay here: depth 2, the best that was tried, is 0.90" in said
    assert '"num_speculative_tokens": 3' in said
