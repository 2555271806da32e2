"""With what settings a result was measured: one of other settings does not replace it unasked."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from drafttrain.runtime.disk import write_whole
from drafttrain.runtime.untrusted_input import UntrustedError, read_object, shown

SETTINGS = "settings.json"
# Of these sections these keys matter alone; of all others, whatever does not name or ask.
ONLY = {"run": ("seed",), "data": ("template",), "tracker": ()}
ASKED = ("name", "overwrite")


def settings_of(config: Any, subject: Mapping[str, str]) -> dict[str, Any]:
    """Return what a result depends on, by the keys that a user gives it with.

    config: a dataclass of sections. subject: what is measured, by names too; empty where that is
    not loaded yet.
    """
    found: dict[str, Any] = dict(subject)
    for field in fields(config):
        for key, value in asdict(getattr(config, field.name)).items():
            if key in ONLY.get(field.name, (key,)) and key not in ASKED:
                found[f"{field.name}.{key}"] = value
    return json.loads(json.dumps(found))  # as it is read again


def keep(folder: Path, settings: dict[str, Any]) -> None:
    """Write beside a result what it depends on."""
    write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")


def require_same(
    folder: Path, result: Path, settings: dict[str, Any], overwrite: bool, ways: str
) -> None:
    """Raise ValueError where a finished result would be replaced by one of other settings.

    result: the file that a finished one has. settings: what is known of those now; see
    `settings_of`. ways: what else the user can do.
    """
    if overwrite or not result.is_file():
        return
    try:
        earlier = read_object(folder / SETTINGS)
    except (OSError, UntrustedError):
        raise ValueError(
            f"{result} is there, and with what settings it was measured is not recorded in "
            f"{folder / SETTINGS}: it is not replaced; {ways}"
        ) from None
    for key, now in settings.items():
        before = earlier.get(key)
        if before != now:
            before, now = ("null" if value is None else value for value in (before, now))
            raise ValueError(
                f"{key} must be {shown(before)} as in {result}, which is there and is not "
                f"replaced by other measurements, got {shown(now)}; {ways}"
            )
