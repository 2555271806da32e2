"""The words in which a setting is refused."""

from typing import ClassVar

from drafttrain.runtime.untrusted_input import shown

AUTO = "auto"  # the value of a setting that is chosen later


def is_count_or_auto(value: object) -> bool:
    """Whether a setting is a whole number of at least 1, or is chosen later."""
    return value == AUTO or (type(value) is int and value >= 1)


def require(holds: bool, key: str, need: str, got: object, remedy: str = "") -> None:
    """Raise ValueError unless a setting holds what it needs: "be at least 1"."""
    if not holds:
        raise ValueError(f"{key} must {need}, got {shown(got)}{remedy}")


class Settings:
    """The settings of a section of a configuration: a frozen dataclass that checks its values."""

    section: ClassVar[str]

    def require(self, key: str, holds: bool, need: str, remedy: str = "") -> None:
        """Raise ValueError unless a setting holds what it needs: "be at least 1"."""
        require(holds, f"{self.section}.{key}", need, getattr(self, key), remedy)

    def require_at_least(self, least: int, *keys: str) -> None:
        """Raise ValueError unless each of these settings is at least so large."""
        for key in keys:
            self.require(key, getattr(self, key) >= least, f"be at least {least}")
