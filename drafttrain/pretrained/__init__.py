"""Loading Transformers models and tokenizers, safely: from a directory, the Hub, or drawn."""

from drafttrain.pretrained.ends import directory, load_ends
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
from drafttrain.pretrained.rollable import refuse_unless_rollable

__all__ = [
    "EMBEDDED",
    "SCHEMES",
    "ModelConfig",
    "RandomModelConfig",
    "attention_of",
    "directory",
    "fingerprint",
    "load_config",
    "load_ends",
    "load_model",
    "load_tokenizer",
    "refuse_unless_rollable",
]
