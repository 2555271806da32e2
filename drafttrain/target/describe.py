"""What a target's configuration says: its shape, its readout, whether it can be rolled back."""

from typing import Any

from torch import nn

from drafttrain.pretrained import ModelConfig
from drafttrain.readout import Readout
from drafttrain.types import TargetSpec


def describe(config: ModelConfig, model_config: Any, fingerprint: str) -> TargetSpec:
    """Fill a TargetSpec from Transformers' configuration."""
    text = model_config.get_text_config(decoder=True)
    eos = text.eos_token_id
    rope = text.rope_parameters
    heads = text.num_attention_heads
    return TargetSpec(
        name=config.name,
        fingerprint=fingerprint,
        architecture=text.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=text.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        max_positions=config.max_positions or text.max_position_embeddings,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
    )


def read_out(model: nn.Module) -> Readout:
    """Return the readout of a Transformers causal language model; tied weights share a tensor."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return Readout(
        embedding.detach(),
        embedding.detach() if head is embedding else head.detach(),
        norm=model.get_decoder().norm.weight.detach(),
    )
