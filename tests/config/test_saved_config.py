"""What a run folder of someone else may do to whoever reads it: be read, and nothing more."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.__main__ import main
from drafttrain.config.compose import compose, recorded, typed
from drafttrain.config.sections import COMMANDS, TrainConfig
from drafttrain.runtime.run_folder import load_config, write_config

PAYLOAD = """
from dataclasses import dataclass
from pathlib import Path
Path(__file__).with_name("it ran").touch()
from drafttrain.evaluation.config import EvalConfig as X
"""
SECRET = "hf_verysecret"


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of someone else, in the folder that a command runs in, with a module beside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    run = tmp_path / "theirs"
    run.mkdir()
    (tmp_path / "payload.py").write_text(PAYLOAD)
    write_config(typed(compose("train", [f"run.dir={run}"]), TrainConfig), run / "config.yaml")
    return run


def change(run: Path, **sections: dict[str, Any]) -> None:
    saved = yaml.safe_load((run / "config.yaml").read_text())
    for section, values in sections.items():
        saved[section].update(values)
    (run / "config.yaml").write_text(yaml.safe_dump(saved))


@pytest.mark.parametrize(
    ("told", "section"),
    [
        ("plan hardware=cpu plan.measured=theirs", "eval"),  # which it reads, and does not need
        ("plan hardware=cpu plan.measured=theirs", "drafter"),
        ("train run.init_from=theirs run.dir=new hardware=cpu", "model"),
        ("train run.init_from=theirs run.dir=new hardware=cpu", "drafter"),
        ("evaluate run.dir=theirs", "drafter"),
        ("tune run.dir=theirs", "hardware"),
        ("export run.dir=theirs", "model"),
    ],
)
def test_a_class_that_a_run_of_others_names_is_not_imported(
    told: str, section: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(theirs, **{section: {"_target_": "payload.X"}})
    assert main(told.split()) == 2
    assert not (theirs.parent / "it ran").exists()
    assert "payload" not in sys.modules
    said = capsys.readouterr().err
    assert said.startswith(f"error: {section}._target_ must name a class of drafttrain or of a y")
    assert said.count("\n") == 1


def test_nor_is_one_that_is_read_after_the_choice_was_made(theirs: Path) -> None:
    """`train run.init_from` takes three sections, and then the run's drafter, with all the rest."""
    change(theirs, eval={"_target_": "payload.X"})
    with pytest.raises(ValueError, match=r"eval\._target_ must name a class of drafttrain or of"):
        recorded(theirs, TrainConfig, "run.init_from")
    assert not (theirs.parent / "it ran").exists()


