"""Whatever a run's folder records of its checkpoints and results, it is read or refused."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from fences import FUZZ, Fence, damaged, edited, fence
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import make_engine, saved
from test_compare_runs import results, write_run

from drafttrain.commands.setup.target_and_drafter import recorded_spec
from drafttrain.core.types import DecodeStats, PromptResult
from drafttrain.evaluation.measurements import Measurements
from drafttrain.evaluation.tune_choice import TUNED, read_tuned
from drafttrain.report.runs import read_run
from drafttrain.runtime.disk import digest_of
from drafttrain.runtime.run_folder import load_config
from drafttrain.target.model import load_target
from drafttrain.training.checkpoint import Checkpoints
from drafttrain.training.engine.engine import Engine

__all__ = ["fence"]

pytestmark = pytest.mark.slow

RESULT = PromptResult("id", 0, "task", "ngram", 0, 3, (1, 2), DecodeStats(cycles=[(0, 1, 1)]))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    saved(folder, steps=[10, 20], best=10)
    return folder


@pytest.fixture(scope="session")
def engine() -> Engine:
    return make_engine("none")


def sign(plain: dict[str, Any]) -> None:
    plain.pop("sha256", None)
    plain["sha256"] = digest_of(plain)


@FUZZ
@given(data=st.data())
def test_states_and_indexes_of_checkpoints(
    fence: Fence, run: Path, engine: Engine, data: st.DataObject
) -> None:
    folder = fence.fresh()
    shutil.copytree(run, folder, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(("index.json", "step-000020/state.json")))
    plain = json.loads((folder / name).read_text())
    (folder / name).write_bytes(data.draw(damaged(edited(plain, sign=sign))))
    skip = data.draw(st.booleans())
    fence.holds(lambda: Checkpoints(folder, 2, skip_damaged=skip).resume(engine))
    fence.holds(lambda: Checkpoints(folder, 2).load_chosen())


@FUZZ
@given(data=st.data())
def test_journals_of_evaluations(fence: Fence, data: st.DataObject) -> None:
    folder = fence.fresh()
    journal = Measurements(folder, "x", {"a": 1})
    line = {"key": [0, 1], "results": [asdict(RESULT)]}
    lines = [data.draw(damaged(edited(line))) for _ in range(data.draw(st.integers(1, 3)))]
    with journal.file.open("ab") as stream:
        stream.write(b"\n".join(lines) + data.draw(st.sampled_from((b"\n", b""))))
    fence.holds(lambda: Measurements(folder, "x", {"a": 1}))


@FUZZ
@given(data=st.data())
def test_what_tune_chose(fence: Fence, data: st.DataObject) -> None:
    folder = fence.fresh()
    one = {"all": {"depth": 4, "speedup": 1.5}, "tasks": {"math": {"depth": 2}}}
    plain = {"batches": {"1": one, "8": {"all": {"depth": 2}}}}
    (folder / TUNED).write_bytes(data.draw(damaged(edited(plain))))
    fence.holds(lambda: read_tuned(folder, 4))


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_run(tmp_path_factory.mktemp("runs") / "a", results())
    file = Path(folder) / "evaluations" / "default" / "report.json"
    plain = json.loads(file.read_text())
    return plain | {"measurements": plain["measurements"][:2] + plain["measurements"][-2:]}


@FUZZ
@given(data=st.data())
def test_reports(fence: Fence, report: dict[str, Any], data: st.DataObject) -> None:
    folder = fence.fresh()
    place = folder / "evaluations" / "default"
    place.mkdir(parents=True)
    (place / "report.json").write_bytes(data.draw(damaged(edited(report))))
    fence.holds(lambda: read_run(folder, "a", "default"))


@pytest.fixture(scope="session")
def provenance(tiny_target_dir: Path) -> dict[str, Any]:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    return {"target": asdict(target.spec), "hardware": {"cpu": "x", "gpus": []}}


@FUZZ
@given(data=st.data())
def test_what_is_recorded_of_a_target(
    fence: Fence, provenance: dict[str, Any], data: st.DataObject
) -> None:
    folder = fence.fresh()
    (folder / "provenance.json").write_bytes(data.draw(damaged(edited(provenance))))
    fence.holds(lambda: recorded_spec(folder))


LINKED = (
    *("config.yaml", "provenance.json", "checkpoints", "checkpoints/index.json", "initial"),
    *("checkpoints/step-000010", "checkpoints/step-000020/state.json", "checkpoints/.leftover-x"),
    *("checkpoints/step-000020/drafter.safetensors", "evaluations", "evaluations/default"),
    *("evaluations/default/report.json", "export", "metrics.jsonl", "wandb"),
)


@FUZZ
@given(data=st.data())
def test_links_in_a_run(
    fence: Fence, run: Path, engine: Engine, report: dict[str, Any], data: st.DataObject
) -> None:
    folder = fence.fresh()
    (folder / "config.yaml").write_text("trainer: {}\n")
    shutil.copytree(run, folder / "checkpoints")
    (folder / "evaluations" / "default").mkdir(parents=True)
    (folder / "evaluations" / "default" / "report.json").write_text(json.dumps(report))
    for name in data.draw(st.lists(st.sampled_from(LINKED), min_size=1, max_size=3)):
        path = folder / name
        if any(parent.is_symlink() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        beside = "../" * len(path.relative_to(folder).parts)
        path.symlink_to(
            beside + data.draw(st.sampled_from(("victim.txt", "victims", "victim.json")))
        )
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    fence.holds(lambda: load_config(folder))
    fence.holds(lambda: read_run(folder, "a", "default"))
    fence.holds(checkpoints.load_chosen)
    fence.holds(lambda: checkpoints.resume(engine))
