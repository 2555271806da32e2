"""What a drafter is made of, counted on its own class without a weight (torch's meta device)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.base import Drafter, DrafterConfig
from drafttrain.drafters.eagle import EagleConfig
from drafttrain.drafters.eagle3 import Eagle3Config
from drafttrain.drafters.medusa import MedusaConfig
from drafttrain.drafters.shared.layer import LayerShape
from drafttrain.drafters.small_lm import SmallLMConfig
from drafttrain.plan.shapes import NORMED, Shape, read_shape


@dataclass(frozen=True)
class Matrix:
    """One product of the training forward: how many tokens it sees, and what the backward does."""

    name: str
    weights: int
    passes: float  # per token of the batch
    gradients: int  # further products in the backward pass: 0 to 2

    @property
    def flops(self) -> float:
        """Floating-point operations per token of the batch, forward and backward."""
        return 2 * self.weights * self.passes * (1 + self.gradients)


@dataclass(frozen=True)
class Decoder:
    """The transformer layers of a drafter; zero layers for heads alone."""

    width: int
    input_width: int  # of what queries, keys and values are made from
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    unroll: int  # times that training runs them
    qk_norm: bool


@dataclass(frozen=True)
class DrafterParts:
    """A drafter as its training and its serving see it."""

    family: str
    num_parameters: int
    num_trained: int
    matrices: tuple[Matrix, ...]
    decoder: Decoder
    draft_vocab: int
    captures: tuple[int, ...]
    fused: int  # width of what is read of the captured layers, joined
    heads: int  # logits per trained position: unrolled depths, or heads
    lends_head: bool  # drafts through the target's own output head
    owns_embedding: bool
    needs_target_law: bool
    unknown: bool  # a drafter of somebody's own: its activations are guessed

    @property
    def flops(self) -> float:
        """Operations per token of a batch in the products of forward and backward."""
        return sum(matrix.flops for matrix in self.matrices)


def drafter_parts(
    config: DrafterConfig, target: Shape, spec: TargetSpec, share: float
) -> DrafterParts:
    """Build the drafter on the meta device and say what it is made of.

    share: of the tokens, those whose prediction is trained; heads run on them alone. ValueError
    where the drafter's own configuration does not fit the target.
    """
    if isinstance(config, SmallLMConfig):
        return _small_lm(config, target, share)
    with torch.device("meta"):
        drafter = config.build(spec)
    if isinstance(config, Eagle3Config):
        return _eagle3(config, drafter, spec, share)
    if isinstance(config, EagleConfig):
        return _eagle(config, drafter, spec, share)
    if isinstance(config, MedusaConfig):
        return _medusa(config, drafter, spec, share)
    weights = count(drafter)
    return DrafterParts(
        family=config.name,
        num_parameters=weights,
        num_trained=weights,
        matrices=tuple(Matrix(n, m.weight.numel(), 1.0, 2) for n, m in linears(drafter)),
        decoder=_no_layers(spec.hidden_size),
        draft_vocab=spec.vocab_size,
        captures=drafter.captures,
        fused=0,
        heads=1,
        lends_head=False,
        owns_embedding=False,
        needs_target_law=True,
        unknown=True,
    )


def count(module: nn.Module) -> int:
    """Return the number of weights, each once."""
    return sum(parameter.numel() for parameter in module.parameters())


def linears(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return every linear layer by name."""
    return [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear)]


def _eagle3(config: Eagle3Config, drafter: Drafter, spec: TargetSpec, share: float) -> DrafterParts:
    shape = config.shape(spec, config.hidden_size)
    # As DraftVocab.most_frequent: fewer if fewer cover drafter.draft_vocab_coverage of the data.
    kept = min(config.draft_vocab_size, spec.vocab_size)
    head = shape.hidden_size * kept
    # The head is built whole and cut by `prepare`, which knows the data.
    weights = count(drafter) - shape.hidden_size * (spec.vocab_size - kept)
    unroll = config.unroll
    matrices = []
    for name, layer in linears(drafter):
        if name == "lm_head":
            matrices.append(Matrix("lm_head", head, unroll * share, 2))
        elif name == "fc":  # its input is the target's, which wants no gradient
            matrices.append(Matrix("fc", layer.weight.numel(), 1.0, 1))
        elif name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj"):
            # Half of their input is the embedding, which all depths project once.
            matrices.append(Matrix(name, layer.weight.numel(), (1 + unroll) / 2, 2))
        else:
            matrices.append(Matrix(name, layer.weight.numel(), float(unroll), 2))
    return DrafterParts(
        family="eagle3",
        num_parameters=weights,
        num_trained=weights,
        matrices=tuple(matrices),
        decoder=_decoder(shape, 2 * shape.hidden_size, 1, unroll, config.qk_norm),
        draft_vocab=kept,
        captures=drafter.captures,
        fused=len(drafter.captures) * spec.hidden_size,
        heads=unroll,
        lends_head=False,
        owns_embedding=config.own_embedding,
        needs_target_law=True,
        unknown=False,
    )


