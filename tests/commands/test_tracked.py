"""A run and its evaluation at a tracker: one run there, with its report, pictures and drafter."""

import json
from pathlib import Path
from typing import Any

import pytest
from paths import PYTHONPATH
from wandb_files import mirrored, records

from drafttrain.__main__ import main

QUICK = ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32"]
SHORT = ["eval.max_new_tokens=4", "eval.resamples=100", "eval.lossless_prompts=1", "eval.depth=2"]


@pytest.fixture
def training(tiny_target_dir: Path, tmp_path: Path) -> list[str]:
    """The command line of a training of two steps, without its folder."""
    data = tmp_path / "data.jsonl"
    talks = [
        [{"role": "user", "content": f"Double {n}."}, {"role": "assistant", "content": f"{2 * n}."}]
        for n in range(12)
    ]
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "task": "sums", "turns": ["What is 2 + 2?"]}) + "\n")
    arguments = ["train", "drafter=medusa", f"model.path={tiny_target_dir}", "data=jsonl"]
    arguments += [f"data.path={data}", "data.holdout=2", "trainer.max_steps=2"]
    arguments += ["trainer.tokens_per_step=64", "trainer.validation_prompts=1"]
    return [*arguments, "trainer.validation_tokens=4", *QUICK]


def logged(folder: Path) -> tuple[list[dict[str, Any]], Any, dict[str, list[str]]]:
    """Return the history, the run, and the files of its artifacts, of the latest W&B run."""
    (file,) = (folder / "wandb/latest-run").resolve().glob("*.wandb")
    _, history, run = mirrored(file)
    found = [r.artifact for r in records(file) if r.HasField("artifact")]
    kept = {a.name: sorted(e.path for e in a.manifest.contents) for a in found}
    return history, run, {name: files for name, files in kept.items() if "run-" not in name}


def test_the_evaluation_of_a_run_goes_on_in_its_wandb_run(
    training: list[str], tmp_path: Path
) -> None:
    place = tmp_path / "measured"
    assert main([*training, f"run.dir={place}", "run.name=measured", "tracker=wandb"]) == 0
    history, trained, kept = logged(place)
    assert trained.job_type == "train"
    assert kept == {"drafter-measured": ["config.yaml", "drafter.safetensors"]}
    assert any("train/loss" in row for row in history)
    prompts = f"eval.prompts={tmp_path / 'prompts.jsonl'}"
    assert main(["evaluate", f"run.dir={place}", prompts, *SHORT]) == 0
    history, run, kept = logged(place)
    assert (run.run_id, run.job_type) == (trained.run_id, "")
    assert kept == {
        "report-default": [
            *("config.yaml", "report.html", "report.json", "report.md", "settings.json"),
        ]
    }
    pictures = {
        title.removesuffix("/_type")
        for row in history
        for title, kind in row.items()
        if kind == "image-file"
    }
    assert {"report/default/Speedup by task", "report/default/Tokens per second"} <= pictures


def test_the_jobs_of_a_sweep_are_one_group_and_below_one_folder(
    training: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    sweep = [*training, "--multirun", "run.seed=3", "hydra.sweep.dir=sweeps/seeds"]
    assert main([*sweep, "tracker=wandb,tensorboard"]) == 0
    _, run, _ = logged(Path("sweeps/seeds/wandb"))
    assert (run.run_group, run.job_type, list(run.tags)) == ("seeds", "train", ["tracker=wandb"])
    assert list(Path("sweeps/seeds/tensorboard/tensorboard").iterdir())
    assert "all curves: tensorboard --logdir sweeps/seeds\n" in capsys.readouterr().out


def test_a_package_that_is_missing_is_named_before_anything_is_trained_or_measured(
    training: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in (
        [*training, f"run.dir={tmp_path / 'run'}"],
        ["evaluate", "drafter=ngram", f"run.dir={tmp_path / 'run'}"],
        ["compare", f"runs=[{tmp_path}]", f"compare.dir={tmp_path / 'run'}"],
    ):
        assert main([*words, "tracker=tensorboard"]) == 2
        assert "pip install 'drafttrain[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
