"""A checkpoint is whole or absent, damage is named, and a resumed run goes on bitwise.

Run as a script, this file saves checkpoints in processes that are killed, or may not write more.
"""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import PYTHONPATH
from test_engine import assert_same_curve, make_engine, train, weights
from test_ranks import run_ranks

from drafttrain.runtime.disk import write_whole
from drafttrain.training import checkpoint
from drafttrain.training.checkpoint import (
    CheckpointError,
    Checkpoints,
    TrainState,
    load_state,
    load_weights,
    verify,
)


def state_at(step: int, best_metric: float | None = None) -> TrainState:
    data = {"epoch": 1, "order": [3, 1, 2]}
    return TrainState(step, 100 * step, data, best_metric, "fingerprint", {"drafter": "eagle3"})


def saved(folder: Path, steps: list[int], best: int, keep: int = 2) -> Checkpoints:
    checkpoints, engine = Checkpoints(folder, keep), make_engine("none")
    for step in steps:
        checkpoints.save(engine, state_at(step), best=step == best)
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_that_a_run_drops_while_it_is_read_is_read_from_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, [1, 2], best=1, keep=1)
    real = {name: getattr(checkpoint, name) for name in ("load_state", "load_weights")}
    for number, name in enumerate(real):

        def drops(folder: Path, name: str = name, step: int = 5 + number) -> Any:
            monkeypatch.setattr(checkpoint, name, real[name])
            checkpoints.save(make_engine("none"), state_at(step), best=True)
            assert not folder.exists()
            return real[name](folder)

        monkeypatch.setattr(checkpoint, name, drops)
        found = Checkpoints(tmp_path, 1).load_chosen()
        assert found is not None
        assert found[:2] == (tmp_path / f"step-00000{5 + number}", state_at(5 + number))
    (tmp_path / "step-000006" / "drafter.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="must have the"):
        Checkpoints(tmp_path, 1).load_chosen()


def test_the_best_is_not_mistaken_while_a_run_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, [1, 2, 3], best=1, keep=1)
    real = Checkpoints._names

    def names(self: Checkpoints) -> list[str]:  # after the index was read
        monkeypatch.setattr(Checkpoints, "_names", real)
        checkpoints.save(make_engine("none"), state_at(4), best=True)
        checkpoints.save(make_engine("none"), state_at(5), best=False)
        return real(self)

    monkeypatch.setattr(Checkpoints, "_names", names)
    found = Checkpoints(tmp_path, 1).load_chosen()
    assert found is not None
    assert found[0].name == "step-000004"


def test_a_file_that_another_command_removes_meanwhile_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "gone")  # as between its listing and its opening
    write_whole(tmp_path / "config.yaml", "text")
    assert (tmp_path / "config.yaml").read_text() == "text"


@pytest.mark.parametrize("name", ["none", "zero1"])
def test_a_resumed_run_goes_on_bitwise(name: str, tmp_path: Path) -> None:
    engine = make_engine(name)
    train(engine, 4, steps=3)
    Checkpoints(tmp_path, 2).save(engine, state_at(3, 2.5), best=True)
    expected = train(engine, 4, steps=3, first=3)
    resumed = make_engine(name)
    train(resumed, 4, steps=1)  # its own weights and moments must not matter
    assert Checkpoints(tmp_path, 2).resume(resumed) == state_at(3, 2.5)
    assert train(resumed, 4, steps=3, first=3) == expected
    for key, value in weights(engine).items():
        assert torch.equal(weights(resumed)[key], value), key


def test_nothing_saved_is_nothing_to_resume(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none", 2)
    assert checkpoints.latest() is None
    assert checkpoints.best() is None
    assert checkpoints.resume(make_engine("none")) is None


def test_weights_and_state_can_be_read_without_an_engine(tmp_path: Path) -> None:
    engine = make_engine("none")
    Checkpoints(tmp_path, 2).save(engine, state_at(7), best=False)
    loaded = load_weights(tmp_path / "step-000007")
    assert loaded.keys() == weights(engine).keys()  # buffers too
    for key, value in weights(engine).items():
        assert torch.equal(loaded[key], value), key
    assert load_state(tmp_path / "step-000007") == state_at(7)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, steps=[10, 20, 30, 40, 50], best=20)
    assert names(tmp_path) == ["index.json", "step-000020", "step-000040", "step-000050"]
    assert checkpoints.latest() == tmp_path / "step-000050"
    assert checkpoints.best() == tmp_path / "step-000020"
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["latest"] == "step-000050"
    assert index["best"] == "step-000020"
    saved(tmp_path, steps=[1_000_000], best=0, keep=1)  # sorted by number, not by letters
    assert names(tmp_path) == ["index.json", "step-000020", "step-1000000"]


