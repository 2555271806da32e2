"""Loading Transformers models and tokenizers, safely: from a directory, the Hub, or drawn."""

from drafttrain.pretrained.ends import directory, load_ends
from drafttrain.pretrained.limits import Limits, limits_of
from drafttrain.pretrained.models import (
    EMBEDDED,
    ModelConfig,
    RandomModelConfig,
    attention_of,
    fingerprint,
    load_config,
    load_model,
    load_tokenizer,
)
from drafttrain.pretrained.quantize import SCHEMES

__all__ = [
    "EMBEDDED",
    "SCHEMES",
    "Limits",
    "ModelConfig",
    "RandomModelConfig",
    "attention_of",
    "directory",
    "fingerprint",
    "limits_of",
    "load_config",
    "load_ends",
    "load_model",
    "load_tokenizer",
]
