"""The settings of `chat` and `generate`."""

from dataclasses import dataclass

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ChatSettings(Settings):
    """What is said to the target, and where its answers go."""

    section = "chat"

    name: str
    system: str | None
    max_new_tokens: limits.PositiveInt
    marks: bool
    prompt: str | None
    file: str | None
    out: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        one = self.prompt is None or self.file is None
        self.require("prompt", one, "be null where chat.file is given")
