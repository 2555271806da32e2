"""A small language model distilled from the target (DistillSpec, Zhou et al., 2023, 2310.08461)."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core.losses import TokenLossConfig
from drafttrain.core.ops import layer_calls
from drafttrain.core.ops.layer_calls import dtype_of
from drafttrain.core.ops.layers import LentLinear
from drafttrain.core.ops.ragged_cache import additive
from drafttrain.core.placed_batch import attention_mask
from drafttrain.core.readout import Readout
from drafttrain.core.sampling_config import Temperature
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.drafters.base import DrafterConfig, TrainingChance, load_exactly
from drafttrain.drafters.serving.causal_lm_layout import CausalLMLayout
from drafttrain.drafters.shared.causal import CausalDrafter
from drafttrain.drafters.shared.lora import add_lora, merge_lora
from drafttrain.drafters.shared.model_source import draft_source, load_draft_model, local_settings
from drafttrain.drafters.shared.on_policy import OwnWords
from drafttrain.drafters.shared.publications import About
from drafttrain.drafters.shared.text_losses import next_token_loss
from drafttrain.drafters.shared.vocabularies import check_same
from drafttrain.runtime import limits
from drafttrain.runtime.settings import Limit, require
from drafttrain.runtime.untrusted_input import parse_json, shown
from drafttrain.target.pretrained.files import check_settings
from drafttrain.target.pretrained.limits import check_sizes
from drafttrain.target.pretrained.models import attention_of

ASCENDING = Limit("be distinct and ascend, as in [0,3,7]", lambda each: each == sorted({*each}))
HEADS = ("num_attention_heads", "num_key_value_heads")
MOST_SETTINGS = 1 << 20
SETTINGS = "settings"  # a tensor among the weights: the model's configuration as JSON, in bytes
VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures")


@dataclass(frozen=True, kw_only=True)
class SmallLMConfig(TokenLossConfig, DrafterConfig):
    """The origin of the initial weights, the shape of a fresh model, and the training signal."""

    path: str | None
    revision: str | None
    allow_pickle: bool
    layers: Annotated[list[limits.NonNegativeInt], limits.NOT_EMPTY, ASCENDING] | None
    hidden_size: limits.PositiveInt
    intermediate_size: limits.PositiveInt
    num_layers: limits.PositiveInt
    num_attention_heads: limits.PositiveInt
    num_key_value_heads: limits.PositiveInt
    tie_embeddings: bool
    on_policy: limits.Fraction  # of the conversations
    on_policy_temperature: Temperature
    lora_rank: limits.NonNegativeInt  # 0: all weights are trained
    lora_alpha: limits.PositiveInt

    layout = CausalLMLayout()

    def __post_init__(self) -> None:
        super().__post_init__()
        one = self.path is None or self.layers is None
        self.require("layers", one, "be null with drafter.path: the weights have one origin")
        fresh = self.path is None and self.layers is None
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        even = f"be an even multiple of drafter.num_attention_heads ({heads})"
        self.require("hidden_size", self.hidden_size % (2 * heads) == 0, even)
        divide = f"divide drafter.num_attention_heads ({heads})"
        self.require("num_key_value_heads", heads % groups == 0, divide)
        if self.on_policy and self.losses.get("hard_cross_entropy"):
            raise ValueError(
                "drafter.losses must compare with the target where drafter.on_policy is above 0, "
                "got hard_cross_entropy, which would learn from the drafter's own samples"
            )
        origin = ": there is nothing to adapt; set drafter.path or drafter.layers"
        self.require("lora_rank", not (self.lora_rank and fresh), "be 0 for a fresh model", origin)

    def build(self, spec: TargetSpec) -> "SmallLM":
        return SmallLM(self, spec)


class CalledLayers(nn.ModuleList):
    """The layers of a decoder, under their own names, called through `call_layer`."""

    def __iter__(self) -> Iterator[Any]:
        return iter([CalledLayer(layer) for layer in self._modules.values()])


class CalledLayer:
    """A stand-in for a decoder layer: everything but the call is the layer's own."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        return layer_calls.call_layer(self.layer, *inputs, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class SmallLM(CausalDrafter):
    """A causal language model with the target's vocabulary, trained to predict as the target."""

    about = About("A distilled", "2310.08461")
    reach = 1  # the target's distribution of a trained token is one position before it
    depth_terms = ("depth_1",)  # training has one depth

    def __init__(self, config: SmallLMConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec, None)
        self.config: SmallLMConfig = config
        self.register_buffer(SETTINGS, torch.zeros(0, dtype=torch.uint8))
        # Its weights come from the target, or its tokens are checked against the target's.
        self.begins_from_target = config.path is not None or config.layers is not None
        if config.on_policy:
            self.text_source = OwnWords(config.on_policy, config.on_policy_temperature)
        if not self.begins_from_target:
            self._adopt(_from_settings(self._fresh_settings()))

    def _fresh_settings(self) -> dict[str, Any]:
        config, spec = self.config, self.spec
        return {
            "model_type": "llama",
            "vocab_size": spec.vocab_size,
            **{key: getattr(config, key) for key in ("hidden_size", "intermediate_size", *HEADS)},
            "num_hidden_layers": config.num_layers,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "max_position_embeddings": spec.max_positions,
            "rms_norm_eps": spec.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
            "tie_word_embeddings": config.tie_embeddings,
            "bos_token_id": spec.bos_token_id,
            "eos_token_id": list(spec.eos_token_ids) or None,
            "pad_token_id": spec.pad_token_id,
        }

    def _adopt(self, model: Any) -> None:
        """Use a model, trainable and in float32; its configuration is saved with the weights."""
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear):
            lent = LentLinear(head.in_features, head.out_features, head.bias is not None, "meta")
            lent.weight, lent.bias = head.weight, head.bias
            model.set_output_embeddings(lent)
        self.take(model.float().requires_grad_(True))
        settings = lasting(model.config.to_diff_dict())
        text = json.dumps(settings, sort_keys=True).encode()
        setattr(self, SETTINGS, torch.tensor(list(text), dtype=torch.uint8))
        # Transformers' class of layers, whatever the architecture.
        decoder = self._decoder[0]
        stacks = [(n, m) for n, m in decoder.named_children() if isinstance(m, nn.ModuleList)]
        self._has_layers = bool(stacks)
        for name, stack in stacks[:1]:
            setattr(decoder, name, CalledLayers(stack._modules.values()))

    def initialise(self, model: Any, tokenizer: Any) -> None:
        """Load the initial weights: those of another model, or some of the target's layers."""
        config = self.config
        if config.path is not None:
            pickled = config.allow_pickle
            source = draft_source(config.name, config.path, config.revision, allow_pickle=pickled)
            own, own_tokenizer = load_draft_model(source, torch.float32)
            check_same(tokenizer, own_tokenizer, f"drafter.path={config.path}")
            if own.get_input_embeddings().weight.shape[0] != self.spec.vocab_size:
                # Rows beyond the tokens: engines require as many as the target has.
                own.resize_token_embeddings(self.spec.vocab_size, mean_resizing=False)
            self._adopt(own)
        elif config.layers is not None:
            self._adopt(with_layers(model, config.layers, self.spec))
        self._adapt()

    def outline(self, target: Callable[[], Any]) -> None:
        """Use a model of the initial weights' shape, from its configuration alone."""
        config = self.config
        if config.path is not None:
            settings = local_settings(config.name, config.path, config.revision).to_diff_dict()
            settings = settings | {"vocab_size": self.spec.vocab_size}
        elif config.layers is not None:
            settings = with_layers_of(target(), config.layers, self.spec)
        else:
            return
        self._adopt(_from_settings(settings))
        self._adapt()

    def _adapt(self) -> None:
        if self.config.lora_rank:
            add_lora(self.model, self.config.lora_rank, self.config.lora_alpha)

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Initialise a fresh model's embedding and head as narrow images of the target's."""
        if self.begins_from_target:
            return
        tables = [(self.model.get_input_embeddings(), readout.embedding)]
        if not self.config.tie_embeddings:
            tables.append((self.model.get_output_embeddings(), readout.head))
        with torch.no_grad():
            for own, theirs in tables:
                if own.weight.shape[1] < theirs.shape[1]:
                    image = narrow_image(theirs.float(), token_counts, own.weight.shape[1])
                    own.weight.copy_(image * (own.weight.std() / image.std()))

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the token losses at every trained position against the target's distribution."""
        told = (self.config, self._hidden(batch), batch, features)
        term = next_token_loss(*told, heads=lambda: [self.output_head()], lent=[self._head[0]])
        return {"depth_1": term}

    def _hidden(self, batch: Batch) -> Float[Tensor, "batch seq width"]:
        if layer_calls.asked() and not self._has_layers:
            raise ValueError(
                "hardware.gradient_checkpointing and hardware.compile must be false for a drafter "
                f"without a list of layers, got a {self.model.config.model_type}"
            )
        mask = attention_mask(batch)
        if mask is not None and self.eager:
            mask = additive(mask, dtype_of(self))
        output = self._decoder[0](
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=mask,
            use_cache=False,
        )
        return output.last_hidden_state

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Load the model that a checkpoint's settings describe; adapters are merged."""
        settings = tensors.get(SETTINGS)
        if settings is None or settings.dtype != torch.uint8 or settings.dim() != 1:
            raise ValueError(f"these weights are not small_lm's: {SETTINGS} is missing or no text")
        if len(settings) > MOST_SETTINGS:
            raise ValueError(f"these weights are not small_lm's: {SETTINGS} is too long")
        plain = parse_json(bytes(settings.tolist()), SETTINGS)
        self._adopt(_from_settings(_checked(plain, tensors)))
        setattr(self, SETTINGS, settings)
        self._adapt()
        load_exactly(self, tensors)
        if self.config.lora_rank:
            merge_lora(self.model)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return a model as Transformers writes it, adapters merged."""
        model = self.model
        if self.config.lora_rank:
            model = copy.deepcopy(model)
            merge_lora(model)
        settings = lasting(model.config.to_diff_dict())
        tensors = dict(model.state_dict())
        if model.config.get_text_config(decoder=True).tie_word_embeddings:
            del tensors["lm_head.weight"]
        return {"architectures": [type(model).__name__], **settings}, tensors

    def from_serving(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        model = _from_settings(config)
        if model.config.get_text_config(decoder=True).tie_word_embeddings:
            tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
        load_exactly(model, tensors)
        self._adopt(model)


def _checked(settings: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a checkpoint's settings; ValueError unless its tensors fit the model they describe.

    Checked before the model is built, which takes the memory that the settings declare.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"{SETTINGS} must be an object, got {type(settings).__name__}")
    check_settings(settings, SETTINGS)
    check_sizes(settings, SETTINGS)
    try:
        with torch.device("meta"):
            declared = sum(p.numel() for p in _from_settings(settings).parameters())
    except Exception as error:  # Transformers' validators raise errors of many classes
        raise ValueError(f"{SETTINGS} must describe a model: {shown(error, 400)}") from error
    held = sum(tensor.numel() for tensor in tensors.values())
    if declared > held:
        raise ValueError(
            f"{SETTINGS} must describe these weights, but declares {declared:,} numbers of {held:,}"
        )
    return settings


def lasting(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the keys in which two copies of one configuration may differ."""
    return {key: value for key, value in settings.items() if key not in VOLATILE}


