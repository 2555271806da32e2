"""The architecture of a target and its size, from yaml or its config.json, without its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from drafttrain.core.types import TargetSpec
from drafttrain.plan.trace import UnknownCostError
from drafttrain.runtime.untrusted_input import read_object, shown
from drafttrain.target.describe import describe
from drafttrain.target.pretrained import hub
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.files import check_kind
from drafttrain.target.pretrained.inflate import inflated_width
from drafttrain.target.pretrained.limits import check_sizes, without_weights
from drafttrain.target.pretrained.models import EMBEDDED, local_directory
from drafttrain.target.pretrained.quantize import WEIGHT_BYTES

KEYS = {  # ours -> config.json's
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "tie_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
SIZES = (*KEYS, "architecture", "rope_theta")  # what model.shape must state
SHAPED = ("llama", "mistral", "qwen2", "qwen3")  # whose model these sizes describe whole
BIASES = ("attention_bias", "mlp_bias")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Bits of a weight of checkpoints that come quantised and do not state them.
BITS = {"awq": 4, "fp8": 8, "fbgemm_fp8": 8, "finegrained_fp8": 8, "mxfp4": 4}
SCALES = 0.03  # bytes for each weight of such a checkpoint: a scale and a zero point per group


@dataclass(frozen=True)
class LayerCount:
    """Weights of an average layer, counted on the model itself."""

    active: float  # of the matrices that a token is multiplied by; of experts, only those chosen
    matrices: float
    all: float
    linear: float  # of linear modules, which model.quantization makes small; fused experts are none
    routed: float  # of experts, each of which a token chooses with probability `chosen`
    chosen: float


@dataclass(frozen=True, kw_only=True)
class Shape(TargetSpec):
    """A target as drafters see it, and the number of its weights."""

    tie_embeddings: bool
    layer: LayerCount
    quantized_bytes: float | None  # of a matrix's weight, in a checkpoint that comes quantised

    @property
    def table_parameters(self) -> int:
        """Weights of the embedding, which are those of the head where they are tied."""
        return self.vocab_size * self.hidden_size

    @property
    def readout_parameters(self) -> int:
        """Weights of embedding, head and final norm: what drafters share with the target."""
        return self.table_parameters * (1 if self.tie_embeddings else 2) + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights; a head that is the embedding counts once."""
        return self.num_layers * round(self.layer.all) + self.readout_parameters

    def bytes(self, dtype_bytes: int, quantization: str | None) -> float:
        """Return the bytes of the weights; embedding, head and norms are not quantised."""
        small, each = 0.0, float(dtype_bytes)
        if self.quantized_bytes is not None:
            small, each = self.layer.matrices, self.quantized_bytes
        elif quantization is not None:
            small, each = self.layer.linear, WEIGHT_BYTES[quantization]
        return self.num_parameters * dtype_bytes - self.num_layers * small * (dtype_bytes - each)

    def share_read(self, tokens: int) -> float:
        """Return the share of the weights that a pass over so many tokens reads.

        Of experts those that some token chose, as if each token chose at random.
        """
        unread = self.layer.routed * (1 - self.layer.chosen) ** tokens
        return 1 - self.num_layers * unread / self.num_parameters


def shape_of(config: ModelConfig) -> Shape:
    """Return the target that `config` names as drafters see it: before it is inflated.

    It needs neither the Hub nor weights. UnknownCostError where nothing local describes the target,
    or where the description is not that of a target.
    """
    settings = settings_of(config)
    try:
        return counted(config, settings)
    except Exception as error:  # a refusal of ours, or whatever Transformers raises
        raise UnknownCostError(shown(error, 400)) from error


def inflated(config: ModelConfig, shape: Shape) -> Shape:
    """Return the shape of a target after model.inflate; null leaves it as it is."""
    if config.inflate is None:
        return shape
    settings = settings_of(config)
    width = inflated_width(config.inflate, settings, config.name, trust_code=False)
    settings.get_text_config(decoder=True).intermediate_size = width
    return counted(config, settings)


