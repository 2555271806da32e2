"""A link below a run, a store or an evaluation is refused, and nothing is done through one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_checkpoint import make_engine, saved, state_at

from drafttrain.__main__ import main
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import TrainConfig
from drafttrain.runtime import disk
from drafttrain.runtime.disk import LinkError, put_folder, refuse_links, remove, rename
from drafttrain.runtime.run_folder import write_config
from drafttrain.training.checkpoint import CheckpointError, Checkpoints, UnsavedError


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside of the run, with what this program would remove or replace in its own."""
    folder = tmp_path / "elsewhere"
    for name in ("step-000001", "step-000002", ".leftover-x"):
        (folder / name).mkdir(parents=True)
        (folder / name / "thesis.tex").write_text("mine")
    for name in ("report.json", "record.json", "index.json"):
        (folder / name).write_text("mine")
    return folder


def put_run(run: Path) -> None:
    """What commands read of a run before they look for links, and a checkpoint."""
    (run / "checkpoints/step-000004").mkdir(parents=True)
    config = typed(compose("train", [f"run.dir={run}", "run.name=old"]), TrainConfig)
    write_config(config, run / "config.yaml")
    (run / "provenance.json").write_text("{}")
    (run / "metrics.jsonl").touch()


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("checkpoints", ["train", "run.resume=true", "run.name=old"]),
        ("checkpoints/step-000001", ["train", "run.resume=true", "run.name=old"]),
        ("checkpoints/step-000004/more", ["train", "run.resume=true", "run.name=old"]),
        ("initial", ["train", "run.resume=true", "run.name=old"]),
        ("tensorboard", ["train", "run.resume=true", "run.name=old"]),
        ("wandb", ["train", "run.resume=true", "run.name=old"]),
        ("evaluations", ["evaluate"]),
        ("evaluations/default", ["evaluate", "eval.overwrite=true"]),
        ("evaluations/default/vllm", ["evaluate", "eval.overwrite=true"]),
        ("evaluations/default", ["tune"]),
        ("export", ["export", "export.overwrite=true"]),
    ],
)  # fmt: skip
def test_commands_refuse_a_run_with_a_link_in_it(
    name: str,
    words: list[str],
    elsewhere: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    if name == "checkpoints":
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "run" / name).symlink_to(elsewhere)
    before = content(elsewhere)
    assert main([words[0], "run.dir=run", *words[1:]]) == 2
    said = capsys.readouterr().err
    assert f"run/{name} must be a file or folder itself, got a link; put a copy there" in said
    assert content(elsewhere) == before


@pytest.mark.parametrize("name", ["config.yaml", "provenance.json", "metrics.jsonl"])
def test_a_linked_file_of_a_run_is_not_read(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    put_run(run)
    shutil.move(run / name, tmp_path / "there")
    (run / name).symlink_to(tmp_path / "there")
    assert main(["evaluate", f"run.dir={run}"]) == 2


def test_a_new_run_does_not_begin_in_a_folder_with_a_link(elsewhere: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "initial").symlink_to(elsewhere)
    before = content(elsewhere)
    assert main(["train", f"run.dir={tmp_path / 'run'}"]) == 2
    assert content(elsewhere) == before


def test_a_sweep_refuses_a_folder_with_a_link(elsewhere: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "logs").symlink_to(elsewhere)
    before = content(elsewhere)
    told = [f"hydra.sweep.dir={tmp_path / 'sweep'}", "run.seed=0,1"]
    assert main(["train", "--multirun", *told]) == 2
    assert content(elsewhere) == before


def test_a_link_in_the_path_of_a_run_is_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "scratch")
    (tmp_path / "run").symlink_to(tmp_path / "outputs" / "run")
    for run in (tmp_path / "outputs" / "run", tmp_path / "run"):
        refuse_links(run)
        saved(run / "checkpoints", steps=[10, 20, 30], best=10)
        assert Checkpoints(run / "checkpoints", 1).load_chosen() is not None


def test_wandb_keeps_links_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "latest-run").symlink_to("run-1")
    refuse_links(tmp_path / "run")


def test_a_pipe_in_a_run_is_refused(tmp_path: Path) -> None:
    disk.os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(LinkError, match=r"metrics\.jsonl must be .* got a special file"):
        refuse_links(tmp_path)


def outcomes(run: Path) -> dict[str, Callable[[], object]]:
    inner = run / "checkpoints"
    return {
        "remove": lambda: remove(inner / "step-000001", run),
        "remove below": lambda: remove(inner / "step-000001" / "thesis.tex", run),
        "rename": lambda: rename(inner / "step-000001", inner / "step-000009", run),
        "put": lambda: put_folder(inner / ".leftover-x", inner / "step-000001", run),
    }


@pytest.mark.parametrize("what", outcomes(Path()))
def test_nothing_is_removed_or_renamed_through_a_link(
    what: str, elsewhere: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(elsewhere)
    before = content(elsewhere)
    with pytest.raises(OSError, match="checkpoints"):
        outcomes(run)[what]()
    assert content(elsewhere) == before


def test_a_link_that_replaces_a_folder_at_the_last_moment_leads_nowhere(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rmtree = tmp_path / "run", shutil.rmtree
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    before = content(elsewhere)

    def swapped(name: str, **more: int) -> None:
        (run / "checkpoints").rename(run / "moved")
        (run / "checkpoints").symlink_to(elsewhere)
        rmtree(name, **more)

    monkeypatch.setattr(shutil, "rmtree", swapped)
    remove(run / "checkpoints" / "step-000001", run)
    assert content(elsewhere) == before
    assert not (run / "moved" / "step-000001").exists()


def test_a_link_is_removed_and_what_it_names_stays(elsewhere: Path, tmp_path: Path) -> None:
    before = content(elsewhere)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x").symlink_to(elsewhere)
    remove(tmp_path / "run" / "x", tmp_path)
    assert not (tmp_path / "run" / "x").is_symlink()
    assert content(elsewhere) == before


def test_a_checkpoint_that_becomes_a_link_stops_no_later_save(
    elsewhere: Path, tmp_path: Path
) -> None:
    folder, engine = tmp_path / "checkpoints", make_engine("none")
    saved(folder, steps=[4], best=4)
    (folder / "step-000001").symlink_to(elsewhere)
    (folder / ".leftover-y").symlink_to(elsewhere)
    before = content(elsewhere)
    checkpoints = Checkpoints(folder, 1)
    for step in (7, 8, 9):
        checkpoints.save(engine, state_at(step), best=True)
    assert [path.name for path in sorted(folder.glob("*step*"))] == ["step-000009"]
    assert content(elsewhere) == before
    (folder / "step-000005").symlink_to(elsewhere)
    with pytest.raises(LinkError, match="step-000005 must be a file or folder itself"):
        checkpoints.load_chosen()
    with pytest.raises(CheckpointError, match="step-000005 must be a file or folder itself"):
        Checkpoints(folder, 1).resume(engine)


def test_a_save_through_a_link_fails_and_touches_nothing(elsewhere: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(elsewhere)
    before = content(elsewhere)
    with pytest.raises(UnsavedError, match="checkpoints"):
        Checkpoints(tmp_path / "run" / "checkpoints", 1).save(
            make_engine("none"), state_at(7), best=True
        )
    assert content(elsewhere) == before
