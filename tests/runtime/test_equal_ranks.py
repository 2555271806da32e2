"""Ranks that would train different things are stopped before they train, and the cause is named."""

import io
import json
import multiprocessing
import os
import re
import shutil
import sys
from datetime import timedelta
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


@pytest.mark.parametrize(("rank", "absent"), [(0, "1, 3"), (2, "1, 3"), (1, "0")])
def test_a_rank_names_the_ranks_that_do_not_come(
    rank: int, absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True).port
    if absent != "0":
        opened = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True)
        for other in (0, 2):
            torch.distributed.PrefixStore("0", opened).set(str(other), "here")
    monkeypatch.setattr(ranks, "LATE_S", 0.5)
    monkeypatch.setattr(ranks, "STEP_TIMEOUT", timedelta(seconds=1))
    place = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    said = rf"rank {rank} of 4 waits for rank {absent}; each must be started, .* MASTER_PORT={port}"
    with pytest.raises(ranks.LostRankError, match=said):
        ranks._join("cpu")
    assert re.search(said + "\n", capsys.readouterr().err)
