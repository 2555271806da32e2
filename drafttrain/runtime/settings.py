"""Settings, which declare the limits of their fields, and the error for a value beyond them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from drafttrain.runtime.untrusted_input import shown

AUTO = "auto"  # the value of a setting that is chosen later


@dataclass(frozen=True)
class Limit:
    """What a setting must satisfy, declared with its type: `Annotated[int, at_least(1)]`.

    need: what the error says after "must". remedy: the end of the error. In a list of a limited
    type each item must satisfy it. `Annotated[int, limit] | None` allows null as well, and
    `Annotated[int | None, limit]` does not, unless the limit does.
    """

    need: str
    holds: Callable[[Any], object]
    remedy: str = ""


def require(holds: bool, key: str, need: str, got: object, remedy: str = "") -> None:
    """Raise ValueError unless a setting holds what it needs: "be at least 1"."""
    if not holds:
        raise ValueError(f"{key} must {need}, got {shown(got)}{remedy}")


class Settings:
    """The settings of a section of a configuration: a frozen dataclass that checks its values.

    A subclass with conditions between several fields defines `__post_init__`, and calls this one.
    """

    section: ClassVar[str]

    def __post_init__(self) -> None:
        kind: Any = type(self)  # unhashable to mypy
        for key, limit in _limits_of(kind):
            self.require(key, bool(limit.holds(getattr(self, key))), limit.need, limit.remedy)

    def require(self, key: str, holds: bool, need: str, remedy: str = "") -> None:
        """Raise ValueError unless a setting holds what it needs: "be at least 1"."""
        require(holds, f"{self.section}.{key}", need, getattr(self, key), remedy)


@cache
def _limits_of(settings: type) -> list[tuple[str, Limit]]:
    """Return the limits of a dataclass, each with the name of its field."""
    hints = get_type_hints(settings, include_extras=True)
    return [(key, limit) for key, hint in hints.items() for limit in _limits(hint)]


def _limits(hint: Any) -> Iterator[Limit]:
    """Yield the limits of a type, those of the items of a list included."""
    if get_origin(hint) is Annotated:
        hint, *limits = get_args(hint)
        yield from (limit for limit in limits if isinstance(limit, Limit))
    if get_origin(hint) is list:
        for limit in _limits(get_args(hint)[0]):
            yield replace(limit, holds=partial(_each, limit.holds))
    if NoneType in get_args(hint):
        for limit in _limits(get_args(hint)[0]):
            yield replace(limit, need=f"{limit.need}, or null", holds=partial(_if_any, limit.holds))


def _each(holds: Callable[[Any], object], values: list[Any]) -> bool:
    return all(map(holds, values))


def _if_any(holds: Callable[[Any], object], value: Any) -> bool:
    return value is None or bool(holds(value))
