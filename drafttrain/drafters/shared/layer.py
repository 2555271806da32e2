"""The decoder layer of EAGLE drafters: shaped as the target's unless configured otherwise."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core.ops.layers import Attention, Rotation, rotation
from drafttrain.core.readout import Readout
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.base import DrafterConfig

# Others change with the length of the text, which a cache of rotated keys cannot follow.
ROPE_SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class LayerConfig(DrafterConfig):
    """What the layer may have of its own; null takes the target's."""

    intermediate_size: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    rms_norm_eps: float | None
    rope_theta: float | None
    rope_scaling: dict[str, Any] | None
    attention_bias: bool
    attention_output_bias: bool
    qk_norm: bool
    own_embedding: bool

    def __post_init__(self) -> None:
        for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(
                    f"drafter.{key} must be at least 1, or null for the target's, got {value}"
                )
        for key in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(
                    f"drafter.{key} must be above 0, or null for the target's, got {value}"
                )
        kind = (self.rope_scaling or {}).get("rope_type", ROPE_SCALINGS[0])
        if kind not in ROPE_SCALINGS:
            raise ValueError(
                f"drafter.rope_scaling.rope_type must be one of {', '.join(ROPE_SCALINGS)}, "
                f"got {kind}"
            )

    def shape(self, spec: TargetSpec, hidden_size: int | None = None) -> "LayerShape":
        """Return the layer's shape for a target; `hidden_size` None is the target's too.

        ValueError where heads do not divide.
        """
        shape = LayerShape(
            hidden_size=hidden_size or spec.hidden_size,
            intermediate_size=self.intermediate_size or spec.intermediate_size,
            num_attention_heads=self.num_attention_heads or spec.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads or spec.num_key_value_heads,
            head_dim=self.head_dim or spec.head_dim,
            rms_norm_eps=self.rms_norm_eps or spec.rms_norm_eps,
            rope_theta=self.rope_theta or spec.rope_theta,
            rope_scaling=self.rope_scaling,
            attention_bias=self.attention_bias,
            attention_output_bias=self.attention_output_bias,
            qk_norm=self.qk_norm,
        )
        if shape.num_attention_heads % shape.num_key_value_heads:
            raise ValueError(
                "drafter.num_key_value_heads must divide drafter.num_attention_heads "
                f"({shape.num_attention_heads}), got {shape.num_key_value_heads}"
            )
        if shape.head_dim % 2:
            raise ValueError(f"drafter.head_dim must be even (rotary pairs), got {shape.head_dim}")
        if shape.hidden_size != spec.hidden_size and not self.own_embedding:
            raise ValueError(
                f"drafter.own_embedding must be true for drafter.hidden_size={shape.hidden_size}: "
                f"the target's embedding is {spec.hidden_size} wide"
            )
        return shape


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer, every size known."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool
    attention_output_bias: bool
    qk_norm: bool

    def attention(self, input_width: int) -> Attention:
        """Make the layer's attention, which reads `input_width` values a position."""
        return Attention(
            self.hidden_size,
            input_width,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            bias=self.attention_bias,
            output_bias=self.attention_output_bias,
            norm_eps=self.rms_norm_eps if self.qk_norm else None,
        )

    def rotation(self, positions: Int[Tensor, "*batch seq"], dtype: torch.dtype) -> Rotation:
        """Return the rotation of each position, in `dtype`."""
        if self.rope_scaling is None:
            return rotation(positions, self.head_dim, self.rope_theta, dtype)
        frequencies, factor = self._scaled
        angles = positions[..., None].float() * frequencies.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)
        return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))

    @cached_property
    def _scaled(self) -> tuple[Float[Tensor, " pair"], float]:
        """Frequencies as Transformers scales them, and what cosines and sines are multiplied by."""
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        assert self.rope_scaling is not None
        parameters = {**self.rope_scaling, "rope_theta": self.rope_theta}
        config = LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            rope_parameters=parameters,
        )
        with torch.device("cpu"):  # a drafter may be described on the meta device
            return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def own_embedding(wanted: bool, spec: TargetSpec, width: int) -> nn.Embedding | None:
    """Make the drafter's own token embedding, if it has one."""
    return nn.Embedding(spec.vocab_size, width) if wanted else None


def embed(
    own: nn.Embedding | None, readout: Readout, tokens: Int[Tensor, "batch seq"], dtype: torch.dtype
) -> Float[Tensor, "batch seq hidden"]:
    """Return what the drafter reads of tokens: its own embedding, or the target's."""
    return (readout.embed(tokens) if own is None else own(tokens)).to(dtype)


def serving_keys(shape: LayerShape, spec: TargetSpec) -> dict[str, Any]:
    """Return the keys that serving configurations of one-layer drafters share."""
    keys = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": False,
        "attention_bias": shape.attention_bias,
        "mlp_bias": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0] if spec.eos_token_ids else None,
    }
    if shape.rope_scaling is not None:
        keys["rope_scaling"] = dict(shape.rope_scaling)
    return keys