def test_coming_by_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, steps=[10, 20], best=20)
    engine = make_engine("none")
    train(engine, 8, steps=1)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(engine, state_at(20), best=False)
    assert names(tmp_path) == ["index.json", "step-000010", "step-000020-2"]
    assert checkpoints.latest() == checkpoints.best() == tmp_path / "step-000020-2"
    assert torch.equal(
        load_weights(tmp_path / "step-000020-2")["head.weight"], weights(engine)["head.weight"]
    )


def test_without_an_index_the_newest_is_the_latest(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, steps=[10, 20], best=10)
    shutil.rmtree(tmp_path / "step-000020")  # what the message of a damaged one proposes
    assert checkpoints.latest() == tmp_path / "step-000010"
    checkpoints.save(make_engine("none"), state_at(10, 2.5), best=True)
    (tmp_path / "index.json").unlink()  # as where the first save was killed before it wrote one
    assert checkpoints.latest() == tmp_path / "step-000010-2"
    assert checkpoints.best() is None
    engine = make_engine("none")
    resumed = Checkpoints(tmp_path, 2).resume(engine)
    assert resumed is not None
    assert resumed.best_metric is None  # so that the validation of this step is called the best


@pytest.mark.parametrize("file", ["drafter.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_file_is_refused_by_name(file: str, damage: str, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, steps=[10, 20], best=20)
    path = tmp_path / "step-000020" / file
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-20])
    elif damage == "flip":
        place = content.find(b"2000") if file == "state.json" else len(content) // 2
        content[place] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    engine = make_engine("none")
    before = weights(engine)
    expected = (
        rf"step-000020/{file} must .*; run.resume=true run.skip_damaged=true resumes from the "
        r"newest whole checkpoint, as removing \S+step-000020 would"
    )
    with pytest.raises(CheckpointError, match=expected):
        checkpoints.resume(engine)
    assert all(torch.equal(before[key], value) for key, value in weights(engine).items())
    if file == "drafter.safetensors":
        with pytest.raises(CheckpointError, match=expected):
            load_weights(tmp_path / "step-000020")
    if file == "optimizer.safetensors":
        load_weights(tmp_path / "step-000020")  # evaluation does not need it
    skipping = Checkpoints(tmp_path, 2, skip_damaged=True)
    assert skipping.resume(engine) == state_at(10)
    assert len(skipping.skipped) == 1
    assert re.match(rf"\S+step-000020/{file} must ", skipping.skipped[0])
    assert torch.equal(
        weights(engine)["head.weight"], load_weights(tmp_path / "step-000010")["head.weight"]
    )
    # The run comes by the damaged one again, and replaces it.
    skipping.save(engine, state_at(20), best=False)
    assert names(tmp_path) == ["index.json", "step-000010", "step-000020-2"]
    verify(tmp_path / "step-000020-2")


@pytest.mark.parametrize("file", ["drafter.safetensors", "optimizer.safetensors", "state.json"])
def test_no_flipped_bit_goes_unnoticed(file: str, tmp_path: Path) -> None:
    saved(tmp_path, steps=[20], best=20)
    path = tmp_path / "step-000020" / file
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), 1 if file == "state.json" else 97):
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"step-000020/{file} must"):
            verify(tmp_path / "step-000020")
        content[place] ^= 1 << place % 8


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_index_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    saved(tmp_path, steps=[10, 20], best=10)
    path = tmp_path / "index.json"
    content = bytearray(path.read_bytes())
    places = range(len(content)) if damage == "flip" else [0]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1
        if damage == "remove":
            path.unlink()
        else:
            path.write_bytes(damaged if damage == "flip" else content[:-9])
        with pytest.raises(
            CheckpointError, match=r"index\.json must .*run\.skip_damaged=true resumes"
        ):
            Checkpoints(tmp_path, 2).resume(make_engine("none"))
    skipping, engine = Checkpoints(tmp_path, 2, skip_damaged=True), make_engine("none")
    assert skipping.resume(engine) == state_at(20)  # whose best metric is None, as none is best
    assert "index.json must" in skipping.skipped[0]
    assert skipping.best() is None
    skipping.save(engine, state_at(30), best=True)
    assert skipping.best() == tmp_path / "step-000030"


