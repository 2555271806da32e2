"""Files appear whole or not at all, and no link in a folder of others leads a writer elsewhere."""

import os
from pathlib import Path

import pytest
import torch

from drafttrain.runtime.disk import (
    DiskError,
    append_text,
    put_folder,
    require_writable,
    write_whole,
)
from drafttrain.runtime.journal import append_records
from drafttrain.target.store.shards import write_tensors


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim.txt"
    file.write_text("mine\n")
    return file


def test_a_link_under_a_name_that_can_be_guessed_is_not_followed(
    victim: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in (".a.json.tmp", "a.json.tmp", ".a.safetensors.tmp", "a.json", "a.safetensors"):
        (folder / name).symlink_to(victim)
    write_whole(folder / "a.json", "{}")
    write_tensors(folder / "a.safetensors", {"x": torch.zeros(1)})
    assert victim.read_text() == "mine\n"
    assert (folder / "a.json").read_text() == "{}"
    assert not (folder / "a.json").is_symlink()
    assert not (folder / "a.safetensors").is_symlink()


@pytest.mark.parametrize("append", [append_text, append_records])
def test_a_log_that_is_a_link_is_refused(append, victim: Path, tmp_path: Path) -> None:
    (tmp_path / "train.log").symlink_to(victim)
    with pytest.raises(DiskError, match=r"train\.log could not be written: it is a link, which"):
        append(tmp_path / "train.log", "theirs\n")
    assert victim.read_text() == "mine\n"


def test_what_is_written_is_read_by_whom_the_mask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "a", "\udcff")
    assert (tmp_path / "a").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_folder_takes_the_place_of_another_or_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(text: str) -> Path:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "a").write_text(text)
        return tmp_path / "made"

    folder = tmp_path / "folder"
    put_folder(made("first"), folder)
    put_folder(made("second"), folder)
    assert [file.read_text() for file in tmp_path.rglob("a")] == ["second"]
    replace = os.replace

    def refused(source: str, place: str, **folders: int) -> None:
        if source == "made":
            raise OSError("no")
        replace(source, place, **folders)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="no"):
        put_folder(made("third"), folder)
    assert (folder / "a").read_text() == "second"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("{}/victim.txt/run", r"victim\.txt is no folder; name another place"),
        ("{}/" + "x" * 300, r"File name too long; name another place"),
        ("/proc/x", r"/proc/x: No such file or directory; name another place"),
    ],
)
def test_a_place_that_takes_no_file_is_found_by_trying(
    place: str, said: str, victim: Path, tmp_path: Path
) -> None:
    folder = Path(place.format(tmp_path))
    with pytest.raises(ValueError, match=r"run\.dir must lie where files can be written.*" + said):
        require_writable(folder, "run.dir")
    assert list(tmp_path.iterdir()) == [victim]


def test_a_pipe_without_a_reader_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(DiskError, match=r"log could not be written: No such device"):
        append_text(tmp_path / "log", "x\n")
