"""A drafter that others published on the Hub, by its name there: drafter.path=owner/name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

import drafttrain
from drafttrain.commands.setup.init_from import starting_point
from drafttrain.commands.setup.members import member_of
from drafttrain.config.compose import compose, load_choice, typed
from drafttrain.config.overrides import UsageError
from drafttrain.config.sections import TrainConfig
from drafttrain.formats.read.admit import AdmittedConfig
from drafttrain.runtime.run_folder import is_repo
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


def config(path: str, revision: str | None = None) -> AdmittedConfig:
    return AdmittedConfig(
        name="theirs", path=path, revision=revision, layers=None, allow_pickle=False
    )


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


def test_a_revision_pins_a_repository_and_no_folder(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "models--ada--drafter" / "refs" / "v2").write_text("1" * 40)
    older = cache.parent / ("1" * 40)
    older.mkdir()
    (older / "config.json").write_text("{}")
    assert config("ada/drafter", "v2").served_from == older
    Path("mine").mkdir()
    with pytest.raises(ValueError, match=r"drafter\.revision must be null for the folder mine"):
        _ = config("mine", "v2").served_from


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(cache: Path) -> None:
    """outputs/demmo beside outputs/demo: whoever has a folder `outputs` means a path in it."""
    Path("outputs").mkdir()
    assert not is_repo("outputs/demmo")
    assert is_repo("ada/drafter")
    assert not is_repo("a" * 200 + "/drafter")


def test_training_starts_from_a_repository_of_the_hub(cache: Path) -> None:
    told = ["data=jsonl", "data.path=chats.jsonl", "run.init_from=ada/drafter"]
    settings = typed(compose("train", [*told, "drafter.revision=main"]), TrainConfig)
    assert isinstance(settings.drafter, AdmittedConfig)
    assert (settings.drafter.path, settings.drafter.revision) == ("ada/drafter", "main")
    assert settings.run.name == "drafter-adapted"
    settings = typed(compose("train", [*told, "drafter=eagle"]), TrainConfig)
    with pytest.raises(ValueError, match=rf"run\.init_from={cache} must hold .*weights"):
        starting_point(settings)  # its files were read, and hold no drafter
    with pytest.raises(UsageError, match=r"a repository of the Hub \(owner/name\)"):
        compose("train", [*told[:2], "run.init_from=missing"])


def test_a_member_of_an_ensemble_may_be_a_repository(cache: Path) -> None:
    _, member = member_of("ada/drafter", None)
    assert isinstance(member, AdmittedConfig)
    assert (member.name, member.served_from) == ("drafter", cache)
    with pytest.raises(ValueError, match="repositories of the Hub"):
        member_of("missing", None)


@pytest.mark.usefixtures("stand_ins")
def test_load_drafter_takes_a_repository(cache: Path) -> None:
    target = SimpleNamespace(config=load_choice("model", "tiny"))
    with pytest.raises(ValueError, match=rf"drafter\.path={cache} must hold .*weights"):
        drafttrain.load_drafter("ada/drafter", target)  # type: ignore[arg-type]
