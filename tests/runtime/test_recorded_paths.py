"""A run records its paths so that it is read from any folder, and as a copy."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.config.compose import compose, typed
from drafttrain.config.resume import differences
from drafttrain.config.sections import TrainConfig
from drafttrain.evaluation.record import keep, require_same, settings_of
from drafttrain.runtime.run_folder import load_config, write_config


def composed(*more: str) -> Any:
    told = ["run.dir=run", "model.path=target", "data=jsonl", "data.path=run/data.jsonl"]
    told += ["features=stored", "features.dir=store", "vllm.python=python3", "eval.prompts=p.jsonl"]
    return typed(compose("train", [*told, *more]), TrainConfig)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    for name in ("run", "target", "store"):
        (folder / name).mkdir(parents=True)
    for name in ("run/data.jsonl", "p.jsonl"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    write_config(composed(), Path("run/config.yaml"))
    return folder


def test_paths_are_absolute_or_relative_to_the_run(here: Path) -> None:
    plain = yaml.safe_load(Path("run/config.yaml").read_text())
    assert plain["model"]["path"] == str(here / "target")
    assert plain["features"]["dir"] == str(here / "store")
    assert plain["eval"]["prompts"] == str(here / "p.jsonl")
    assert plain["data"]["path"] == "${run.dir}/data.jsonl"
    assert plain["vllm"]["python"] == "python3"  # a program, wherever it is found


def test_a_run_is_read_from_another_folder_and_as_a_copy(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("run", tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    for run in (Path("here/run"), Path("copy"), tmp_path / "copy"):
        found = load_config(run)
        assert found["data"]["path"] == str(tmp_path / run / "data.jsonl")
        assert found["model"]["path"] == str(here / "target")


def test_another_spelling_of_a_path_is_no_difference(here: Path) -> None:
    saved = load_config(Path("run"))
    same = composed(f"data.path={here}/run/../run/data.jsonl", f"features.dir={here / 'store'}")
    assert not [one for one in differences(same, saved) if "path" in one[0] or "dir" in one[0]]
    other = composed("data.path=p.jsonl")
    assert "data.path" in [one[0] for one in differences(other, saved)]


def test_an_old_record_of_relative_paths_is_read_as_before(here: Path) -> None:
    plain = yaml.safe_load(Path("run/config.yaml").read_text())
    plain["data"]["path"] = "run/data.jsonl"
    Path("run/config.yaml").write_text(yaml.safe_dump(plain))
    saved = load_config(Path("run"))
    assert saved["data"]["path"] == "run/data.jsonl"
    assert "data.path" not in [one[0] for one in differences(composed(), saved)]


def test_a_result_is_the_same_by_whatever_path_its_target_is_named(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "report.json").touch()
    keep(here, settings_of(composed(), {}))
    found = [f"model.path={here / 'target'}", "model.name=target", f"eval.prompts={here}/p.jsonl"]
    monkeypatch.chdir(tmp_path)
    elsewhere = composed(*found, f"features.dir={here / 'store'}", f"run.dir={here / 'run'}")
    require_same(here, here / "report.json", settings_of(elsewhere, {}), False, "")
    monkeypatch.chdir(here)
    again = settings_of(composed(f"model.path={here / 'target'}", "model.name=target"), {})
    require_same(here, here / "report.json", again, False, "")


def test_what_may_be_on_the_hub_is_absolute_where_it_is_a_folder(here: Path) -> None:
    (here / "rows").mkdir()
    told = ["run.dir=run", "data=hub", "data.repo=rows", "eval.two_model=target"]
    found = compose("train", [*told, "eval.dataset=ada/rows"])
    write_config(typed(found, TrainConfig), Path("run/config.yaml"))
    plain = yaml.safe_load(Path("run/config.yaml").read_text())
    assert plain["data"]["repo"] == str(here / "rows")
    assert plain["eval"]["two_model"] == str(here / "target")
    assert plain["eval"]["dataset"] == "ada/rows"
