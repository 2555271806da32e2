"""train -> evaluate -> export in one process, and what each leaves in the run folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.__main__ import main

SUMMARY = {
    "num_drafts": None,
    "num_draft_tokens": None,
    "num_accepted_tokens": None,
    "acceptance_length": {"micro", "macro", "ci95"},
    "acceptance_rate": None,
    "acceptance_per_position": None,
    "tokens_per_second": {"autoregressive", "speculative"},
    "speedup": {"value", "ci95"},
    "time_ms": {"draft", "verify", "other", "prefill"},
    "repetition_rate": None,
}
REPORT = {"summary", "tasks", "lossless", "timing", "definitions", "provenance"}


def write_conversations(path: Path, count: int = 40) -> Path:
    with path.open("w") as file:
        for number in range(count):
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": f"{number} plus {number} is {2 * number}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def check_row(row: dict[str, Any], where: str) -> None:
    """Every quantity that a row of a report promises."""
    for key, parts in SUMMARY.items():
        assert key in row, (where, key)
        if parts is not None:
            assert parts <= set(row[key]), (where, key)
    assert row["num_drafts"] >= 1, where
    assert 0 <= row["num_accepted_tokens"] <= row["num_draft_tokens"], where
    assert 1 <= row["acceptance_length"]["micro"] <= 1 + len(row["acceptance_per_position"]), where
    assert row["speedup"]["value"] > 0, where


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
def test_a_run_is_trained_measured_and_exported(drafter: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = write_conversations(tmp_path / "data.jsonl")
    train = ["train", f"run.dir={run}", f"drafter={drafter}", "data=jsonl", f"data.path={data}"]
    train += ["data.holdout=2", "hardware=cpu", "hardware.threads=1", "trainer.max_steps=3"]
    train += ["trainer.tokens_per_step=256", "trainer.log_every=1", "trainer.validation_prompts=1"]
    train += ["trainer.validation_tokens=8"]
    assert main(train) == 0
    left = ["checkpoints", "config.yaml", "metrics.jsonl", "provenance.json"]
    assert set(left) <= {path.name for path in run.iterdir()}
    assert yaml.safe_load((run / "config.yaml").read_text())["drafter"]["name"] == drafter
    record = json.loads((run / "provenance.json").read_text())
    assert {"command", "commit", "versions", "hardware", "target", "data"} <= set(record)
    assert (run / "checkpoints/step-000003/state.json").is_file()
    curve = (run / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in curve.splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    assert any("val/acceptance_length" in row for row in rows)
    assert main(train) == 2  # an earlier run is not written over

    evaluate = ["evaluate", f"run.dir={run}", "eval.prompts_per_task=1", "eval.max_new_tokens=8"]
    evaluate += ["eval.lossless_prompts=2", "eval.resamples=200", "eval.depth=2"]
    evaluate += ["eval.policy=chain"]  # a drafter of two steps pays nowhere
    assert main(evaluate) == 0
    place = run / "evaluations/default"
    assert {path.name for path in place.iterdir()} >= {"report.json", "report.md", "report.html"}
    report = json.loads((place / "report.json").read_text())
    assert REPORT <= set(report)
    assert len(report["tasks"]) == 8
    check_row(report["summary"], "summary")
    check_row(report["methods"]["ngram"]["summary"], "ngram")
    for task, row in report["tasks"].items():
        check_row(row, task)
    lossless = report["lossless"]
    assert (lossless["greedy_identical"], lossless["greedy_total"]) == (2, 2)
    assert {"rule", "dtype"} <= set(lossless)
    assert {"dtype", "threads", "blocks"} <= set(report["timing"])
    assert {"commit", "versions", "hardware", "command"} <= set(report["provenance"])
    assert (run / "metrics.jsonl").read_text().startswith(curve)

    assert main(["export", f"run.dir={run}"]) == 0
    exported = {path.name for path in (run / "export").iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= exported
    card = (run / "export/README.md").read_text()
    assert drafter in card.lower()
    assert f"{report['summary']['acceptance_length']['micro']:.2f}" in card


def test_a_run_says_what_its_trainer_chose_and_resumes_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    data = write_conversations(tmp_path / "data.jsonl")
    train = ["train", f"run.dir={run}", "data=jsonl", f"data.path={data}", "data.holdout=2"]
    train += ["hardware=cpu", "hardware.threads=1", "trainer=auto", "trainer.epochs=1"]
    train += ["optimizer=muon", "trainer.ema_decay=0.5", "trainer.validation_prompts=1"]
    train += ["trainer.validation_tokens=8"]
    assert main(train) == 0
    said = capsys.readouterr().out
    assert "  trainer=auto  optimizer=muon" in said
    chosen = yaml.safe_load((run / "config.yaml").read_text())["trainer"]
    steps, size = chosen["max_steps"], chosen["tokens_per_step"]
    assert (steps, size, chosen["lr"]) == (4, 256, 8e-3)
    assert f"trainer=auto chose steps={steps} of {size} tokens  lr=0.008" in said
    assert main([*train, "run.resume=true"]) == 0
    assert "nothing is left to train" in capsys.readouterr().out
    assert main([*train, "run.resume=true", "trainer.epochs=40"]) != 0
    assert "must be 0 to resume" in capsys.readouterr().err  # the warm-up
    plan = ["plan", "data=jsonl", f"data.path={data}", "trainer=auto"]
    assert main(plan) != 0
    assert "give trainer.max_steps and trainer.tokens_per_step" in capsys.readouterr().err
