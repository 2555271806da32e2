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
    """Return a saved section with the keys that its choice has gained since the run was made.

    They are those of the choice it is named after; of another of its class where it goes by a name
    of its own; of the default where the run knew no such section.
    """
    section = saved.get(group, {})
    if group == "run":  # a section without choices
        now = yaml.safe_load((conf_dir() / "train.yaml").read_text())["run"]
    else:
        now = _content(group, _counterpart(group, section))
    return {**{key: value for key, value in now.items() if key != "defaults"}, **section}


def _counterpart(group: str, section: dict[str, Any]) -> str | None:
    """Return the choice of conf/ that a saved section is most like."""
    names, default = choices(group), command_groups("train").get(group)
    own = str(section.get("name"))
    if own in names or not section:
        return own if own in names else default
    # By its last part: a yaml may name the class where a package offers it, a run where it stands.
    last = lambda path: None if path is None else str(path).rpartition(".")[2]  # noqa: E731
    kinds = {name: last(_content(group, name).get("_target_")) for name in names}
    alike = [name for name in names if kinds[name] == last(section.get("_target_"))]
    # A choice that names no class is of the section's own.
    alike = alike or [name for name in names if kinds[name] is None]
    return default if default in alike else next(iter(alike), None)


def _content(group: str, name: str | None) -> dict[str, Any]:
    """Return the keys of a choice, with those of the choices it builds on."""
    if name is None:
        return {}
    own = yaml.safe_load(choices(group)[name].read_text())
    bases = [base for base in own.get("defaults", []) if isinstance(base, str) and base != "_self_"]
    return {key: value for base in bases for key, value in _content(group, base).items()} | own
