"""The names in drafter.members: what each one is, before anything is loaded."""

from pathlib import Path
from typing import Any

from drafttrain.config.groups import WITHHELD, choices, content_of, saved_section
from drafttrain.config.overrides import ADMITTED
from drafttrain.config.values import build, class_of
from drafttrain.drafters.base import DrafterConfig, JoinedConfig
from drafttrain.runtime.run_folder import CONFIG, is_repo, load_config
from drafttrain.runtime.settings import require
from drafttrain.runtime.untrusted_input import shown

KEY = "drafter.members"


def member_of(name: str, settings: dict[str, Any] | None) -> tuple[Path, DrafterConfig]:
    """Return a member's folder and configuration, to be loaded as an evaluation loads them.

    name: an entry of conf/drafter that needs no training, the folder of a run, or a directory or a
    repository of the Hub with a drafter that others trained. settings: the values of an entry that
    are changed.
    """
    folder = Path(name).expanduser()
    if name in choices("drafter"):
        return folder, _entry(name, settings or {})
    if settings is not None:
        raise ValueError(
            f"drafter.settings must be of names in conf/drafter, got those of {shown(name)}"
        )
    if (folder / CONFIG).is_file():
        saved = saved_section("drafter", load_config(folder, KEY))
        _refuse_joined(name, saved)
        return folder, _built(name, saved)
    if not (folder.is_dir() or is_repo(name)):
        raise ValueError(
            f"{KEY} must be folders of runs, directories with a drafter, repositories of the Hub "
            f"(owner/name), or names in conf/drafter ({', '.join(sorted(choices('drafter')))}), "
            f"got {shown(name)}, which is none"
        )
    named = {"name": folder.resolve().name or name, "path": str(folder)}
    return folder, _built(name, content_of("drafter", ADMITTED) | named)


def _entry(name: str, settings: dict[str, Any]) -> DrafterConfig:
    # A saved evaluation may come from anyone, and so may the settings in it.
    if allowed := sorted({"_target_", *WITHHELD} & settings.keys()):
        raise ValueError(f"drafter.settings must not hold {allowed[0]}, got it for {name}")
    content = content_of("drafter", name)
    _refuse_joined(name, content)
    config = _built(name, content | settings)
    by_folder = f"name a trained {name} by its folder, as in outputs/demo"
    require(not config.trainable, KEY, by_folder, name)
    return config


def _refuse_joined(name: str, content: dict[str, Any]) -> None:
    joined = issubclass(class_of("drafter", content.get("_target_")), JoinedConfig)
    require(not joined, KEY, "be single drafters", name, ", which has members itself")


def _built(name: str, content: dict[str, Any]) -> DrafterConfig:
    try:
        return build("drafter", content)
    except ValueError as error:
        raise ValueError(f"{KEY}: {shown(name)} must be usable: {error}") from error
