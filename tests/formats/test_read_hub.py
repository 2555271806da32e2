"""A drafter that others published on the Hub, by its name there: drafter.path=owner/name."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from drafttrain.formats.read.admit import AdmittedConfig
from drafttrain.target.pretrained import hub


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub that holds ada/drafter; the Hub itself cannot be reached."""
    hub.download.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    repo, commit = tmp_path / "models--ada--drafter", "0" * 40
    folder = repo / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return folder


def config(path: str) -> AdmittedConfig:
    return AdmittedConfig(name="theirs", path=path, layers=None, allow_pickle=False)


def test_a_repository_of_the_hub_is_taken_from_its_local_copy(cache: Path) -> None:
    assert config("ada/drafter").served_from == cache


def test_a_folder_of_that_name_comes_first(cache: Path) -> None:
    Path("ada/drafter").mkdir(parents=True)
    assert config("ada/drafter").served_from == Path("ada/drafter")
    assert config("/models/missing").served_from == Path("/models/missing")


def test_a_repository_that_cannot_be_read_is_named_by_the_drafters_keys(cache: Path) -> None:
    with pytest.raises(
        ValueError, match=r"drafter=theirs: cannot reach .* point drafter\.path"
    ) as e:
        _ = config("ada/other").served_from
    assert "model." not in str(e.value)
