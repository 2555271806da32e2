"""conf/: where it is, what each group offers, and what a saved run adds to that."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from drafttrain.config.overrides import SAVED, UsageError, hidden, quoted, spelled
from drafttrain.config.sections import SECTIONS
from drafttrain.runtime.run_folder import call
from drafttrain.runtime.untrusted_input import shown

# A path that the command line takes in quotes alone.
PATH = r"([a-z_.]+\.(?:dir|path|out))=(?!'|[A-Za-z/~.][\w/~.-]*$)(.*)"
HERE = "@_here_"  # how a part of choices is told to fill their own section: parts/layer@_here_
# Keys that let other people's code run are not taken from the config.yaml of a run.
WITHHELD = {"trust_remote_code": False, "allow_pickle": False, "python": None}


def conf_dir() -> Path:
    """Return the folder of yaml: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise AssertionError(f"no conf/ in {package} or beside it: the installation is incomplete")


def command_groups(command: str) -> dict[str, str]:
    """Return the groups that a command composes, with the default choice of each."""
    primary = read_choice(choices("")[command])
    found = [command_groups(base) for base in bases(primary)]
    found += [entry for entry in primary["defaults"] if isinstance(entry, dict)]
    return {group: choice for groups in found for group, choice in groups.items()}


@contextmanager
def own_choices(config_dir: str | Path | None) -> Iterator[None]:
    """Add the choices of the user's own folder to ours while this is open; its yaml is trusted."""
    before = _own[:]
    _own[:] = [Path(config_dir)] if config_dir else []
    try:
        yield
    finally:
        _own[:] = before


_own: list[Path] = []  # of this process: one command line, one --config-dir


def own_dir() -> Path | None:
    """Return the folder that --config-dir names."""
    return _own[0] if _own else None


def own_file(group: str, name: str) -> Path | None:
    """Return the yaml of a choice that the user's own folder adds; None: it is none of these."""
    file = choices(group).get(name)
    return file if file and file.parent.parent in _own else None


def follow_up(command: str, *arguments: str) -> str:
    """Return the command line of what comes next, with the --config-dir of this one."""
    own = [f"--config-dir={folder}"] if (folder := own_dir()) else []
    if "--multirun" not in arguments:  # there a comma separates values
        arguments = tuple(map(safe, arguments))
    return call(command, *own, *arguments)


def safe(word: str) -> str:
    """Return KEY=VALUE with its value in quotes if it is a path that needs them."""
    path = re.fullmatch(PATH, word)
    return f"{path[1]}={quoted(path[2])}" if path else word


def told_target(model: Any) -> list[str]:
    """Return the overrides that name a target again, none where it is the default."""
    adapter = [f"model.adapter={model.adapter}"] if model.adapter is not None else []
    if model.path is not None:  # named after its folder
        return [safe(f"model.path={model.path}"), *adapter]
    if model.name not in choices("model"):
        return [model.origin, *adapter]
    own = [f"model={model.name}"] if model.name != command_groups("train")["model"] else []
    return own + [word for word in changed_keys("model", model) if "model.shape=" not in word]


def changed_keys(section: str, settings: Any) -> list[str]:
    """Return the overrides that change a choice of a section into these settings."""
    usual = content_of(section, settings.name)
    return [
        f"{section}.{key}={value if isinstance(value, str) else spelled(value)}"
        for key, value in vars(settings).items()
        if value != usual.get(key)
    ]


def own_groups() -> list[str]:
    """Return the groups without a section, such as `experiment`: they set keys of any section."""
    files = [file for place in (conf_dir(), *_own) for file in sorted(place.glob("*/*.yaml"))]
    return list(dict.fromkeys(f.parent.name for f in files if f.parent.name not in SECTIONS))


def choices(group: str) -> dict[str, Path]:
    """Return the yaml files of a group by name; ours before the user's own of the same name.

    The group "" is the commands' own yaml.
    """
    folders = [conf_dir(), *_own]
    files = [file for folder in folders for file in sorted((folder / group).glob("*.yaml"))]
    return {file.stem: file for file in reversed(files) if file.is_file()}


def targets(group: str) -> set[str]:
    """Return the classes that the choices of a group name."""
    named = [content_of(group, name).get("_target_") for name in choices(group)]
    return {str(target) for target in named if target is not None}


def offer_saved(saved: dict[str, dict[str, Any]], groups: list[str], sections: list[str]) -> None:
    """Let `saved` be a choice of these groups: what the config.yaml of a run holds."""
    for group in groups:
        # An evaluation without a run has no `trainer`, which no other command reads.
        if group not in saved and group in sections:
            raise UsageError(f"the config.yaml of run.dir has no section {group}")
        node = hidden(saved_section(group, saved))
        ConfigStore.instance().store(group=group, name=SAVED, node=node)


def saved_section(group: str, saved: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a section of a saved run, without what would run other people's code.

    UsageError if a key of its choice is missing, as in a run that another version made.
    """
    section = dict(saved.get(group, {}))
    section.pop("defaults", None)  # Hydra would obey it
    today = content_of(group, str(section.get("name")))
    if group == "run":  # a section without choices
        today = content_of("", "train")["run"]
    # A folder that `name` is taken from may be called as a choice of another class.
    alike = _last(section) == _last({"_target_": SECTIONS[group], **today})
    missing = sorted(today.keys() - section.keys() - {"defaults", "_target_"})
    if missing and (alike or group == "run"):
        raise UsageError(
            f"the config.yaml of a run must have {group}.{missing[0]}, but another version wrote "
            "it; add the key with the value of that time, or train again"
        )
    # The folder may come from anyone: the user must allow its code anew for each command.
    return section | {key: value for key, value in WITHHELD.items() if key in section}


def _last(section: dict[str, Any]) -> str:
    return str(section.get("_target_")).rpartition(".")[2]


def content_of(group: str, name: str | None) -> dict[str, Any]:
    """Return the keys of a choice, with those of the choices it builds on."""
    file = file_of(group, name or "")
    if file is None:
        return {}
    own = read_choice(file)
    below = [content_of(group, base) for base in bases(own)]
    own.pop("defaults", None)
    return {key: value for base in below for key, value in base.items()} | own


def file_of(group: str, name: str) -> Path | None:
    """Return the file of a choice, or of a part of choices, as in `parts/layer@_here_`."""
    part = name.removesuffix(HERE)
    if part == name:
        return choices(group).get(name)
    files = [folder / group / f"{part}.yaml" for folder in (*_own, conf_dir())]
    return next((file for file in files if file.is_file()), None)


def keys_of(command: str, section: str, chosen: dict[str, str]) -> list[str]:
    """Return the keys of a section of a command, from its choice, or else from another one."""
    if section not in chosen:
        return list(content_of("", command).get(section, {}))
    known, name = choices(section), chosen[section]
    return list(content_of(section, name if name in known else next(iter(known), None)))


def bases(content: dict[str, Any]) -> list[str]:
    """Return the choices of the same group, and their parts, that a choice builds on."""
    named = content.get("defaults", [])
    return [base for base in named if isinstance(base, str) and base != "_self_"]


def read_choice(file: Path) -> dict[str, Any]:
    """Return what a yaml of conf/, or of the user's own folder, sets."""
    try:
        content = deepcopy(_parsed(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file} must be yaml, got: {shown(error)}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} must set keys, got {shown(content)}")
    return content


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Parse yaml, once for each text because it is slow; the result must not be changed."""
    return yaml.safe_load(text)
