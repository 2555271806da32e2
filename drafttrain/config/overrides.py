"""What follows a command on the command line: section=choice and section.key=value, parsed."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from drafttrain.runtime.run_folder import is_repo
from drafttrain.runtime.untrusted_input import shown

# Commands that also take a drafter that no run has trained.
WITHOUT_RUN = ("evaluate", "chat", "generate", "export")
ADMITTED = "admitted"  # the drafter that drafter.path=DIR stands for
SAVED = "saved"  # the choice that stands for what a run's config.yaml holds

# `${` makes OmegaConf interpolate a value. In text that must stay as it is, `${` is written with a
# NUL, which no text of a configuration holds, as no argument and no path can.
ASKS, HIDDEN = "${", "\0{"


class UsageError(ValueError):
    """The command line is invalid: a command, a section, a choice, a key or a value."""


def parse(command: str, overrides: Sequence[str], *, sweeps: bool = False) -> list[Override]:
    """Parse the overrides, with `sweeps` also range(3) and the like; the rest is plain text."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or text.startswith("~"):
            key = shlex.quote(f"runs=[{text},...]" if command == "compare" else f"run.dir={text}")
            run = f"; did you mean {key}?" if os.path.isdir(text) else ""
            raise UsageError(
                "arguments must be section.key=value or section=choice, "
                f"got {shown(repr(text))}{run}"
            )
        if not value.strip():
            raise UsageError(
                f"{key} must not be empty, got {value!r} (a shell's variable that is not set?); "
                "leave it out, or give null for none"
            )
        try:
            override = parser.parse_override(text)
        except (HydraException, RecursionError):
            try:
                override = parser.parse_override(f"{key}={quoted(value)}")
            except HydraException:
                raise UsageError(f"{key!r} cannot be a key, in {text!r}") from None
        if override.is_sweep_override() and not sweeps:
            raise UsageError(
                f"one run has one value, got {text!r}; --multirun makes a run of each; a list is "
                f"written [a,b], text with a comma in two kinds of quotes: {key}='\"a,b\"'"
            )
        parsed.append(override)
    return parsed


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def spelled(value: object) -> str:
    """Return a value as the command line spells it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{spelled(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spelled, value)) + "]"
    return quoted(hidden(str(value))) if isinstance(value, str | Path) else str(value)


def with_drafter(command: str, parsed: list[Override]) -> list[Override]:
    """Let drafter.path=DIR stand for drafter=admitted, named after DIR.

    An evaluation of a drafter that is not the run's own gets a name of its own.
    """
    given = {override.key_or_group: override for override in parsed}
    added = []
    if "drafter.path" in given and "drafter" not in given:
        added.append(f"drafter={ADMITTED}")
        name = Path(str(given["drafter.path"].value())).expanduser().resolve().name
        if name and "drafter.name" not in given:
            added.append(f"drafter.name={spelled(name)}")
    other = (added or "drafter" in given) and "run.dir" in given and command != "export"
    if other and "eval.name" not in given:
        added.append("eval.name=${drafter.name}")
    return [*parse("evaluate", added), *parsed]


def with_target(command: str, parsed: list[Override]) -> list[Override]:
    """Name the target of model.path=DIR after DIR, unless it is given a name."""
    given = {override.key_or_group: override.value() for override in parsed}
    path = given.get("model.path")
    if not isinstance(path, str) or "model.name" in given:
        return parsed
    folder = Path(path).expanduser().absolute()
    if folder.parent.name == "snapshots":  # the Hub's cache: models--OWNER--NAME/snapshots/COMMIT
        folder = Path(folder.parent.parent.name.rpartition("--")[2])
    name = re.sub(r"[^\w.+-]+", "-", folder.name).strip("-.")[:80]  # of a run's folder, a part
    return [*parse(command, [f"model.name={quoted(name)}"] if name else []), *parsed]


def start_of(parsed: list[Override]) -> Path | None:
    """Return the folder, or the repository of the Hub, that `train` is to start from, or None."""
    given = [o.value() for o in parsed if o.key_or_group == "run.init_from"]
    if not given or given[-1] is None:
        return None
    folder = Path(str(given[-1])).expanduser()
    if not (os.path.isdir(folder) or is_repo(str(given[-1]))):
        problem = "which is a file" if os.path.exists(folder) else "which does not exist"
        raise UsageError(
            "run.init_from must be the folder of a run, or a directory or a repository of the Hub "
            "(owner/name) with config.json and weights that a serving engine loads, got "
            f"{shown(folder, 400)}, {problem}"
        )
    return folder


def with_start(parsed: list[Override], folder: Path, sections: Iterable[str]) -> list[Override]:
    """Add the overrides that train what `folder` holds, unless another choice is given.

    sections: those that a run offers as `saved`; empty for a serving directory.
    """
    given = {override.key_or_group for override in parsed}
    added = [f"{section}={SAVED}" for section in sections if section not in given]
    if "drafter" not in given and "drafter=saved" not in added:
        added += [f"drafter={ADMITTED}", f"drafter.path={spelled(folder)}"]
    if "run.name" not in given:
        added.append(f"run.name={spelled(folder.resolve().name + '-adapted')}")
    return [*parse("train", added), *parsed]


def hidden(plain: Any) -> Any:
    """Return plain data in whose texts OmegaConf interpolates nothing."""
    return _over_texts(plain, lambda text: text.replace(ASKS, HIDDEN))


def revealed(plain: Any) -> Any:
    """Return plain data as it was before `hidden`."""
    return _over_texts(plain, lambda text: text.replace(HIDDEN, ASKS))


def _over_texts(plain: Any, change: Callable[[str], str]) -> Any:
    if isinstance(plain, str):
        return change(plain)
    if isinstance(plain, dict):
        return {key: _over_texts(value, change) for key, value in plain.items()}
    return [_over_texts(value, change) for value in plain] if isinstance(plain, list) else plain
