"""Loading Transformers models and tokenizers, safely: from a directory, the Hub, or drawn."""

from drafttrain.pretrained.models import (
    EMBEDDED,
    ModelConfig,
    RandomModelConfig,
    fingerprint,
    load_config,
    load_model,
    load_tokenizer,
)

__all__ = [
    "EMBEDDED",
    "ModelConfig",
    "RandomModelConfig",
    "fingerprint",
    "load_config",
    "load_model",
    "load_tokenizer",
]
