"""Ranks that would train different things are stopped before they train, and the cause is named."""

import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from lives import settings, write_conversations

import drafttrain
from drafttrain.__main__ import main
from drafttrain.runtime import ranks
from drafttrain.runtime.rank_process import ERROR_FILE, LAUNCHER, STORE


def _rank(rank: int, folder: Path, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {LAUNCHER: str(os.getppid()), STORE: str(folder / "store")}
    os.environ[ERROR_FILE] = str(folder / f"error{rank}.json")
    sys.stdout = sys.stderr = io.StringIO()
    if (folder / str(rank)).is_dir():  # a disk of its own
        os.chdir(folder / str(rank))
        drafttrain.__version__ = (folder / str(rank) / "version").read_text()
    torch.set_num_threads(1)
    sys.exit(main(arguments))


def error_of(folder: Path, *arguments: list[str]) -> str:
    """Run a command line as each of two ranks; return their error. A fork imports nothing again."""
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_rank, args=(rank, folder, command))
        for rank, command in enumerate(arguments)
    ]
    for rank in processes:
        rank.start()
    for rank in processes:
        rank.join(60)
    errors = [json.loads((folder / f"error{n}.json").read_text())["message"] for n in (0, 1)]
    assert [rank.exitcode for rank in processes] == [2, 2], errors
    assert errors[0] == errors[1]
    return errors[0]


def test_ranks_with_other_settings_do_not_train(tmp_path: Path) -> None:
    write_conversations(tmp_path / "data.jsonl")
    command = settings(tmp_path / "run", tmp_path / "data.jsonl")
    error = error_of(tmp_path, command, [*command, "run.seed=77"])
    said = "run.seed must be the same on every rank, got 0 on rank 0 and 77 on rank 1; start every"
    assert error.startswith(said)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def disks(tmp_path: Path, tiny_target_dir: Path) -> Path:
    """A folder with a disk for each rank: conversations, a version of the package, a target."""
    for rank in "01":
        shutil.copytree(tiny_target_dir, tmp_path / rank / "target")
        write_conversations(tmp_path / rank / "data.jsonl")
        (tmp_path / rank / "version").write_text("1.0")
    return tmp_path


COMMAND = settings(Path("../run"), Path("data.jsonl"), "model.path=target")


def test_ranks_with_other_weights_do_not_train(disks: Path) -> None:
    weights = disks / "1" / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    error = error_of(disks, COMMAND, COMMAND)
    assert error.startswith("the target's fingerprint must be the same on every rank, got ")


def test_ranks_of_other_versions_do_not_train(disks: Path) -> None:
    (disks / "1" / "version").write_text("2.0")
    (disks / "1" / "target" / "model.safetensors").unlink()
    error = error_of(disks, COMMAND, COMMAND)
    said = "the version of drafttrain must be the same on every rank, got 1.0 on rank 0 and 2.0"
    assert error.startswith(said)


def test_ranks_with_other_settings_do_not_capture(disks: Path) -> None:
    command = ["capture", "model.path=target", "data=jsonl", "data.path=data.jsonl"]
    command += ["hardware=cpu", "hardware.threads=1", "store.dir=store"]
    error = error_of(disks, command, [*command, "drafter=medusa"])
    assert error.startswith("drafter._target_ must be the same on every rank, got drafttrain.")
    assert not (disks / "0" / "store").exists()


def test_a_rank_whose_peer_does_not_come_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wait(*_: object, **__: object) -> None:
        time.sleep(0.3)
        raise torch.distributed.DistStoreError("timed out")

    monkeypatch.setattr(ranks, "LATE_S", 0.01)
    monkeypatch.setattr(torch.distributed, "init_process_group", wait)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "99"}.items():
        monkeypatch.setenv(name, value)
    said = r"rank 1 of 2 waits for the others; each must be started, .* and MASTER_PORT=99"
    with pytest.raises(ranks.LostRankError, match=said + r" \(timed out\)"):
        ranks._join("cpu")
    assert re.fullmatch(said + "\n", capsys.readouterr().err)
