"""The run folder says what made it: commit, versions, hardware, command."""

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

import drafttrain
from drafttrain.runtime.run_folder import load_config, provenance, write_config


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in which the package seems to lie."""
    (tmp_path / "drafttrain").mkdir()
    module = tmp_path / "drafttrain" / "__init__.py"
    module.write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(drafttrain, "__file__", str(module))
    return tmp_path


def test_provenance_names_the_commit_of_the_checkout(checkout: Path) -> None:
    made = provenance([])
    assert made["commit"] == git(checkout, "rev-parse", "HEAD")
    assert made["dirty"] is False
    (checkout / "notes.txt").write_text("not part of what ran")
    assert provenance([])["dirty"] is False
    (checkout / "drafttrain" / "__init__.py").write_text("changed = True")
    assert provenance([])["dirty"] is True


def test_an_installed_package_has_no_commit_of_the_folder_around_it(checkout: Path) -> None:
    """A virtual environment inside somebody's repository is not a checkout of ours."""
    site = checkout / "venv" / "drafttrain"
    site.mkdir(parents=True)
    drafttrain.__file__ = str(site / "__init__.py")  # restored by the fixture
    assert provenance([])["commit"] is None
    assert provenance([])["dirty"] is None


def test_provenance_repeats_the_command_so_that_a_shell_reads_it_back() -> None:
    arguments = ["train", "data.path=my file.jsonl"]
    command = provenance(arguments)["command"]
    assert shlex.split(command) == ["python", "-m", "drafttrain", *arguments]


def test_provenance_names_versions_and_hardware() -> None:
    made = provenance([])
    assert made["versions"]["torch"] == torch.__version__
    assert made["versions"]["drafttrain"] == drafttrain.__version__
    assert made["hardware"]["cores"] >= 1
    assert made["hardware"]["memory_gib"] > 0
    assert made["hardware"]["cpu"]
    assert len(made["hardware"]["gpus"]) == torch.cuda.device_count()
    yaml.safe_dump(made)  # plain values only


@dataclass(frozen=True)
class Part:
    text: str
    many: list[int]
    none: None


@dataclass(frozen=True)
class Whole:
    part: Part


def test_config_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    write_config(Whole(Part("ü: ${x}", [1, 2], None)), file)
    assert load_config(tmp_path)["part"] == {
        "_target_": f"{__name__}.Part",
        "text": "ü: ${x}",
        "many": [1, 2],
        "none": None,
    }
    with pytest.raises(yaml.YAMLError):
        write_config(Whole(Part(object(), [], None)), file)  # type: ignore[arg-type]
    assert load_config(tmp_path)["part"]["many"] == [1, 2]
