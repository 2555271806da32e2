"""A folder with files of something else is refused before a command would replace them."""

import json
import shlex
from pathlib import Path

import pytest

from drafttrain.__main__ import main
from drafttrain.commands.capture import check_store_folder
from drafttrain.config.compose import compose, typed
from drafttrain.config.groups import follow_up
from drafttrain.config.overrides import parse
from drafttrain.config.sections import TrainConfig
from drafttrain.runtime.run_folder import check_run_folder, provenance, write_config
from drafttrain.runtime.tracker import read_metrics

SHAPES = ("", "{}", "[]", "[[]]", "3", "null", '{"run": 3}', '{"versions": {"mine": 1}}')


@pytest.mark.parametrize(
    "name",
    [
        *("probe", "readout.safetensors", "shard-00000.safetensors", "provenance.json"),
        *("manifest.json", "conversations.safetensors", "journal-0.jsonl"),
    ],
)
def test_no_store_is_written_over_files_of_others(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text('{"mine": 1}')
    if name == "probe":  # no longer a name of ours
        return check_store_folder(tmp_path)
    with pytest.raises(ValueError, match=r"store\.dir must|manifest\.json"):
        check_store_folder(tmp_path)
    assert file.read_text() == '{"mine": 1}'
    return None


def test_a_store_that_a_kill_interrupted_goes_on(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("others are left alone")
    check_store_folder(tmp_path)
    (tmp_path / "readout.safetensors").write_text("half")
    (tmp_path / "provenance.json").write_text(json.dumps(provenance([])))
    check_store_folder(tmp_path)


@pytest.mark.parametrize("content", SHAPES)
@pytest.mark.parametrize("name", ["config.yaml", "provenance.json", "metrics.jsonl", "train.log"])
def test_no_run_is_written_over_files_of_others(name: str, content: str, tmp_path: Path) -> None:
    config = typed(compose("train", [f"run.dir={tmp_path}"]), TrainConfig)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"run\.dir must be a new folder.*{name} of something el"):
        check_run_folder(config)
    (tmp_path / name).unlink()
    check_run_folder(config)
    write_config(config, tmp_path / "config.yaml")  # as far as a killed run came
    check_run_folder(config)


def test_no_pages_are_written_over_those_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan.md", "compare.html"):
        (tmp_path / name).write_text("mine")
    assert main(["plan", "hardware=cpu", f"plan.dir={tmp_path}"]) == 2
    assert "plan.dir must be a new folder" in capsys.readouterr().err
    assert main(["compare", "runs=[a,b]", f"compare.dir={tmp_path}"]) == 2
    assert "compare.dir must be a new folder" in capsys.readouterr().err
    assert main(["plan", "hardware=cpu", f"plan.dir={tmp_path / 'new'}"]) == 0
    assert main(["plan", "hardware=cpu", f"plan.dir={tmp_path / 'new'}"]) == 0


@pytest.mark.parametrize(
    "line",
    ['{"mine": 1}', '{"step": -1}', '{"step": true}', '{"step": 1e300}', '{"step":1,"table":[]}'],
)
def test_rows_of_others_are_named_before_a_run_begins(line: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 must have a step"):
        read_metrics(file)
    write_config(typed(compose("train", []), TrainConfig), tmp_path / "config.yaml")
    before = (tmp_path / "config.yaml").read_bytes()
    assert main(["train", f"run.dir={tmp_path}"]) == 2
    assert main(["evaluate", "drafter=ngram", f"run.dir={tmp_path}"]) == 2
    assert (tmp_path / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("folder", ["outputs/a,b c", "it's", "/x/[1]", "a=b", "outputs/demo", "7"])
def test_a_suggested_command_names_the_folder_that_was_written(folder: str) -> None:
    words = shlex.split(follow_up("evaluate", f"run.dir={folder}"))
    (override,) = parse("evaluate", words[4:])
    assert override.value() == folder
