"""The settings of `regenerate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from drafttrain.core.sampling_config import Sampling, Temperature
from drafttrain.data.conversations import ALL, LAST
from drafttrain.runtime import limits
from drafttrain.runtime.settings import Limit, Settings
from drafttrain.runtime.untrusted_input import shown

TRANSFORMERS, VLLM, OPENAI = BACKENDS = ("transformers", "vllm", "openai")


@dataclass(frozen=True, kw_only=True)
class RegenerateSettings(Settings):
    """Which model answers, how, and where the answers are written."""

    section = "regenerate"

    backend: Annotated[str, limits.one_of(*BACKENDS)]
    out: Annotated[str, Limit("name a file in .jsonl", lambda out: out.endswith(".jsonl"))]
    turns: Annotated[str, limits.one_of(ALL, LAST)]
    temperature: Temperature
    top_k: limits.NonNegativeInt
    top_p: limits.PositiveFraction
    max_new_tokens: limits.PositiveInt
    seed: limits.NonNegativeInt
    batch_size: limits.PositiveInt
    base_url: str | None
    served_model: str | None
    api_key_variable: str
    concurrency: limits.PositiveInt
    timeout: limits.PositiveFloat  # seconds
    max_retries: limits.NonNegativeInt

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == OPENAI and not self.base_url:
            raise ValueError(
                "regenerate.base_url must name the endpoint of regenerate.backend=openai, got "
                "none; for example regenerate.base_url=http://localhost:8000/v1"
            )
        if self.base_url is not None:
            check_url(self.base_url)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def dir(self) -> str:
        return str(Path(self.out).expanduser().parent)

    def identity(self) -> dict[str, Any]:
        """Return the settings that the answers depend on."""
        keys = ("turns", "temperature", "top_k", "top_p", "max_new_tokens", "seed")
        return {key: getattr(self, key) for key in ("backend", *keys)}


def check_url(url: str) -> None:
    """Raise ValueError unless `url` is the address of an endpoint and contains no secret.

    Error messages show it, and it is stored with the answers.
    """
    must = "regenerate.base_url must be like http://localhost:8000/v1"
    try:
        parts = urlsplit(url)
        secret = parts.username is not None or parts.password is not None
        whole = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{must}, got an address that cannot be read: {shown(error)}") from None
    if secret or "@" in url:
        raise ValueError(
            f"{must}, got one with a user name or a password in it; give a key by the environment "
            "variable that regenerate.api_key_variable names"
        )
    if parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise ValueError(f"{must}, got one with ?, # or characters that an address does not have")
    if not whole:
        raise ValueError(f"{must}, got {shown(url)}, which names no http:// or https:// address")
