"""The architecture of a target, from yaml or its config.json: what it weighs, no weight read."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from drafttrain.core.types import TargetSpec
from drafttrain.plan.trace import UnknownCostError
from drafttrain.runtime.untrusted_input import read_object, shown
from drafttrain.target.describe import describe
from drafttrain.target.pretrained import hub
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.inflate import MULTIPLE
from drafttrain.target.pretrained.limits import check_sizes
from drafttrain.target.pretrained.models import EMBEDDED
from drafttrain.target.pretrained.size import parse_size

# Decoders of Llama's form, whose parameters follow from their sizes: biases on queries, keys and
# values, and norms on queries and keys, are all that tells them apart. Others are asked themselves.
BIASED = ("qwen2",)
NORMED = ("qwen3",)
ARCHITECTURES = ("llama", "mistral", *BIASED, *NORMED)
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
# Bytes of a weight in the linear layers, scales included (one per 128 or per row).
QUANTIZED_BYTES = {
    "torchao-int8": 1.01,
    "torchao-int4": 0.53,
    "torchao-float8": 1.01,
    "bnb-8bit": 1.01,
    "bnb-4bit": 0.56,
}


@dataclass(frozen=True)
class LayerCount:
    """Weights of an average layer of another form than Llama's, counted on the model itself."""

    active: float  # of the matrices that a token is multiplied by: of experts, those it is sent to
    matrices: float
    all: float


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder, every size known."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_embeddings: bool
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool = False  # config.json's key; Qwen2 has it on q, k and v without saying so
    mlp_bias: bool = False
    layer: LayerCount | None = None  # None: Llama's, which follows from the sizes

    @property
    def table_parameters(self) -> int:
        """Weights of the embedding, which are those of the head where they are tied."""
        return self.vocab_size * self.hidden_size

    @property
    def readout_parameters(self) -> int:
        """Weights of embedding, head and final norm: what drafters share with the target."""
        return self.table_parameters * (1 if self.tie_embeddings else 2) + self.hidden_size

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrices of one layer: those that every token is multiplied by."""
        if self.layer is not None:
            return round(self.layer.active)
        width, query = self.hidden_size, self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        return width * (2 * query + 2 * keys + 3 * self.intermediate_size)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, norms and biases included."""
        if self.layer is not None:
            return round(self.layer.all)
        query = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        others = 2 * self.hidden_size
        if self.attention_bias or self.architecture in BIASED:
            others += query + 2 * keys
        if self.attention_bias:
            others += self.hidden_size
        if self.mlp_bias:
            others += 2 * self.intermediate_size + self.hidden_size
        if self.architecture in NORMED:
            others += 2 * self.head_dim
        return self.linear_parameters + others

    @property
    def num_parameters(self) -> int:
        """All weights; a head that is the embedding counts once."""
        return self.num_layers * self.layer_parameters + self.readout_parameters

    def bytes(self, dtype_bytes: int, quantization: str | None) -> float:
        """Return what the weights take; embedding, head and norms are not quantised."""
        whole = float(self.num_parameters * dtype_bytes)
        if quantization is None:
            return whole
        each = self.linear_parameters if self.layer is None else self.layer.matrices
        linear = self.num_layers * each
        return whole - linear * (dtype_bytes - QUANTIZED_BYTES[quantization])

    def key_value_bytes(self, dtype_bytes: int) -> int:
        """Return what one token takes in the cache of all layers."""
        return 2 * self.num_layers * self.num_key_value_heads * self.head_dim * dtype_bytes

    def spec(self, name: str, max_positions: int | None) -> TargetSpec:
        """Return what a drafter may know of the target, as loading it would say."""
        return TargetSpec(
            name=name,
            fingerprint="",
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            max_positions=max_positions or self.max_positions,
            eos_token_ids=(),
            bos_token_id=None,
            pad_token_id=None,
        )


def shape_of(config: ModelConfig) -> Shape:
    """Return the architecture that `config` names, without the Hub and without a weight.

    A directory's config.json, a random target's own fields, model.shape where it is of this
    repository, or the config.json in the Hub's cache. UnknownCostError where there is none of
    these, or where what it describes cannot be a target.
    """
    if isinstance(config, RandomModelConfig):
        own = {key: getattr(config, key) for key in (*KEYS, "rope_theta") if key != "rms_norm_eps"}
        return Shape(architecture=config.architecture, rms_norm_eps=1e-6, **own)
    folder = folder_of(config)
    if folder is not None:
        return _of_target(config, folder)
    shape = dict(config.shape or {})
    if shape.pop("of", None) == config.repo:
        return _checked(shape, "model.shape")
    raise UnknownCostError(
        f"model.shape must describe {config.repo}, whose config.json is not in the local cache;"
        " set model.shape, or point model.path at a local copy"
    )


