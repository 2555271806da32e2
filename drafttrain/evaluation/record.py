"""Record the settings of a result, so that results of other settings do not replace it silently."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from drafttrain.runtime.disk import write_whole
from drafttrain.runtime.run_folder import absolute
from drafttrain.runtime.untrusted_input import UntrustedError, read_object, shown

SETTINGS = "settings.json"
# In these sections only these keys matter; in the others, all keys except ASKED.
ONLY = {
    "run": ("seed",),
    "data": ("template", "template_kwargs", "template_date"),
    "tracker": (),
}
ASKED = ("name", "overwrite")


def settings_of(config: Any, subject: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a result depends on, by the user's keys.

    config: a dataclass of sections. subject: what is measured, as more keys; empty if it is not
    loaded yet.
    """
    found: dict[str, Any] = dict(subject)
    for field in fields(config):
        for key, value in asdict(getattr(config, field.name)).items():
            if key in ONLY.get(field.name, (key,)) and key not in ASKED:
                found[f"{field.name}.{key}"] = absolute(f"{field.name}.{key}", value)
    return json.loads(json.dumps(found))  # as it will be read back


def keep(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings that a result depends on next to it."""
    write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")


def require_same(
    folder: Path, result: Path, settings: dict[str, Any], overwrite: bool, ways: str
) -> None:
    """Raise ValueError if a finished result would be replaced by one of other settings.

    result: the file of a finished result. settings: the current ones, as far as they are known; see
    `settings_of`. ways: what else the user can do.
    """
    if overwrite or not result.is_file():
        return
    try:
        earlier = read_object(folder / SETTINGS)
    except (OSError, UntrustedError):
        raise ValueError(
            f"{result} exists, but the settings it was measured with are not recorded in "
            f"{folder / SETTINGS}: it is not replaced; {ways}"
        ) from None
    for key, now in settings.items():
        before = earlier.get(key)
        if absolute(key, before) != absolute(key, now):
            before, now = ("null" if value is None else value for value in (before, now))
            raise ValueError(
                f"{key} must be {shown(before)} as in {result}, which exists and is not "
                f"replaced by other measurements, got {shown(now)}; {ways}"
            )