def settings_of(config: ModelConfig) -> Any:
    """Return Transformers' configuration of a target, as `shape_of` finds it.

    It comes from a random target's own fields, from a directory, from model.shape where that is of
    this repository, or from the Hub's cache.
    """
    sizes: dict[str, Any] = dict(config.shape or {})
    folder: Path | None = None
    if isinstance(config, RandomModelConfig):
        sizes = {key: value for key, value in vars(config).items() if key in SIZES}
    elif config.path or config.embedded:
        folder = EMBEDDED
        if config.path:
            folder = local_directory(config.path, config.origin, weights=False)
        check_kind(folder, config.origin)
    elif sizes.pop("of", None) == config.repo:
        sizes.pop("gated", None)
        for key in [key for key in SIZES if sizes.get(key) is None]:
            raise UnknownCostError(f"model.shape must state {key}")
        for key in sizes.keys() - {*SIZES, *BIASES}:
            raise UnknownCostError(f"model.shape has no {key}")
    else:
        cached = hub.cached_config(config.repo or "", config.revision)
        if cached is None:
            raise UnknownCostError(
                f"model.shape must describe {config.repo}, whose config.json is not in the local "
                "cache; set model.shape, or point model.path at a local copy"
            )
        folder = cached.parent
    if folder is None:
        origin, kind = "model.shape", sizes["architecture"]
    else:
        origin, kind = str(folder / "config.json"), _kind_in(folder)
    if not isinstance(kind, str) or kind not in (SHAPED if folder is None else CONFIG_MAPPING):
        raise UnknownCostError(
            f"{origin} must be of a kind that Transformers knows to be planned, got {shown(kind)}"
        )
    try:
        if folder is not None:
            return AutoConfig.from_pretrained(folder, local_files_only=True)
        told = {theirs: sizes[ours] for ours, theirs in KEYS.items() if ours in sizes}
        told |= {key: sizes[key] for key in BIASES if key in sizes}
        check_sizes(told, origin, "")
        told["rope_parameters"] = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
        return AutoConfig.for_model(kind, sliding_window=None, **told)
    except Exception as error:  # whatever a validator of Transformers raises
        raise UnknownCostError(shown(error, 400)) from error


def _kind_in(folder: Path) -> Any:
    try:
        raw = read_object(folder / "config.json")
        check_sizes(raw, str(folder))
    except (OSError, ValueError) as error:
        raise UnknownCostError(
            f"{folder / 'config.json'} must describe a model, but cannot be read: {error}"
        ) from None
    return raw.get("model_type")


def counted(config: ModelConfig, settings: Any) -> Shape:
    """Return the shape of any target, its layers counted on the model without weights."""
    spec = describe(config, settings, None, None)
    model = without_weights(settings, trust_code=False)
    text = settings.get_text_config(decoder=True)
    experts = next((getattr(text, name) for name in EXPERTS if getattr(text, name, None)), 1)
    share = min(1.0, (getattr(text, "num_experts_per_tok", None) or experts) / experts)
    matrices = everything = routed = 0.0
    layers = model.get_decoder().layers
    for weight in layers.parameters():
        everything += weight.numel()
        if weight.dim() > 1:
            matrices += weight.numel()
        if weight.dim() == 3 and weight.shape[0] == experts:
            routed += weight.numel()
    linear = sum(part.weight.numel() for part in layers.modules() if isinstance(part, nn.Linear))
    totals = {"matrices": matrices, "all": everything, "linear": linear, "routed": routed}
    totals["active"] = matrices - routed * (1 - share)
    each = {name: total / spec.num_layers for name, total in totals.items()}
    return Shape(
        **vars(spec),
        tie_embeddings=bool(text.tie_word_embeddings),
        layer=LayerCount(chosen=share, **each),
        quantized_bytes=quantized_bytes(settings),
    )


def quantized_bytes(settings: Any) -> float | None:
    """Return the bytes of a weight of a checkpoint that comes quantised; None: it does not.

    UnknownCostError where its configuration does not say how small they are.
    """
    given = getattr(settings, "quantization_config", None)
    if given is None:
        return None
    told: dict[str, Any] = given if isinstance(given, dict) else given.to_dict()
    groups = told.get("config_groups")  # of compressed-tensors
    weights = [group.get("weights") or {} for group in groups.values()] if groups else []
    stated = [told.get("bits"), *(each.get("num_bits") for each in weights)]
    stated += [4 if told.get("load_in_4bit") else 8 if told.get("load_in_8bit") else None]
    stated += [BITS.get(told.get("quant_method", ""))]
    bits = next((each for each in stated if each), None)
    if bits is None:
        raise UnknownCostError("quantization_config must state the bits of a weight to be planned")
    return float(bits) / 8 + SCALES
