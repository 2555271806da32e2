"""Loading Transformers models and tokenizers: from a directory, the Hub, the package, or nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EMBEDDED = Path(__file__).parent / "assets" / "tiny"
ATTENTION = ("auto", "sdpa", "eager")
ARCHITECTURES = ("llama", "qwen3", "mistral")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which target: a local directory, a Hub repository, or the one embedded in the package."""

    name: str
    path: str | None
    repo: str | None
    revision: str | None
    embedded: bool
    max_positions: int | None
    attention: str
    trust_remote_code: bool
    allow_pickle: bool

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
        if not isinstance(self, RandomModelConfig) and not (
            self.path or self.repo or self.embedded
        ):
            raise ValueError(
                "model.path, model.repo or model.embedded must say where the target is, got none;"
                " for example model.path=/models/Llama-3.1-8B-Instruct"
            )


@dataclass(frozen=True, kw_only=True)
class RandomModelConfig(ModelConfig):
    """A target with random weights of any shape, and the embedded tokenizer."""

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
    seed: int


@dataclass(frozen=True)
class Pretrained:
    """A model as Transformers loads it, with what belongs to it."""

    model: Any
    tokenizer: Any
    source: Path | None  # the directory it was read from; None for random weights


def load_pretrained(config: ModelConfig, dtype: torch.dtype, device: str) -> Pretrained:
    """Load model and tokenizer in evaluation mode, without gradients."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(config.path) if config.path else EMBEDDED
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Pretrained(model.to(device).eval().requires_grad_(False), tokenizer, folder)
