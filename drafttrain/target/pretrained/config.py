"""The configuration of the target: which model, and how it is loaded."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Limit, Settings
from drafttrain.runtime.untrusted_input import shown
from drafttrain.target.pretrained.quantize import SCHEMES
from drafttrain.target.pretrained.size import parse_size

REPO = re.compile(r"([\w.-]+/)?[\w.-]+")  # the Hub itself checks the finer points
ATTENTION = ("auto", "sdpa", "eager")
ARCHITECTURES = ("llama", "qwen3", "mistral")
EVEN = Limit("be even (rotary pairs) and above 0", lambda size: size > 0 and size % 2 == 0)
# Random weights up to this size are drawn on the CPU in float32, so that every device and dtype
# gets the same ones; larger ones are drawn on their device: drawing them twice takes minutes.
PORTABLE_PARAMETERS = 2_000_000_000
MERGE = (
    "; merge it with PEFT (merge_and_unload, then save_pretrained) and give the directory of the "
    "result as model.path"
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """Which target: a local directory, else the embedded one, else a Hub repository."""

    section = "model"

    name: str
    path: str | None
    adapter: str | None
    repo: Annotated[str, Limit("be like owner/name", REPO.fullmatch)] | None
    revision: str | None
    embedded: bool
    max_positions: limits.PositiveInt | None
    attention: Annotated[str, limits.one_of(*ATTENTION)]
    quantization: Annotated[str, limits.one_of(*SCHEMES)] | None
    trust_remote_code: bool
    allow_pickle: bool
    inflate: str | None
    shape: dict[str, Any] | None  # read by `plan` alone: weights come with their own config.json

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inflate is not None:
            parse_size(self.inflate)
        plain = self.adapter is None or self.quantization is None
        self.require("adapter", plain, "be null with model.quantization", MERGE)
        random = isinstance(self, RandomModelConfig)
        if not (random or self.path or self.repo or self.embedded):
            raise ValueError(
                "model.path, model.repo or model.embedded must say where the target is, got none;"
                " for example model.path=/models/Llama-3.1-8B-Instruct"
            )

    def require_null(self, reader: str, *keys: str) -> None:
        """Raise ValueError if keys that change a loaded model are set where its files are read."""
        for key in keys:
            need = f"be null for {reader}, which reads the files of a model"
            self.require(key, getattr(self, key) is None, need, MERGE if key == "adapter" else "")

    @property
    def label(self) -> str:
        """The name that reports show; it mentions an adapter (its folder's name) and inflation."""
        adapter = f" with adapter {shown(Path(self.adapter).name)}" if self.adapter else ""
        return self.name + adapter + (f" inflated to {self.inflate}" if self.inflate else "")

    @property
    def origin(self) -> str:
        if self.path:
            return f"model.path={self.path}"
        return "model.embedded=true" if self.embedded else f"model.repo={self.repo}"


@dataclass(frozen=True, kw_only=True)
class RandomModelConfig(ModelConfig):
    """A target with random weights of any shape; it uses the embedded tokenizer."""

    max_positions: limits.PositiveInt  # weights that are drawn have no limit of their own
    architecture: Annotated[str, limits.one_of(*ARCHITECTURES)]
    vocab_size: limits.PositiveInt
    hidden_size: limits.PositiveInt
    intermediate_size: limits.PositiveInt
    num_layers: limits.PositiveInt
    num_attention_heads: limits.PositiveInt
    num_key_value_heads: limits.PositiveInt
    head_dim: Annotated[int, EVEN]
    rope_theta: limits.PositiveFloat
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
        whole = f"be null for model={self.name}, whose weights are drawn"
        self.require("quantization", self.quantization is None, whole)
        self.require("adapter", self.adapter is None, whole)
        heads = self.num_attention_heads
        divides = f"divide model.num_attention_heads ({heads})"
        self.require("num_key_value_heads", heads % self.num_key_value_heads == 0, divides)

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
