"""data.train_on, and a file of prompts as trainer.validation_prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_write import drawn, evaluation

from drafttrain.__main__ import main
from drafttrain.commands.evaluate import unlike_validation
from drafttrain.core.types import Sample
from drafttrain.data.chat import as_trained
from drafttrain.evaluation.last_validation import Validated
from drafttrain.report.results import Report


def conversations(file: Path) -> Path:
    rows = [
        {"prompt": f"What is {i} and {i + 1}?", "completion": f"It is {2 * i + 1}."}
        for i in range(8)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def prompts(file: Path) -> Path:
    rows = [
        {"id": f"{task}-{i}", "task": task, "turns": [f"Say {i} in {task}."]}
        for task in ("words", "numbers")
        for i in range(3)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def train(tmp_path: Path, name: str, *more: str) -> list[dict[str, Any]]:
    data = conversations(tmp_path / "data.jsonl")
    command = ["train", f"run.dir={tmp_path / name}", "drafter=eagle", "data=jsonl"]
    command += [f"data.path={data}", "data.holdout=2", "hardware=cpu", "hardware.threads=1"]
    command += ["trainer.max_steps=1", "trainer.tokens_per_step=512", "trainer.log_every=1"]
    command += ["trainer.validation_prompts=1", "trainer.validation_tokens=4", "tracker=none"]
    assert main([*command, *more]) == 0
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_file_of_prompts_is_validated_by_task(tmp_path: Path) -> None:
    file = prompts(tmp_path / "prompts.jsonl")
    rows = train(tmp_path, "run", f"trainer.validation_prompts={file}")
    measured = next(row for row in rows if "val/acceptance_length" in row)
    assert {"val/acceptance_length/words", "val/acceptance_length/numbers"} <= set(measured)
    table = next(row for row in rows if row.get("table") == "validation")
    assert [row[0] for row in table["rows"]] == [0, 1, 2, 3, 4, 5]


def test_training_says_what_to_expect_and_from_which_length_it_pays(tmp_path: Path) -> None:
    rows = train(tmp_path, "run")
    (measured,) = [row for row in rows if "val/acceptance_length" in row]
    log = (tmp_path / "run/train.log").read_text().splitlines()
    starts = ("acceptance lengths measured on", "speculation pays here from", "validation after")
    expected, pays, validated = [
        next(line for line in log if line.startswith(start)) for start in starts
    ]
    assert log.index(expected) < log.index(pays) < log.index(validated)
    assert "2.26 and 1.68 from 3.2M" in expected
    assert f"{measured['perf/break_even']:.2f}, one prompt at a time" in pays
    assert f"speculation pays here from {measured['perf/break_even']:.2f}" in validated


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("nowhere.jsonl", "trainer.validation_prompts must name a file of prompts"),
        ("0", "at least 1"),
        ("[1]", "at least 1"),
    ],
)
def test_other_values_are_refused_in_one_line(
    value: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = conversations(tmp_path / "data.jsonl")
    command = ["train", f"run.dir={tmp_path / 'run'}", "data=jsonl", f"data.path={data}"]
    command += ["data.holdout=2", "hardware=cpu", f"trainer.validation_prompts={value}"]
    assert main(command) != 0
    got = capsys.readouterr()
    assert named in got.err + got.out
    assert "Traceback" not in got.err + got.out


def test_all_tokens_but_the_first_can_be_trained(tmp_path: Path) -> None:
    sample = Sample(torch.arange(6), torch.arange(6) >= 4, 0)
    (whole,) = as_trained([sample], "all")
    assert whole.loss_mask.tolist() == [False, *[True] * 5]
    assert as_trained([sample], "answers") == [sample]
    losses = {
        kind: train(tmp_path, kind, f"data.train_on={kind}")[0]["train/loss"]
        for kind in ("answers", "all")
    }
    assert losses["all"] != losses["answers"]


def test_capture_refuses_what_a_store_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = conversations(tmp_path / "data.jsonl")
    command = ["capture", f"store.dir={tmp_path / 'store'}", "data=jsonl", f"data.path={data}"]
    assert main([*command, "data.train_on=all", "hardware=cpu"]) == 2
    assert "data.train_on must be answers" in capsys.readouterr().err


def test_an_evaluation_says_that_its_prompts_are_unlike_those_of_validation() -> None:
    here = evaluation().summary.acceptance_per_position[0]
    assert here is not None

    def lines(more: float, report: Report = evaluation()) -> list[str]:  # noqa: B008
        return unlike_validation(report, Validated(2.0, [here + more, 0.1], 1.3, {}))

    (line,) = lines(-0.2)
    assert line.startswith(f"{here:.2f} of the first drafted tokens are accepted here, ")
    assert f"{here - 0.2:.2f} were when the run last validated" in line
    assert len(lines(0.2)) == 1
    assert lines(0.05) == [], "within what the prompts can tell apart"
    assert lines(0.2, drawn()) == [], "validation is greedy"
    assert unlike_validation(evaluation(), None) == [], "not trained here"
