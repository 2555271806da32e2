"""conf/: where it is, what each group offers, and what a saved run adds to that."""

from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from drafttrain.overrides import SAVED, UsageError


def conf_dir() -> Path:
    """Return the folder of yaml: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise AssertionError(f"no conf/ in {package} or beside it: the installation is incomplete")


def command_groups(command: str) -> dict[str, str]:
    """Return the groups that a command composes, with the default choice of each."""
    primary = yaml.safe_load((conf_dir() / f"{command}.yaml").read_text())
    return {
        group: choice
        for entry in primary["defaults"]
        if isinstance(entry, dict)
        for group, choice in entry.items()
    }


def choices(group: str, config_dir: Path | None = None) -> dict[str, Path]:
    """Return the yaml files of a group by name, those of the user's own `config_dir` too."""
    folders = [conf_dir(), config_dir] if config_dir else [conf_dir()]
    files = [file for folder in folders for file in sorted((folder / group).glob("*.yaml"))]
    return {file.stem: file for file in reversed(files)}


def offer_saved(saved: dict[str, dict[str, Any]], groups: list[str], sections: list[str]) -> None:
    """Let `saved` be a choice of these groups: what the config.yaml of a run holds."""
    for group in groups:
        # An evaluation without a run has no `trainer`, which no other command reads.
        if group not in saved and group in sections:
            raise UsageError(f"the config.yaml of run.dir has no section {group}")
        ConfigStore.instance().store(group=group, name=SAVED, node=complete(group, saved))


def complete(group: str, saved: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a saved section with the keys that its choice has gained since the run was made."""
    section = saved.get(group, {})
    if group == "run":  # a section without choices
        now = yaml.safe_load((conf_dir() / "train.yaml").read_text())["run"]
    else:
        file = choices(group).get(str(section.get("name")))
        now = yaml.safe_load(file.read_text()) if file else {}
    return {**{key: value for key, value in now.items() if key != "defaults"}, **section}