def test_where_every_checkpoint_is_damaged_there_is_nothing_to_skip_to(tmp_path: Path) -> None:
    saved(tmp_path, steps=[10, 20], best=20)
    for path in tmp_path.glob("step-*/drafter.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"must hold a whole checkpoint, but every one is d"):
        Checkpoints(tmp_path, 2, skip_damaged=True).resume(make_engine("none"))


def test_another_drafter_is_refused_by_what_differs(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, steps=[10], best=10)
    engine = make_engine("none")
    engine.module.mix = torch.nn.Linear(12, 14)
    with pytest.raises(CheckpointError, match=r"must fit the drafter, got: mix.weight is"):
        checkpoints.resume(engine)


def test_a_full_disk_is_said_plainly_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, steps=[10], best=10)
    before = names(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    expected = r"no checkpoint could be written .* the disk is full .*\(step-000010 is intact"
    with pytest.raises(CheckpointError, match=expected):
        checkpoints.save(make_engine("none"), state_at(20), best=True)
    assert names(tmp_path) == before
    assert checkpoints.latest() == tmp_path / "step-000010"


def run_script(task: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, __file__, task, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_before_any_line_of_saving_there_is_a_whole_checkpoint(tmp_path: Path) -> None:
    points, old, new = run_script("kill", tmp_path).split()
    assert int(points) > 60  # as many times it was killed
    assert int(old) > 20  # and the earlier checkpoint was found,
    assert int(new) > 5  # or the later one


@pytest.mark.slow
def test_a_file_that_cannot_grow_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    message = run_script("limit", tmp_path)
    assert "no checkpoint could be written" in message
    assert "File too large" in message
    assert "step-000001 is intact" in message


@pytest.mark.slow
def test_ranks_share_the_fate_of_the_first(tmp_path: Path) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where the folder should be")
    outputs = run_ranks(f"fail {blocked}", script=__file__)
    assert outputs[0] == outputs[1]
    assert "no checkpoint could be written" in outputs[0]


@pytest.mark.slow
def test_two_sharded_ranks_save_what_one_plain_rank_resumes(tmp_path: Path) -> None:
    expected = make_engine("none")
    train(expected, 8, steps=3)
    run_ranks(f"sharded {tmp_path}", script=__file__)
    resumed = make_engine("none")
    assert Checkpoints(tmp_path, 2).resume(resumed) == state_at(3)
    curve = train(resumed, 8, steps=3, first=3)
    assert_same_curve(curve, train(expected, 8, steps=3, first=3), rel=5e-6)


def kill_at_every_line(folder: Path) -> None:
    """Print how often a save was killed, and how often the old and the new one was there after."""
    os.fsync = lambda descriptor: None  # slow, and no test cuts the power
    engine = make_engine("none")
    saved(folder / "start", steps=[1], best=1, keep=1)
    old = load_weights(folder / "start/step-000001")
    train(engine, 8, steps=1)
    found = {1: 0, 2: 0}
    for point in range(10_000):
        copy = folder / "copy"
        shutil.copytree(folder / "start", copy)
        checkpoints = Checkpoints(copy, 1)
        child = os.fork()
        if child == 0:
            die_at_line(point)
            checkpoints.save(engine, state_at(2), best=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        latest, best = checkpoints.latest(), checkpoints.best()
        assert latest is not None, point
        assert best is not None, point
        for visible in copy.glob("step-*"):  # latest and best among them
            verify(visible)
        step = load_state(latest).step
        expected = old if step == 1 else weights(engine)
        assert torch.equal(load_weights(latest)["head.weight"], expected["head.weight"]), point
        if point % 5 == 0:  # what was left behind is no hindrance
            checkpoints.save(engine, state_at(3), best=True)
            assert names(copy) == ["index.json", "step-000003"], (point, names(copy))
        shutil.rmtree(copy)
        if not os.WIFSIGNALED(status):
            break
        found[step] += 1
    print(point, found[1], found[2])


SAVING = ("checkpoint.py", "disk.py", "engine.py", "optim.py")


def die_at_line(point: int) -> None:
    """Kill this process before the `point`-th line, as they come, of the modules that save."""
    seen = set()

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith(SAVING):
            return None
        if event == "line":
            seen.add((frame.f_code, frame.f_lineno))
            if len(seen) > point:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def save_under_a_limit(folder: Path) -> None:
    checkpoints = saved(folder, steps=[1], best=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        checkpoints.save(make_engine("none"), state_at(2), best=True)
    except CheckpointError as error:
        print(error)
    assert names(folder) == ["index.json", "step-000001"], names(folder)


def main() -> None:
    """Do what the first argument says, in the folder of the second."""
    task, folder = " ".join(sys.argv[1:]).split(" ")
    if task == "kill":
        kill_at_every_line(Path(folder))
    elif task == "limit":
        save_under_a_limit(Path(folder))
    elif task == "fail":
        try:
            Checkpoints(Path(folder), 2).save(make_engine("none"), state_at(1), best=True)
        except CheckpointError as error:
            print(error)
    elif task == "sharded":
        engine = make_engine("zero2")
        train(engine, 2, steps=3)
        Checkpoints(Path(folder), 2).save(engine, state_at(3), best=True)


if __name__ == "__main__":
    main()
