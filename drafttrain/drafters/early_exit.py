"""Early exit: the target's first layers, an adapter, the target's head (arXiv:2404.18911, 2024).

Kangaroo's kind of drafter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core.losses import TokenLossConfig
from drafttrain.core.ops.layer_calls import call_layer, device_of, dtype_of
from drafttrain.core.ops.layers import (
    Attention,
    ByHead,
    LayerShape,
    RMSNorm,
    Rotation,
    attend_cached,
)
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import attention_mask
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.drafters.base import (
    DrafterConfig,
    TrainingChance,
    last_of,
    load_exactly,
    start_with,
)
from drafttrain.drafters.shared.causal import CausalState, TokenDrafter
from drafttrain.drafters.shared.layer import require_scaling, scaling_of
from drafttrain.drafters.shared.parallel import Attend, BlockLayer
from drafttrain.drafters.shared.publications import About
from drafttrain.drafters.shared.text_losses import next_token_loss
from drafttrain.runtime import limits
from drafttrain.target.pretrained.limits import final_norm_of

Hidden = Float[Tensor, "batch seq hidden"]
Mixed = Float[Tensor, "batch head seq head_dim"]


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig(TokenLossConfig, DrafterConfig):
    """How many of the target's layers it runs, what these have beyond Llama's, and the loss."""

    exit_layer: limits.PositiveInt
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

    def build(self, spec: TargetSpec) -> "EarlyExit":
        need = f"be below {spec.num_layers}, the layers of {spec.name}"
        self.require("exit_layer", self.exit_layer < spec.num_layers, need)
        return EarlyExit(self, spec)


class Adapter(nn.Module):
    """Attention between two norms, the second of which stands before the target's head."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def enter(self, hidden: Hidden, turn: Rotation) -> ByHead:
        """Return rotated queries and keys, and values."""
        return self.self_attn.project(self.input_layernorm(hidden), turn)

    def finish(self, hidden: Hidden, mixed: Mixed) -> Hidden:
        """Return what the head reads: the residual stream with attention added, after the norm."""
        return self.norm(hidden + self.self_attn.merge(mixed))


class EarlyExit(TokenDrafter):
    """Runs frozen copies of the target's first layers on every token, then an adapter of its own.

    A drafter is lent the target's embedding and head, but not its layers: where Kangaroo's target
    goes on from the hidden states and keys of the drafted tokens, this drafter has copies of the
    layers with a cache of their own, and verification starts anew. What it drafts is the same; a
    cycle costs the target `exit_layer` layers more, and the copies stand among its weights.

    Training runs the copies too, instead of reading captured features: so that each depth of
    decoding computes what training computed, in the same precision.
    """

    about = About("An early-exit", "2404.18911")
    begins_from_target = True
    reach = 1  # the target's distribution of a trained token is one position before it
    depth_terms = ("depth_1",)  # training has one depth: every other is computed alike

    def __init__(self, config: EarlyExitConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config: EarlyExitConfig = config
        self.spec = spec
        self.shape = config.shape(spec)
        layers = range(config.exit_layer)
        self.shallow = nn.ModuleList(BlockLayer(self.shape) for _ in layers)
        freeze(self.shallow.requires_grad_(False))
        self.adapter = Adapter(self.shape)

    def initialise(self, model: Any, tokenizer: Any) -> None:
        """Copy the target's first layers; ValueError if these compute something else than ours."""
        copy_layers(self.shallow, model, self.config, self.spec, device_of(self))

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Begin with the target's final norm, as its head does."""
        start_with(self.adapter.norm, readout.norm)

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the token losses at every trained position, against the target's distribution."""
        readout, dtype = features.readout, dtype_of(self)
        turn = self.shape.rotation(batch.positions, dtype)
        mask = attention_mask(batch)
        with torch.no_grad():
            hidden = readout.embed(batch.tokens).to(dtype)
            hidden = run_layers(self.shallow, hidden, turn, lambda _, heads: attend(heads, mask))
        state = call_layer(self._adapt, hidden, turn, mask)
        return {"depth_1": next_token_loss(self.config, state, batch, features)}

    def _adapt(self, hidden: Hidden, turn: Rotation, mask: Tensor | None) -> Hidden:
        return self.adapter.finish(hidden, attend(self.adapter.enter(hidden, turn), mask))

    def after(
        self, state: CausalState, tokens: Tensor, counts: Sequence[int] | None
    ) -> Float[Tensor, "batch width draft_vocab"]:
        cache, readout, dtype = state.cache, state.readout, dtype_of(self)

        def run(tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            turn = self.shape.rotation(positions, dtype)
            hidden = readout.embed(tokens).to(dtype)
            hidden = run_layers(
                *(self.shallow, hidden, turn),
                lambda number, heads: attend_cached(heads, cache, number),
            )
            heads = self.adapter.enter(hidden, turn)
            return (self.adapter.finish(hidden, attend_cached(heads, cache, len(self.shallow))),)

        positions = cache.positions(tokens.shape[1], tokens.device)
        # Graphs read the embedding where it was, and a drafter may meet another copy of its target.
        key = readout.embedding.data_ptr()
        (hidden,) = cache.run(run, (tokens, positions), counts, key=key)
        return readout.logits(last_of(hidden, counts).to(readout.head.dtype))


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
    layers: nn.ModuleList,
    model: Any,
    config: EarlyExitConfig,
    spec: TargetSpec,
    device: torch.device,
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
