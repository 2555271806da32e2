"""What checks every call where CHECK_SHAPES=1, and where it does not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import config

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an integer is a number too


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check each call of a function that a module or a class has.

    One within another function is made anew at each call of that one, and its check would be too:
    a millisecond, as long as a tiny model computes.
    """
    return function if "<locals>" in function.__qualname__ else checked(function)


@contextmanager
def unchecked(wanted: bool) -> Iterator[None]:
    """Check nothing within, where `wanted`."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", before or wanted)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)
