"""What was typed behind a command: section=choice and section.key=value, read or refused."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

ADMITTED = "admitted"  # the drafter that drafter.path=DIR stands for


class UsageError(ValueError):
    """What was typed cannot be meant: a command, a section, a choice, a key or a value."""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return '; did you mean X?' for the nearest option, or nothing."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ";"


def parse(command: str, overrides: Sequence[str]) -> list[Override]:
    """Read the overrides; a value outside Hydra's grammar (~/x, a=b) is taken as text."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or text.startswith("~"):
            key = f"'runs=[{text},...]'" if command == "compare" else f"run.dir={text}"
            run = f"; did you mean {key}?" if Path(text).is_dir() else ""
            raise UsageError(
                f"arguments must be section.key=value or section=choice, got {text!r}{run}"
            )
        try:
            override = parser.parse_override(text)
        except HydraException:
            try:
                override = parser.parse_override(f"{key}={quoted(value)}")
            except HydraException:
                raise UsageError(f"{key!r} cannot be a key, in {text!r}") from None
        if override.is_sweep_override():
            raise UsageError(
                f"one run has one value, got {text!r}; a list is written [a,b], text with a comma "
                f"in two kinds of quotes: {key}='\"a,b\"'"
            )
        parsed.append(override)
    return parsed


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def with_drafter(parsed: list[Override]) -> list[Override]:
    """Let drafter.path=DIR stand for drafter=admitted, named after DIR.

    What another drafter than a run's own measures goes into an evaluation of its own name, or it
    would take the place of the run's.
    """
    given = {override.key_or_group: override for override in parsed}
    added = []
    if "drafter.path" in given and "drafter" not in given:
        added.append(f"drafter={ADMITTED}")
        name = Path(str(given["drafter.path"].value())).expanduser().resolve().name
        if name and "drafter.name" not in given:
            added.append(f"drafter.name={quoted(name)}")
    if (added or "drafter" in given) and "run.dir" in given and "eval.name" not in given:
        added.append("eval.name=${drafter.name}")
    return [*parse("evaluate", added), *parsed]