def folder_of(config: ModelConfig) -> Path | None:
    """Return where a target's config.json is; None: not on this machine, or model.shape says it."""
    if config.path or config.embedded:
        return Path(config.path).expanduser() if config.path else EMBEDDED
    if config.repo is None or (config.shape or {}).get("of") == config.repo:
        return None
    cached = hub.cached_config(config.repo, config.revision)
    return cached.parent if cached else None


def _of_target(config: ModelConfig, folder: Path) -> Shape:
    raw = _read(folder)
    if raw.get("model_type") in ARCHITECTURES or raw.get("model_type") not in CONFIG_MAPPING:
        return read_shape(folder)
    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True)
        return counted(settings, describe(config, settings, None, None, fingerprint=""))
    except Exception as error:  # a refusal of ours, or whatever a validator of Transformers raises
        raise UnknownCostError(shown(error, 400)) from error


def settings_of(config: ModelConfig, shape: Shape) -> Any:
    """Return Transformers' configuration of a target: what its files say, or of this shape."""
    folder = folder_of(config)
    if folder is not None:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return plain_settings(shape)


def plain_settings(shape: Shape) -> Any:
    """Return Transformers' configuration of a decoder of Llama's form."""
    sizes = {theirs: getattr(shape, ours) for ours, theirs in KEYS.items()}
    biases = {"attention_bias": shape.attention_bias, "mlp_bias": shape.mlp_bias}
    return AutoConfig.for_model(shape.architecture, **sizes, **biases)


def counted(settings: Any, spec: TargetSpec) -> Shape:
    """Return the shape of any target, its layers counted on the model without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(settings))
    text = settings.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = next((getattr(text, name) for name in names if getattr(text, name, None)), 1)
    share = min(1.0, (getattr(text, "num_experts_per_tok", None) or experts) / experts)
    active = matrices = everything = 0.0
    for weight in model.get_decoder().layers.parameters():
        everything += weight.numel()
        if weight.dim() > 1:
            matrices += weight.numel()
            routed = weight.dim() == 3 and weight.shape[0] == experts
            active += weight.numel() * (share if routed else 1.0)
    count = spec.num_layers
    return Shape(
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=count,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        tie_embeddings=bool(text.tie_word_embeddings),
        max_positions=spec.max_positions,
        rope_theta=spec.rope_theta,
        rms_norm_eps=spec.rms_norm_eps,
        layer=LayerCount(active / count, matrices / count, everything / count),
    )


def inflated(shape: Shape, size: str | None) -> Shape:
    """Return the shape that model.inflate brings nearest to `size`; None leaves it."""
    if size is None:
        return shape
    column = 3 * shape.hidden_size * shape.num_layers
    more = (parse_size(size) - shape.num_parameters) / column
    width = round((shape.intermediate_size + more) / MULTIPLE) * MULTIPLE
    width = max(shape.intermediate_size, width)
    layer = shape.layer
    if layer is not None:
        added = 3 * shape.hidden_size * (width - shape.intermediate_size)
        layer = LayerCount(layer.active + added, layer.matrices + added, layer.all + added)
    return replace(shape, intermediate_size=width, layer=layer)


def read_shape(folder: Path) -> Shape:
    """Return the architecture in a directory's config.json; UnknownCostError says what lacks."""
    file, raw = folder / "config.json", _read(folder)
    found = {ours: raw[theirs] for ours, theirs in KEYS.items() if theirs in raw}
    heads = found.get("num_attention_heads")
    found.setdefault("num_key_value_heads", heads)
    if heads and not found.get("head_dim"):
        found["head_dim"] = found.get("hidden_size", 0) // heads
    found.setdefault(
        "tie_embeddings", False
    )  # as of Llama's form; Transformers leaves defaults out
    found.setdefault("rms_norm_eps", 1e-6)
    found["architecture"] = raw.get("model_type")
    stated = raw.get("rope_parameters")
    rope = stated if isinstance(stated, dict) else {}
    found["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    for key in ("attention_bias", "mlp_bias"):
        found[key] = bool(raw.get(key))
    return _checked(found, str(file))


def _read(folder: Path) -> dict[str, Any]:
    try:
        raw = read_object(folder / "config.json")
        check_sizes(raw, str(folder))
    except (OSError, ValueError) as error:
        raise UnknownCostError(
            f"{folder / 'config.json'} must describe a model, but cannot be read: {error}"
        ) from None
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


def _checked(values: dict[str, Any], origin: str) -> Shape:
    kind = values.get("architecture")
    if kind not in ARCHITECTURES:
        raise UnknownCostError(
            f"{origin} must be of a kind that Transformers knows to be planned, got {shown(kind)}"
        )
    missing = [key for key in (*KEYS, "rope_theta") if values.get(key) is None]
    if missing:
        raise UnknownCostError(f"{origin} must state {', '.join(missing)}")
    unknown = [key for key in values if key not in Shape.__dataclass_fields__]
    if unknown:
        raise UnknownCostError(f"{origin} has no {unknown[0]}")
    return Shape(**values)
