"""A run and a store that version 0.1 wrote (commit c56483a, whose classes have moved since).

tests/golden/v0.1 holds them: four steps of EAGLE-3 on a random target, read from the store. The
commands stand in their provenance.json.
"""

import json
import shutil
from pathlib import Path

import pytest

from drafttrain.__main__ import main
from drafttrain.config.groups import complete
from drafttrain.config.sections import SECTIONS
from drafttrain.runtime.run_folder import load_config

OLD = Path(__file__).parents[1] / "golden" / "v0.1"
SHORT = ["eval.prompts_per_task=1", "eval.max_new_tokens=4", "eval.lossless_prompts=1"]


@pytest.fixture(autouse=True)
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which commands may write to; its own settings name places from there."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_it_is_resumed_from_its_store(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((old / "provenance.json").read_text())["command"].split()[4:]
    longer = [one for one in told if not one.startswith("trainer.max_steps")]
    assert main(["train", *longer, "trainer.max_steps=6", "run.resume=true"]) == 0
    said = capsys.readouterr().out
    assert "optimizer=adamw" in said  # of its time, when there was no choice; Muon is today's
    rows = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [4, 6]
    assert (old / "checkpoints/step-000006/drafter.safetensors").is_file()


def test_it_is_evaluated_and_exported(old: Path) -> None:
    assert main(["evaluate", f"run.dir={old}", "eval.resamples=100", *SHORT]) == 0
    report = json.loads((old / "evaluations/default/report.json").read_text())
    assert report["lossless"]["greedy_identical"] == report["lossless"]["greedy_total"] > 0
    assert main(["export", f"run.dir={old}", "export.dir=exported"]) == 0
    assert Path("exported/model.safetensors").is_file()


def test_every_section_finds_its_class_where_it_is_today(old: Path) -> None:
    saved = {name: section for name, section in load_config(old).items() if name in SECTIONS}
    today = {name: complete(name, saved)["_target_"] for name in saved}
    moved = {name for name in saved if today[name] != saved[name]["_target_"]}
    assert moved == {"run", "model", "features", "trainer", "hardware", "deepspeed", "tracker"}
