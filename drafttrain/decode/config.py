"""The settings of `chat` and `generate`."""

from dataclasses import dataclass

from drafttrain.runtime.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ChatSettings(Settings):
    """What is said to the target, and where its answers go."""

    section = "chat"

    name: str
    system: str | None
    max_new_tokens: int
    marks: bool
    prompt: str | None
    file: str | None
    out: str | None

    def __post_init__(self) -> None:
        for key in ("system", "prompt", "file", "out"):
            value = getattr(self, key)
            self.require(key, value is None or bool(value.strip()), "hold text, or be null")
        self.require("max_new_tokens", self.max_new_tokens >= 1, "be at least 1")
        one = self.prompt is None or self.file is None
        self.require("prompt", one, "be null where chat.file is given")
