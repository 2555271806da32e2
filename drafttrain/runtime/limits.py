"""The limits that several settings have, and types with them."""

from collections.abc import Callable
from math import inf
from typing import Annotated, Any

from drafttrain.runtime.settings import AUTO, Limit

LONGEST_NAME = 200  # bytes of a folder's name: file systems take 255, and we append to it


def at_least(least: float) -> Limit:
    return Limit(f"be at least {least}", lambda value: value >= least)


def between(low: float, high: float) -> Limit:
    """Return the limit to numbers from `low` to `high`, both included."""
    return Limit(f"be in [{low:g}, {high:g}]", lambda value: low <= value <= high)


def one_of(*options: str) -> Limit:
    return Limit(f"be one of {', '.join(options)}", lambda value: value in options)


def or_auto(need: str, holds: Callable[[Any], object], *kinds: type) -> Limit:
    """Return the limit to values of some types, or `auto`."""
    return Limit(f"{need}, or {AUTO}", lambda n: n == AUTO or (type(n) in kinds and holds(n)))


def _is_folder_name(name: str) -> bool:
    """Return whether a folder of this name would be inside its parent, and none too long."""
    plain = bool(name.strip(". ")) and "/" not in name and name.isprintable()
    return plain and len(name.encode()) <= LONGEST_NAME


NOT_EMPTY = Limit("not be empty", bool)
DISTINCT = Limit("be distinct values", lambda values: len(set(values)) == len(values))
NAME = f"be a name without slashes, on one line, of at most {LONGEST_NAME} bytes"

PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
CountOrAuto = Annotated[Any, or_auto("be a number of at least 1", lambda n: n >= 1, int)]
PositiveFloat = Annotated[float, Limit("be above 0", lambda value: 0 < value < inf)]
NonNegativeFloat = Annotated[float, Limit("be at least 0", lambda value: 0 <= value < inf)]
Fraction = Annotated[float, between(0, 1)]
OpenFraction = Annotated[float, Limit("be between 0 and 1", lambda value: 0 < value < 1)]
PositiveFraction = Annotated[float, Limit("be in (0, 1]", lambda value: 0 < value <= 1)]
FractionBelow1 = Annotated[float, Limit("be in [0, 1)", lambda value: 0 <= value < 1)]
DistinctLayers = Annotated[list[int], NOT_EMPTY, DISTINCT]
FolderName = Annotated[str, Limit(NAME, _is_folder_name)]
