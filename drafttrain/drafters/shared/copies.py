"""Frozen copies of layers of the target, for drafters that run them: a drafter is lent none."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.core.ops.layers import ByHead, LayerShape, RMSNorm, Rotation
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.base import DrafterConfig, load_exactly
from drafttrain.drafters.shared.layer import require_scaling, scaling_of
from drafttrain.drafters.shared.parallel import BlockLayer
from drafttrain.target.pretrained.limits import final_norm_of

Hidden = Float[Tensor, "batch seq hidden"]
Mixed = Float[Tensor, "batch head seq head_dim"]
Attend = Callable[[int, ByHead], Mixed]  # of a layer, by its number


@dataclass(frozen=True, kw_only=True)
class CopiesConfig(DrafterConfig):
    """What the target's layers have beyond Llama's."""

    attention_bias: bool
    qk_norm: bool
    rope_scaling: Any  # see `scaling_of`

    def __post_init__(self) -> None:
        super().__post_init__()
        require_scaling(self.rope_scaling)

    def shape(self, spec: TargetSpec) -> LayerShape:
        """Return the shape of the target's layers."""
        return replace(
            LayerShape.of(spec),
            attention_bias=self.attention_bias,
            qk_norm=self.qk_norm,
            rope_scaling=scaling_of(self.rope_scaling, spec),
        )


def attend(heads: ByHead, mask: Tensor | None) -> Mixed:
    """Return the attention of whole texts; mask: None for plain causality."""
    queries, keys, values = heads
    return unrolled_attention(queries, [(keys, values)], mask)


def freeze(module: nn.Module) -> None:
    """Make buffers of weights that need no gradient: moved and saved with a module."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if not weight.requires_grad:
                delattr(part, name)
                part.register_buffer(name, weight.detach())


def run_layers(
    layers: Iterable[nn.Module], hidden: Hidden, turn: Rotation, attend: Attend
) -> Hidden:
    """Return the hidden states after all of these layers."""
    for number, layer in enumerate(layers):
        assert isinstance(layer, BlockLayer)
        queries, keys, values = layer.enter(hidden, turn)
        hidden = layer.finish(hidden, attend(number, (queries, keys, values)))
    return hidden


@torch.no_grad()
def copy_layers(
    layers: nn.ModuleList, model: Any, config: CopiesConfig, spec: TargetSpec, device: torch.device
) -> None:
    """Copy the target's first layers, in float32; ValueError if ours compute otherwise."""
    needed = (
        f"drafter={config.name} copies layers like Llama's, and those of {spec.name} "
        f"({spec.architecture}) differ: try drafter.attention_bias, drafter.qk_norm and "
        "drafter.rope_scaling, or another drafter"
    )
    decoder = model.get_decoder()
    theirs = list(getattr(decoder, "layers", []))
    if len(theirs) < len(layers):
        raise ValueError(needed)
    tokens = torch.arange(min(8, spec.vocab_size), device=model.device)[None]
    # Far apart, so that another scaling of positions is noticed. They are one text: without a
    # mask Transformers would take gaps between them for ends of texts.
    positions = tokens * (spec.max_positions // 8)
    asked: dict[str, Any] = {"use_cache": False, "output_hidden_states": True}
    asked |= {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}
    found = decoder(input_ids=tokens, **asked).hidden_states
    states = [state.to(device).float() for state in found]
    shape = config.shape(spec)
    turn = shape.rotation(positions.to(device), torch.float32)
    ours = nn.ModuleList([BlockLayer(shape)]).to(device, torch.float32)
    for number, layer in enumerate(layers):
        weights = {name: tensor.float() for name, tensor in theirs[number].state_dict().items()}
        try:
            load_exactly(ours[0], weights)
        except ValueError as error:
            raise ValueError(f"{needed}; {error}") from error
        hidden = run_layers(ours, states[number], turn, lambda _, heads: attend(heads, None))
        if number + 1 == len(theirs):  # the last state of Transformers is behind the final norm
            norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps).to(device)
            norm.weight.copy_(final_norm_of(decoder).weight)
            hidden = norm(hidden)
        expected = states[number + 1]
        if not (hidden - expected).abs().max() <= 0.02 * expected.abs().max():
            raise ValueError(needed)
        for place, part in layer.named_modules():
            for key in part._buffers:
                part._buffers[key] = weights[f"{place}.{key}"].to(device, copy=True)
