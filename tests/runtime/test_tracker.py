"""metrics.jsonl has every curve once, and Weights & Biases' own client writes the same."""

import io
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.image import imread
from paths import ROOT
from wandb_files import mirrored, records

from drafttrain.runtime.tracker import (
    JsonlTrackerConfig,
    TensorboardConfig,
    Tracker,
    WandbConfig,
    open_tracker,
    read_metrics,
)

CONFIG = {"run": {"name": "first"}, "trainer": {"lr": 0.5, "betas": [0.9, 0.95]}}


def jsonl(folder: Path, resume_step: int | None = None, is_main: bool = True) -> Tracker:
    choice = JsonlTrackerConfig(name="none")
    return open_tracker(choice, folder, config=CONFIG, resume_step=resume_step, is_main=is_main)


def wandb_choice(mode: str = "offline", project: str = "drafttrain") -> WandbConfig:
    return WandbConfig(
        name="wandb",
        project=project,
        entity=None,
        mode=mode,
        tags=["tiny"],
        group=None,
        artifacts=True,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    times_left_out = ({k: v for k, v in r.items() if k != "time"} for r in read(folder))
    return list(times_left_out)


def read(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def test_every_row_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path / "run")
    tracker.log(10, {"train/loss": 2.5, "train/tokens": 4096})
    assert rows(tmp_path / "run") == [{"step": 10, "train/loss": 2.5, "train/tokens": 4096}]
    tracker.log(10, {"val/acceptance_length": 2.0})
    tracker.table("validation", ["prompt", "acceptance_length"], [["a", 2.0], ["b", None]])
    tracker.finish()
    assert rows(tmp_path / "run")[1:] == [
        {"step": 10, "val/acceptance_length": 2.0},
        {
            "step": 10,
            "table": "validation",
            "columns": ["prompt", "acceptance_length"],
            "rows": [["a", 2.0], ["b", None]],
        },
    ]
    assert read(tmp_path / "run")[0]["time"] > 1.7e9


def test_what_is_not_finite_is_null_because_json_has_no_word_for_it(tmp_path: Path) -> None:
    jsonl(tmp_path).log(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert rows(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.0}]


def test_ranks_other_than_the_first_write_nothing(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path / "run", is_main=False)
    tracker.log(1, {"a": 1.0})
    tracker.table("t", ["a"], [[1.0]])
    tracker.finish()
    assert not (tmp_path / "run").exists()


def test_a_resumed_curve_has_no_doubles(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path)
    for step in (10, 20, 30):
        tracker.log(step, {"train/loss": float(step)})
        tracker.log(step, {"val/acceptance_length": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "tra')  # killed while writing
    tracker = jsonl(tmp_path, resume_step=20)
    # As the training loop does: it validates the step it goes on from, then takes later ones.
    tracker.log(20, {"val/acceptance_length": 20.5})
    tracker.log(30, {"train/loss": 30.5})
    assert rows(tmp_path) == [
        {"step": 10, "train/loss": 10.0},
        {"step": 10, "val/acceptance_length": 10.0},
        {"step": 20, "train/loss": 20.0},
        {"step": 20, "val/acceptance_length": 20.5},
        {"step": 30, "train/loss": 30.5},
    ]


def test_a_finished_run_that_is_resumed_has_its_table_once(tmp_path: Path) -> None:
    for value, resume_step in ((1.0, None), (2.0, 10)):
        tracker = jsonl(tmp_path, resume_step)
        tracker.log(10, {"val/acceptance_length": value})
        tracker.table("validation", ["a"], [[value]])
    assert [row.get("rows", row.get("val/acceptance_length")) for row in rows(tmp_path)] == [
        2.0,
        [[2.0]],
    ]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_afresh(tmp_path: Path) -> None:
    jsonl(tmp_path).log(0, {"a": 1.0})
    jsonl(tmp_path).log(0, {"a": 2.0})
    assert rows(tmp_path) == [{"step": 0, "a": 2.0}]


def test_metrics_that_are_not_ours_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("step,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: Invalid JSON"):
        jsonl(tmp_path, resume_step=3)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tracker\.mode must be one of auto, online, offline"):
        wandb_choice(mode="of")


def test_the_yaml_choices_have_exactly_the_fields() -> None:
    conf = ROOT / "conf/tracker"
    for file, cls in (
        ("none", JsonlTrackerConfig),
        ("wandb", WandbConfig),
        ("tensorboard", TensorboardConfig),
    ):
        values = yaml.safe_load((conf / f"{file}.yaml").read_text())
        assert values.pop("_target_") == f"drafttrain.runtime.tracker.{cls.__name__}"
        assert cls(**values).name == file


def test_the_real_client_writes_config_curves_and_table_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    run_id = None
    for resume_step in (None, 20):  # a new run, then the same one resumed
        tracker = open_tracker(
            wandb_choice(mode="auto"),
            tmp_path,
            config=CONFIG,
            resume_step=resume_step,
            is_main=True,
        )
        place = (tmp_path / "wandb/latest-run").resolve()
        assert f"upload later, if you like, with: wandb sync {tmp_path}" in capsys.readouterr().out
        tracker.log(30, {"train/loss": 2.5, "train/lr": 0.5})
        tracker.log(30, {"val/acceptance_length": 1.75})
        tracker.log(40, {"train/loss": 2.0, "train/lr": 0.25})
        tracker.table("validation", ["prompt", "acceptance_length"], [["a", 2.0], ["b", 1.5]])
        tracker.finish()
        (file,) = place.glob("*.wandb")
        config, history, run = mirrored(file)
        assert config["trainer"] == CONFIG["trainer"]
        assert (run.display_name, run.project, list(run.tags)) == ("first", "drafttrain", ["tiny"])
        assert run_id in (None, run.run_id)  # the same run goes on
        run_id = run.run_id
        assert history[0] == {
            "_step": 30, "train/loss": 2.5, "train/lr": 0.5, "val/acceptance_length": 1.75,
        }  # fmt: skip
        last = history[-1]
        assert (last["_step"], last["train/loss"], last["train/lr"]) == (40, 2.0, 0.25)
        assert last["validation/_type"] == "table-file"
        # Nothing is left elsewhere: the folder can be uploaded from.
        staged = [r.artifact.manifest.contents for r in records(file) if r.HasField("artifact")]
        assert staged[0][0].local_path.startswith(str(tmp_path))
        (table,) = (place / "files/media/table").glob("*.json")
        content = json.loads(table.read_text())
        assert content["columns"] == ["prompt", "acceptance_length"]
        assert content["data"] == [["a", 2.0], ["b", 1.5]]
    assert len(rows(tmp_path)) == 4
    assert capsys.readouterr().out == ""


def test_a_mirror_that_fails_costs_a_warning_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = open_tracker(wandb_choice(), tmp_path, config=CONFIG, resume_step=None, is_main=True)
    tracker.log(1, {"a": 1.0})
    capsys.readouterr()
    tracker.table("uneven", ["a", "b"], [[1.0]])  # the client refuses it
    tracker.table("uneven too", ["a", "b"], [[1.0]])
    tracker.log(2, {"a": 2.0})
    tracker.log(3, {"a": 3.0})
    tracker.finish()
    output = capsys.readouterr().out
    assert output.count("tracker=wandb stopped:") == 1
    assert "metrics.jsonl is still written" in output
    assert [row["step"] for row in rows(tmp_path)] == [1, 1, 1, 2, 3]


def test_one_that_cannot_start_online_writes_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.delenv("WANDB_MODE")
    tracker = open_tracker(wandb_choice("auto"), tmp_path, config=CONFIG)
    warning, where = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"tracker=wandb could not start online: .*40.*\. It writes offline instead\.", warning
    )
    assert where.startswith("wandb: offline; upload later")
    tracker.log(1, {"a": 1.0})
    tracker.finish()
    (file,) = (tmp_path / "wandb/latest-run").resolve().glob("*.wandb")
    assert mirrored(file)[1] == [{"_step": 1, "a": 1.0}]


def test_one_that_cannot_start_at_all_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wandb.init", lambda **_: 1 / 0)
    for choice in (wandb_choice("online"), wandb_choice("offline")):
        tracker = open_tracker(choice, tmp_path, config=CONFIG, append=True)
        tracker.log(1, {"a": 1.0})
        tracker.finish()
        told = capsys.readouterr().out.splitlines()
        assert told[-1] == (
            "tracker=wandb stopped: division by zero. metrics.jsonl is still written."
        )
    assert len(rows(tmp_path)) == 2


def test_a_disabled_client_takes_everything_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = open_tracker(wandb_choice("auto"), tmp_path, config=CONFIG)
    tracker.log(1, {"a": 1.0})
    tracker.table("t", ["a"], [[1.0]])
    tracker.keep("report/default", "report", report_files(tmp_path))
    tracker.pictures("report/default", drawn)
    tracker.finish()
    assert capsys.readouterr().out == ""
    assert list(tmp_path.rglob("*.wandb")) == []


def drawn() -> dict[str, np.ndarray]:
    picture = np.zeros((4, 6, 3), dtype=np.uint8)
    picture[:2] = (37, 99, 201)
    return {"Speedup by task": picture}


def test_pictures_are_drawn_for_a_mirror_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, np.ndarray]:
        raise OSError("no font")

    jsonl(tmp_path / "a").pictures("report/default", broken)
    assert capsys.readouterr().out == ""
    tracker = open_tracker(wandb_choice(), tmp_path / "b", config=CONFIG)
    capsys.readouterr()
    tracker.pictures("report/default", broken)
    assert capsys.readouterr().out.startswith("tracker=wandb stopped: no font. metrics.jsonl is")


def report_files(folder: Path) -> list[Path]:
    place = folder / "evaluations" / "default"
    place.mkdir(parents=True)
    for name in ("report.json", "report.md", "report.html"):
        (place / name).write_text(f"<svg>{name}</svg>")
    return sorted(place.iterdir())


def test_reports_and_drafters_are_artifacts_and_pages_can_be_looked_at(tmp_path: Path) -> None:
    files = report_files(tmp_path)
    tracker = open_tracker(wandb_choice(), tmp_path, config=CONFIG, resume_step=None, is_main=True)
    tracker.keep("report/default", "report", files)
    (tmp_path / "drafter.safetensors").write_bytes(b"weights")
    tracker.keep("drafter-a b", "drafter", [tmp_path / "drafter.safetensors"])
    tracker.pictures("report/default", drawn)
    tracker.table("odd", ["name"], [["a\nb\u202e"]])
    tracker.finish()
    place = (tmp_path / "wandb/latest-run").resolve()
    (file,) = place.glob("*.wandb")
    _, history, _ = mirrored(file)
    assert any(row.get("report/default/_type") == "html-file" for row in history)
    (image,) = [row for row in history if "report/default/Speedup by task/_type" in row]
    assert image["report/default/Speedup by task/_type"] == "image-file"
    (png,) = place.glob("files/media/images/report/default/*.png")
    assert (255 * imread(png)[0, 0, :3]).round().tolist() == [37, 99, 201]
    found = {r.artifact.name: r.artifact for r in records(file) if r.HasField("artifact")}
    kept = {name: artifact.type for name, artifact in found.items() if "run-" not in name}
    assert kept == {"report-default": "report", "drafter-a-b": "drafter"}
    listed = [entry.path for entry in found["report-default"].manifest.contents]
    assert sorted(listed) == ["report.html", "report.json", "report.md"]
    (entry,) = found["drafter-a-b"].manifest.contents
    assert entry.local_path == str(tmp_path / "drafter.safetensors"), "no copy of the weights"
    tables = [json.loads(file.read_text()) for file in place.glob("files/media/table/*.json")]
    assert tables[0]["data"] == [["a b\\u202e"]]


def tensorboard(folder: Path, resume_step: int | None = None, append: bool = False) -> Tracker:
    return open_tracker(
        TensorboardConfig(name="tensorboard"),
        folder,
        config=CONFIG,
        resume_step=resume_step,
        is_main=True,
        append=append,
    )


def test_tensorboard_has_every_curve_once_and_the_reports_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = tensorboard(tmp_path)
    for step in (10, 20, 30):
        first.log(step, {"train/loss": 100.0 / step})
        first.log(step, {"val/acceptance_length": 2.0})
    first.finish()
    resumed = tensorboard(tmp_path, resume_step=20)
    resumed.log(20, {"val/acceptance_length": 2.0})  # it validates once more
    resumed.log(30, {"train/loss": 7.0})
    resumed.table("validation", ["prompt", "length"], [["a|b", 1.5], ["c", None]])
    resumed.finish()
    evaluation = tensorboard(tmp_path, append=True)
    evaluation.keep("report/default", "report", report_files(tmp_path))
    evaluation.pictures("report/default", drawn)
    evaluation.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert curve == [(10, 10.0), (20, 5.0), (30, 7.0)]
    assert [event.step for event in events.Scalars("val/acceptance_length")] == [10, 20]
    (picture,) = events.Images("report/default/Speedup by task")
    assert (picture.step, picture.width, picture.height) == (30, 6, 4)
    shown = imread(io.BytesIO(picture.encoded_image_string))
    assert (255 * shown[0, 0]).round().tolist() == [37, 99, 201]
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[0].tensor_proto.string_val[0]
        for tag in events.Tags()["tensors"]
    }
    assert texts["validation"] == b"| prompt | length |\n| --- | --- |\n| a\\|b | 1.5 |\n| c |  |"
    assert texts["report/default"] == b"<svg>report.md</svg>"
    assert texts["config"].startswith(b"```yaml\nrun:\n  name: first\ntrainer:\n  lr: 0.5\n")
    assert [row["step"] for row in rows(tmp_path)] == [10, 10, 20, 20, 30, 30]


def test_a_run_that_starts_afresh_hides_the_events_of_the_one_before(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):  # killed before its first checkpoint, then run once more
        tracker = tensorboard(tmp_path)
        tracker.log(0, {"train/loss": value})
        tracker.finish()
        time.sleep(1.1)  # the names of event files have seconds
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [2.0]


def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tracker=tensorboard needs .*drafttrain\[tensorboard\]"):
        tensorboard(tmp_path)