def _from_settings(settings: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(**lasting(settings))
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention_of(config)
    )


def with_layers(target: Any, layers: list[int], spec: TargetSpec) -> Any:
    """Return a copy of the target with only these layers, in float32."""
    settings = with_layers_of(target.config, layers, spec)
    model = _from_settings(settings)
    weights = target.state_dict()
    places = {f"layers.{new}.": f"layers.{old}." for new, old in enumerate(layers)}
    chosen = {}
    for name in model.state_dict():
        parts = name.partition("layers.")
        number, dot, rest = parts[2].partition(".")
        source = f"{parts[0]}{places[f'layers.{number}.']}{rest}" if dot else name
        if source in weights:
            chosen[name] = weights[source].float()
    load_exactly(model, chosen)
    return model


def with_layers_of(target: Any, layers: list[int], spec: TargetSpec) -> dict[str, Any]:
    """Return the settings of a target's configuration with only these layers."""
    need = f"lie in 0..{spec.num_layers - 1} for {spec.name}"
    require(layers[-1] < spec.num_layers, "drafter.layers", need, layers)
    settings = target.to_diff_dict()
    settings["num_hidden_layers"] = len(layers)
    for key, value in target.to_dict().items():  # some are the class's default for its own depth
        if "layer" in key and isinstance(value, list) and len(value) == spec.num_layers:
            settings[key] = [value[layer] for layer in layers]
    return settings


def narrow_image(
    table: Float[Tensor, "vocab hidden"], counts: Int[Tensor, " vocab"], width: int
) -> Float[Tensor, "vocab width"]:
    """Return a table's projection on its principal directions, tokens weighted by frequency.

    It is the best rank-`width` image: the angles between frequent tokens' rows change least.
    """
    weights = (counts.to(table) + 1).sqrt()[:, None]
    _, directions = torch.linalg.eigh((table * weights).T @ (table * weights))
    return table @ directions[:, -width:]
