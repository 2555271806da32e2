"""The default policy, `auto`, drafts where that pays by what the run measured before."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from test_as_tuned import tuned
from test_evaluation_commands import QUICK, model_of, prompts_of, run  # noqa: F401 (a fixture)

from drafttrain.__main__ import main
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import EvaluateConfig
from drafttrain.evaluation.last_validation import Validated, validated
from drafttrain.runtime.run_folder import hardware

pytestmark = pytest.mark.usefixtures("plain_pictures")

SHORT = ["eval.max_new_tokens=40", "eval.resamples=100", "eval.lossless_prompts=1", "eval.depth=3"]
SHORT += ["eval.blocks=1"]
NEVER, ALWAYS = "hardly anything is drafted", "up to 3 tokens are drafted, as many as pay"
Made = Callable[..., Path]


@pytest.fixture
def made(run: Path, tmp_path: Path) -> Made:  # noqa: F811
    """A copy of a trained run, whose metrics have other costs and another acceptance."""

    def copied(break_even: float, *reached: float, **machine: Any) -> Path:
        folder = tmp_path / f"run{break_even}"
        shutil.copytree(run, folder, ignore=shutil.ignore_patterns("evaluations"))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if "perf/break_even" in row:
                row["perf/break_even"] = break_even
                for position in range(1, 9):
                    row.pop(f"val/acceptance_position_{position}", None)
                for position, share in enumerate(reached, 1):
                    row[f"val/acceptance_position_{position}"] = share
                row["val/acceptance_length"] = 1 + sum(reached)
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / "metrics.jsonl").write_text(lines)
        record = json.loads((folder / "provenance.json").read_text())
        record["hardware"] |= machine
        (folder / "provenance.json").write_text(json.dumps(record))
        return folder

    return copied


def evaluated(folder: Path, *told: str) -> dict[str, Any]:
    arguments = ["evaluate", f"run.dir={folder}", *SHORT, "eval.overwrite=true", *told]
    assert main(arguments) == 0
    report: dict[str, Any] = json.loads((folder / "evaluations/default/report.json").read_text())
    return report


def test_a_drafter_that_loses_hardly_drafts_and_a_chain_by_name_does(
    run: Path,  # noqa: F811
    made: Made,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = made(2.5, 0.2, 0.01, 0.0)
    report = evaluated(folder, prompts_of(run))
    row, plain = report["summary"], report["methods"]["autoregressive"]["summary"]
    said = "drafts of 3 tokens pay from an acceptance length of 2.50, the last validation had 1.21"
    assert f"{said}: {NEVER}; eval.policy=chain always drafts" in capsys.readouterr().out
    assert any(note.startswith(said) for note in report["notes"])
    assert row["num_draft_tokens"] < 0.1 * plain["num_target_passes"]
    assert report["verdict"].startswith("Do not")
    # The check of greedy outputs drafts all the same: otherwise it would check nothing.
    assert report["lossless"]["greedy_identical"] == report["lossless"]["greedy_total"] == 1
    chain = evaluated(folder, prompts_of(run), "eval.policy=chain")["summary"]
    assert chain["num_drafts"] == chain["num_target_passes"]
    assert NEVER not in capsys.readouterr().out


def test_a_drafter_that_pays_drafts(
    run: Path,  # noqa: F811
    made: Made,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = evaluated(made(1.05, 0.9, 0.8, 0.7), prompts_of(run))["summary"]
    assert ALWAYS in capsys.readouterr().out
    assert row["num_drafts"] > 0.5 * row["num_target_passes"]


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        ({"cpu": "another"}, ()),
        ({}, ("eval.batch_size=2",)),
        ({}, ("model.inflate=2M",)),
        ({}, ("eval.depths=[1]",)),
    ],
)
def test_what_was_measured_elsewhere_decides_nothing(
    run: Path,  # noqa: F811
    made: Made,
    machine: dict[str, str],
    told: tuple[str, ...],
) -> None:
    report = evaluated(made(2.5, 0.2, 0.01, **machine), prompts_of(run), *told)
    row = report["summary"]
    assert row["num_drafts"] == row["num_target_passes"]


def test_tune_is_believed_before_the_last_validation(
    run: Path,  # noqa: F811
    made: Made,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = made(2.5, 0.2, 0.01)
    model = typed(compose("evaluate", [f"run.dir={folder}"]), EvaluateConfig).model
    for device, by_tune in (("cpu", True), ("cuda", False)):
        conditions = {"model": asdict(model), "device": device}
        content = tuned(weights="step-000002", conditions=conditions)
        (folder / "tuned.json").write_text(json.dumps(content))
        evaluated(folder, prompts_of(run))
        said = " ".join(capsys.readouterr().out.split())
        assert (f"{ALWAYS}, by " in said) == by_tune
        assert (NEVER in said) != by_tune


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


def test_answers_are_not_drafted_where_that_loses(made: Made) -> None:
    folder = made(2.5, 0.2, 0.01)
    written = answered(folder)
    assert written["plain"] > 0.85 * sum(written.values())
    assert answered(folder, "eval.policy=chain")["plain"] == 1  # the prefill's


def test_an_export_warns_where_drafts_lost(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"run.dir={made(2.5, 0.2, 0.01)}"]) == 0
    said = "warning: where it was trained, drafts of 2 tokens pay from an acceptance length of 2.50"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["export", f"run.dir={made(1.05, 0.9, 0.8)}"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_acceptance_and_costs_follow_from_a_validation(tmp_path: Path) -> None:
    known = Validated(1.9, [0.6, 0.3, 0.0], 1.3, hardware())
    assert known.acceptance == [0.6, 0.5, 0.0]
    assert known.token_cost == pytest.approx(0.1)
    assert known.pays
    assert not Validated(1.9, [0.6, 0.3, 0.0], 3.0, {}).pays
    assert Validated(1.5, [0.5, 0.0, 0.0], 2.2, {}).pays, "a draft of one token does"
    costs = known.costs(6)
    assert costs.depths == [1, 2, 3, 4, 5, 6]
    assert costs.cycle_s(6, 1, 100.0) == pytest.approx(1.6)
    assert costs.plain_s(1, 100.0) == 1
    assert known.on_this(torch.device("cpu")) == (not hardware()["gpus"])
    assert not Validated(1.9, [0.6], 1.3, None).on_this(torch.device("cpu"))


def test_a_run_that_timed_nothing_says_nothing(tmp_path: Path) -> None:
    step = Path("step-000010")
    assert validated(tmp_path, step) is None
    (tmp_path / "provenance.json").write_text('{"hardware": {}}')
    row = {"step": 10, "val/acceptance_length": 1.5, "val/acceptance_position_1": 0.5}
    for more, known in (
        ({}, False),
        ({"perf/break_even": "2"}, False),
        ({"perf/break_even": 2}, True),
    ):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row | more) + "\n")
        assert (validated(tmp_path, step) is not None) == known
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {"perf/break_even": 10**400}) + "\n")
    assert validated(tmp_path, step) is None, "a number that no float holds"
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {"perf/break_even": 2}) + "\n")
    assert validated(tmp_path, Path("step-000009")) is None, "of later weights"
