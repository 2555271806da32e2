"""Read the values of a drafter's config.json: of the right type and range, or with a complaint."""

import math
from dataclasses import dataclass, field
from typing import Any

from drafttrain.runtime.untrusted_input import shown

MAX_WIDTH = 1 << 20  # of hidden states; the largest targets have 16,384
MAX_HEADS = 1 << 14  # of attention heads, and of a head's width
MAX_LAYERS = 128  # of a drafter: decoder layers, Medusa heads, residual blocks
MAX_POSITIONS = 1 << 32


@dataclass
class Values:
    """An object of config.json; its methods return valid values and record complaints."""

    raw: dict[str, Any]
    complaints: list[str] = field(default_factory=list)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object, empty if it is absent."""
        value = self.raw.get(key)
        if value is None or isinstance(value, dict):
            return value or {}
        self._wrong(key, "an object", value)
        return {}

    def integer(self, key: str, most: int, default: int | None = None) -> int:
        """Return an integer from 1 to `most`; if it is absent, the default, if there is one."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            self._wrong(key, "an integer of at least 1", value)
        elif value > most:
            self._wrong(key, f"at most {most:,}", value)
        else:
            return value
        return 1

    def number(self, key: str, default: float) -> float:
        """Return a finite number above 0; the default if it is absent."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not is_number(value) or value <= 0:
            self._wrong(key, "a finite number above 0", value)
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; the default if it is absent, false if it is null."""
        value = self.raw.get(key, default)
        if value is None or type(value) is bool:
            return bool(value)
        self._wrong(key, "true or false", value)
        return default

    def exactly(self, key: str, wanted: object) -> None:
        """Complain unless a value is absent, or the only one supported."""
        value = self.raw.get(key)
        if value is not None and (isinstance(value, dict | list) or value != wanted):
            self.complaints.append(f"config.json's {key} must be {wanted}, got {shown(value)}")

    def _wrong(self, key: str, needed: str, got: object) -> None:
        line = f"config.json's {key} must be {needed}, got {shown(repr(got))}"
        if line not in self.complaints:  # some keys are read twice
            self.complaints.append(line)


def is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
