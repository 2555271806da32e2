"""The limits of settings: declared with a field, checked for it, and named in the error."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from drafttrain.config.sections import SECTIONS
from drafttrain.config.values import class_of
from drafttrain.runtime import limits
from drafttrain.runtime.settings import Limit, Settings

EVEN = Limit("be even", lambda value: value % 2 == 0, "; round it")


@dataclass(frozen=True, kw_only=True)
class Cup(Settings):
    section = "cup"

    count: limits.PositiveInt = 1
    size: Annotated[limits.PositiveInt, EVEN] | None = None
    kind: Annotated[str, limits.one_of("tea", "coffee")] = "tea"
    folder: Annotated[str | None, Limit("name a folder", bool)] = "here"
    sizes: Annotated[list[limits.PositiveInt], limits.NOT_EMPTY, limits.DISTINCT] | None = None
    depth: limits.CountOrAuto = "auto"
    name: limits.FolderName = "cup"


@dataclass(frozen=True, kw_only=True)
class Saucer(Cup):
    share: limits.PositiveFraction = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("share", self.share * self.count >= 1, "be at least 1 / cup.count")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"count": 0}, "cup.count must be at least 1, got 0"),
        ({"size": 0}, "cup.size must be at least 1, or null, got 0"),
        ({"size": 3}, "cup.size must be even, or null, got 3; round it"),
        ({"kind": "water"}, "cup.kind must be one of tea, coffee, got water"),
        ({"folder": None}, "cup.folder must name a folder, got None"),
        ({"sizes": []}, "cup.sizes must not be empty, or null, got []"),
        ({"sizes": [2, 0]}, "cup.sizes must be at least 1, or null, got [2, 0]"),
        ({"sizes": [2, 2]}, "cup.sizes must be distinct values, or null, got [2, 2]"),
        ({"depth": "deep"}, "cup.depth must be a number of at least 1, or auto, got deep"),
        ({"depth": True}, "cup.depth must be a number of at least 1, or auto, got True"),
        ({"name": ".."}, "cup.name must be a name without slashes, on one line, of at most 200 "),
        ({"name": "é" * 101}, "cup.name must be a name without slashes, on one line, of at most"),
        ({"share": 1.5}, "cup.share must be in (0, 1], got 1.5"),
        ({"share": 0.5}, "cup.share must be at least 1 / cup.count, got 0.5"),
    ],
)
def test_a_value_beyond_a_limit_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        Saucer(**changes)


def test_what_the_limits_allow_is_taken() -> None:
    Saucer(size=2, kind="coffee", sizes=[1, 2], depth=3, name="a.b", share=0.5, count=2)
    Saucer(size=None, sizes=None)


def subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_section_checks_the_limits_of_its_fields() -> None:
    for section in SECTIONS.keys() - {"drafter"}:
        class_of(section, None)  # imports it
    kinds = [each for each in subclasses(Settings) if each.__module__.startswith("drafttrain")]
    assert len(kinds) > 20
    for kind in kinds:
        if "__post_init__" in vars(kind):
            assert "super().__post_init__()" in inspect.getsource(vars(kind)["__post_init__"]), kind
