"""The configuration of the target: which model, and how it is loaded."""

import re
from dataclasses import dataclass
from typing import Any

from drafttrain.runtime.untrusted_input import shown
from drafttrain.target.pretrained.quantize import SCHEMES
from drafttrain.target.pretrained.size import parse_size

REPO = re.compile(r"([\w.-]+/)?[\w.-]+")  # the Hub itself checks the finer points
ATTENTION = ("auto", "sdpa", "eager")
ARCHITECTURES = ("llama", "qwen3", "mistral")
# Random weights up to this size are drawn on the CPU in float32, so that every device and dtype
# gets the same ones; larger ones are drawn on their device: drawing them twice takes minutes.
PORTABLE_PARAMETERS = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which target: a local directory, else the embedded one, else a Hub repository."""

    name: str
    path: str | None
    repo: str | None
    revision: str | None
    embedded: bool
    max_positions: int | None
    attention: str
    quantization: str | None
    trust_remote_code: bool
    allow_pickle: bool
    inflate: str | None
    shape: dict[str, Any] | None  # read by `plan` alone: weights come with their own config.json

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION:
            raise ValueError(
                f"model.attention must be one of {', '.join(ATTENTION)}, got {self.attention!r}"
            )
        if self.max_positions is not None and self.max_positions < 1:
            raise ValueError(
                f"model.max_positions must be at least 1, got {self.max_positions};"
                " null takes the model's own limit"
            )
        if self.inflate is not None:
            parse_size(self.inflate)
        if self.quantization is not None and self.quantization not in SCHEMES:
            raise ValueError(
                f"model.quantization must be null or one of {', '.join(SCHEMES)},"
                f" got {self.quantization!r}"
            )
        if self.repo is not None and not REPO.fullmatch(self.repo):
            raise ValueError(f"model.repo must be like owner/name, got {shown(repr(self.repo))}")
        random = isinstance(self, RandomModelConfig)
        if not (random or self.path or self.repo or self.embedded):
            raise ValueError(
                "model.path, model.repo or model.embedded must say where the target is, got none;"
                " for example model.path=/models/Llama-3.1-8B-Instruct"
            )

    @property
    def label(self) -> str:
        """The name that reports show; it mentions inflation."""
        return self.name if self.inflate is None else f"{self.name} inflated to {self.inflate}"

    @property
    def origin(self) -> str:
        if self.path:
            return f"model.path={self.path}"
        return "model.embedded=true" if self.embedded else f"model.repo={self.repo}"


@dataclass(frozen=True, kw_only=True)
class RandomModelConfig(ModelConfig):
    """A target with random weights of any shape; it uses the embedded tokenizer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    tie_embeddings: bool
    initializer_range: float
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path or self.repo or self.embedded:
            raise ValueError(
                f"model={self.name} draws its weights, so {self.origin} must not be set;"
                " choose another model= to load weights"
            )
        if self.quantization is not None:
            raise ValueError(
                f"model.quantization must be null for model={self.name}, whose weights are drawn,"
                f" got {self.quantization}"
            )
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"model.architecture must be one of {', '.join(ARCHITECTURES)},"
                f" got {self.architecture!r}"
            )
        if self.max_positions is None:
            raise ValueError("model.max_positions must be a number for a random target, got null")
        for field in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
            *("num_attention_heads", "num_key_value_heads", "head_dim"),
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"model.{field} must be at least 1, got {getattr(self, field)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_key_value_heads must divide model.num_attention_heads"
                f" ({self.num_attention_heads}), got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim must be even (rotary pairs), got {self.head_dim}")

    @property
    def num_parameters(self) -> int:
        """The number of weights in the matrices, without norms and biases."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        tables = 1 if self.tie_embeddings else 2
        return self.num_layers * layer + tables * self.vocab_size * self.hidden_size

    @property
    def portable(self) -> bool:
        return self.num_parameters <= PORTABLE_PARAMETERS

    @property
    def origin(self) -> str:
        return super().origin if self.path or self.repo or self.embedded else f"model={self.name}"