def _eagle(config: EagleConfig, drafter: Drafter, spec: TargetSpec, share: float) -> DrafterParts:
    shape = config.shape(spec)
    own = 2 if config.own_embedding else 1
    matrices = [
        Matrix(name, layer.weight.numel(), 1.0, own if name == "fc" else 2)
        for name, layer in linears(drafter)
    ]
    # Through the target's head, which is not trained.
    matrices.append(Matrix("target head", spec.vocab_size * spec.hidden_size, share, 1))
    weights = count(drafter)
    return DrafterParts(
        family="eagle",
        num_parameters=weights,
        num_trained=weights,
        matrices=tuple(matrices),
        decoder=_decoder(shape, shape.hidden_size, 1, 1, config.qk_norm),
        draft_vocab=spec.vocab_size,
        captures=(),
        fused=2 * spec.hidden_size,
        heads=1,
        lends_head=True,
        owns_embedding=config.own_embedding,
        needs_target_law=True,
        unknown=False,
    )


def _medusa(config: MedusaConfig, drafter: Drafter, spec: TargetSpec, share: float) -> DrafterParts:
    matrices = []
    for name, layer in linears(drafter):
        first = name.endswith("layers.0") and name.startswith("blocks")
        runs = config.num_heads if config.shared_head and name.startswith("lm_heads") else 1
        matrices.append(Matrix(name, layer.weight.numel(), runs * share, 1 if first else 2))
    weights = count(drafter)
    return DrafterParts(
        family="medusa",
        num_parameters=weights,
        num_trained=weights,
        matrices=tuple(matrices),
        decoder=_no_layers(spec.hidden_size),
        draft_vocab=spec.vocab_size,
        captures=(),
        fused=config.num_layers,
        heads=config.num_heads,
        lends_head=False,
        owns_embedding=False,
        needs_target_law=config.needs_target_probs,
        unknown=False,
    )


def _small_lm(config: SmallLMConfig, target: Shape, share: float) -> DrafterParts:
    if config.path is not None:
        shape = read_shape(Path(config.path).expanduser())
    elif config.layers is not None:
        shape = Shape(**vars(target) | {"num_layers": len(config.layers)})
    else:
        own = {
            "architecture": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "tie_embeddings": config.tie_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "layer": None,
        }
        shape = Shape(**vars(target) | own)
    trained = shape.num_parameters
    gradients = 2
    if config.lora_rank:  # beside each projection of attention, as drafters/lora.py has it
        trained = _adapter_parameters(shape, config.lora_rank)
        gradients = 1
    layers = shape.num_layers * shape.linear_parameters
    matrices = [
        Matrix("layers", layers, 1.0, gradients),
        Matrix("lm_head", shape.table_parameters, share, gradients),
    ]
    return DrafterParts(
        family="small_lm",
        num_parameters=shape.num_parameters,
        num_trained=trained,
        matrices=tuple(matrices),
        decoder=_decoder(
            shape, shape.hidden_size, shape.num_layers, 1, shape.architecture in NORMED
        ),
        draft_vocab=shape.vocab_size,
        captures=(),
        fused=0,
        heads=1,
        lends_head=False,
        owns_embedding=True,
        needs_target_law=True,
        unknown=False,
    )


def _no_layers(width: int) -> Decoder:
    return Decoder(width, width, 0, 0, 0, 0, 0, 1, False)


def _decoder(
    shape: LayerShape | Shape, reads: int, num_layers: int, unroll: int, normed: bool
) -> Decoder:
    """Return decoder layers of this shape whose attention reads so wide an input."""
    return Decoder(
        shape.hidden_size,
        reads,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        num_layers,
        unroll,
        normed,
    )


def _adapter_parameters(shape: Shape, rank: int) -> int:
    """Weights of low-rank adapters beside every matrix of the layers (drafters/lora.py)."""
    width, inner = shape.hidden_size, shape.intermediate_size
    query = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    sides = 2 * (width + query) + 2 * (width + keys) + 3 * (width + inner)
    return shape.num_layers * rank * sides
