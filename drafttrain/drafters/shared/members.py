"""A configuration of a drafter that others draft for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.base import Drafter, DrafterConfig


@dataclass(frozen=True, kw_only=True)
class JoinedConfig(DrafterConfig):
    """The configuration of a drafter that others draft for; a command loads these and joins them.

    members: folders, or entries of conf/drafter. settings: of those entries, by name.
    """

    members: list[str]
    settings: dict[str, Any]

    trainable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        distinct = len({*self.members}) == len(self.members) >= 2
        self.require("members", distinct, "name at least two drafters, each once")
        given = all(isinstance(each, dict) for each in self.settings.values())
        given = given and self.settings.keys() <= {*self.members}
        self.require("settings", given, "be of drafters in drafter.members, as in {NAME: {a: 1}}")

    def build(self, spec: TargetSpec) -> Drafter:
        """Raise ValueError: its members must be loaded; see `join`."""
        raise ValueError(
            f"drafter={self.name} has no weights of its own: it can be evaluated and tuned, and "
            "everything else is done with its members"
        )

    def join(self, spec: TargetSpec, members: Sequence[Drafter]) -> Drafter:
        """Return the drafter of these members; ValueError if they cannot draft together."""
        raise NotImplementedError(f"{type(self).__name__} must define join(spec, members)")