@pytest.mark.parametrize(
    ("told", "section"),
    [
        ("train run.resume=true run.dir=theirs", "drafter"),
        ("train run.init_from=theirs run.dir=new", "drafter"),
        ("plan hardware=cpu plan.measured=theirs", "optimizer"),
        ("plan hardware=cpu run.dir=theirs", "trainer"),
        ("evaluate run.dir=theirs", "model"),
        ("export run.dir=theirs", "drafter"),
    ],
)
def test_a_run_of_another_version_is_refused_in_one_line(
    told: str, section: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = yaml.safe_load((theirs / "config.yaml").read_text())
    missing = [key for key in whole[section] if key not in ("name", "_target_")][-1]
    change(theirs, **{section: {"key_of_old": 1}})
    assert main(told.split()) == 2
    said = capsys.readouterr().err
    assert f"{section}.key_of_old is not a field of" in said
    assert said.count("\n") == 1
    del whole[section][missing]
    (theirs / "config.yaml").write_text(yaml.safe_dump(whole))
    assert main(told.split()) == 2
    said = capsys.readouterr().err
    assert f"a run must have {section}.{missing}, but another version wrote it; add" in said
    assert said.count("\n") == 1


def test_a_run_without_one_of_its_sections_is_not_resumed(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = yaml.safe_load((theirs / "config.yaml").read_text())
    del whole["optimizer"]  # else another optimizer would take its steps from here on
    (theirs / "config.yaml").write_text(yaml.safe_dump(whole))
    assert main(["train", "run.resume=true", f"run.dir={theirs}"]) == 2
    assert capsys.readouterr().err == "error: the config.yaml of run.dir has no section optimizer\n"
    del whole["run"]["init_from"]
    (theirs / "config.yaml").write_text(yaml.safe_dump(whole))
    assert main(["train", "run.resume=true", f"run.dir={theirs}"]) == 2


def test_a_folder_may_be_called_as_a_choice_of_another_class(theirs: Path) -> None:
    """Such as that of a target, by which model.path=DIR names it."""
    change(theirs, model={"name": "random"})
    assert recorded(theirs, TrainConfig, "run.init_from").model.name == "random"


@pytest.mark.parametrize("command", ["evaluate", "tune", "export"])
def test_what_a_run_of_others_holds_asks_for_no_other_value(
    command: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = "${oc.env:HF_TOKEN}"
    change(theirs, data={"cache_dir": asking}, model={"name": f"a {asking}", "path": asking})
    config = typed(compose(command, [f"run.dir={theirs}"]), COMMANDS[command])
    assert config.data.cache_dir == asking
    assert config.model.path == asking
    assert config.model.name == f"a {asking}"
    again = theirs.parent / "again.yaml"
    write_config(config, again)
    assert SECRET not in again.read_text()
    assert main([command, "--config", f"run.dir={theirs}"]) == 0
    assert SECRET not in capsys.readouterr().out
    # Nor where what was typed asks for a text of theirs.
    name = compose("evaluate", [f"run.dir={theirs}", "run.name=${model.name}"]).run.name
    assert SECRET not in name


def test_a_number_that_a_run_of_others_asks_for_is_refused(theirs: Path) -> None:
    change(theirs, data={"max_length": "${oc.env:HF_TOKEN}"})
    with pytest.raises(ValueError, match=r"data\.max_length must be an integer, got \$\{oc\.env"):
        typed(compose("evaluate", [f"run.dir={theirs}"]), COMMANDS["evaluate"])


def test_what_is_typed_may_ask_for_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMEONE", "ada")
    config = typed(compose("train", ["run.name=${oc.env:SOMEONE}-${drafter.name}"]), TrainConfig)
    assert config.run.name == "ada-eagle3"
    assert config.run.dir == "outputs/ada-eagle3"


def test_leave_to_run_the_code_of_others_is_typed_and_not_saved(theirs: Path) -> None:
    change(theirs, model={"trust_remote_code": True, "allow_pickle": True})
    told = [f"run.dir={theirs}"]
    for command in ("evaluate", "export"):
        model = typed(compose(command, told), COMMANDS[command]).model
        assert (model.trust_remote_code, model.allow_pickle) == (False, False)
    given = compose("evaluate", [*told, "model.trust_remote_code=true"])
    assert given.model.trust_remote_code is True


def test_hydra_does_not_obey_a_run_of_others(theirs: Path) -> None:
    change(theirs, model={"defaults": [{"override /data@_global_.data": "ultrachat"}]})
    told = typed(compose("evaluate", [f"run.dir={theirs}"]), COMMANDS["evaluate"])
    assert (told.data.name, told.model.name) == ("selfgen", "tiny")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {seed: 2026-01-01}", r"run\.seed must be text, a number, .*got datetime"),
        ("run: {1: 2}", r"run must have keys that are text, got 1"),
        ("run: {name: !!binary aGk=}", r"run\.name must be text"),
        ("run: {name: &a [1], dir: *a}", r"must be yaml, got: an alias"),
        ("run: {name: !!python/object/apply:os.system [ls]}", r"must be yaml, got"),
        ("run: {x: [[[[[[[[[[[1]]]]]]]]]]]}", r"run\.x must be text, a number, .*few lists"),
        ("run: {x: " + "[" * 5000 + "]" * 5000 + "}", r"must be yaml, got: it is nested too deep"),
        ("run: {x: " + "9" * 5000 + "}", r"must be yaml, got"),
        ("run: " + "x" * 300_000, r"must have at most 262,144 bytes"),
        ("run: {name: '\x1b[31m'}", r"must be yaml, got"),
        ("[1]", r"must hold the sections of a run, got something else"),
        ("", r"must hold the sections of a run, got something else"),
    ],
)
def test_a_config_that_is_no_plain_data_is_refused_in_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        load_config(tmp_path)
    assert main(["evaluate", f"run.dir={tmp_path}"]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert "\x1b" not in captured


@pytest.mark.parametrize(
    ("told", "key"),
    [
        ("evaluate run.dir={}", "run.dir"),
        ("export run.dir={}", "run.dir"),
        ("plan hardware=cpu plan.measured={}", "plan.measured"),
        ("train run.init_from={}", "run.init_from"),
        ("compare runs=[{}]", "runs"),
    ],
)
@pytest.mark.parametrize(
    ("place", "state"), [("README.md", "is a file"), ("nowhere", "does not exist")]
)
def test_the_key_that_names_a_folder_is_named_when_it_is_no_runs(
    told: str,
    key: str,
    place: str,
    state: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README.md").touch()
    assert main(told.format(place).split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {key} must ")
    assert f"got {place}, which {state}" in said
