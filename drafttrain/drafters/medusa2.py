"""Medusa-2: heads trained together with the target (Cai et al., 2024, arXiv:2401.10774, 3.2)."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from drafttrain.core.losses import TokenLossConfig
from drafttrain.core.ops.layer_calls import call_layer, device_of, dtype_of
from drafttrain.core.ops.layers import RMSNorm, Rotation
from drafttrain.core.placed_batch import attention_mask
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec
from drafttrain.drafters.base import Drafter, TrainingChance
from drafttrain.drafters.medusa import Medusa, MedusaConfig
from drafttrain.drafters.shared.copies import (
    CopiesConfig,
    Hidden,
    attend,
    copy_layers,
    freeze,
    release,
    run_layers,
)
from drafttrain.drafters.shared.lora import add_lora, lora_products
from drafttrain.drafters.shared.parallel import BlockLayer
from drafttrain.drafters.shared.publications import About, quoted
from drafttrain.drafters.shared.text_losses import next_token_loss

TARGET = "target_layers."  # how names of the parameters begin that change the target


@dataclass(frozen=True, kw_only=True)
class Medusa2Config(MedusaConfig, CopiesConfig):
    """Shape and loss of the heads; where, how and from when on the target is trained."""

    target_losses: dict[str, float]
    heads_weight: float
    lora_layers: int | None
    lora_rank: int
    lora_alpha: int
    target_rate: float
    head_warmup: float

    layout = None  # engines serve heads like these, but beside the target as it was

    def __post_init__(self) -> None:
        MedusaConfig.__post_init__(self)
        CopiesConfig.__post_init__(self)
        try:
            self.of_target  # noqa: B018  (checks the names and weights of its losses)
        except ValueError as error:
            raise ValueError(
                str(error).replace("drafter.losses", "drafter.target_losses")
            ) from None
        layers = self.lora_layers
        every = "be at least 1, or null for all layers of the target"
        self.require("lora_layers", layers is None or layers >= 1, every)
        self.require_at_least(1, "lora_rank", "lora_alpha")
        for key in ("heads_weight", "target_rate"):
            self.require(key, getattr(self, key) > 0, "be above 0")
        self.require("head_warmup", 0 <= self.head_warmup < 1, "be in [0, 1)")

    @cached_property
    def of_target(self) -> TokenLossConfig:
        """The losses on the target's own next token."""
        keys = TokenLossConfig.__dataclass_fields__
        own = {key: getattr(self, key) for key in keys}
        return TokenLossConfig(**own | {"losses": self.target_losses})

    def build(self, spec: TargetSpec) -> "Medusa2":
        most = f"be at most {spec.num_layers}, the layers of {spec.name}"
        self.require("lora_layers", (self.lora_layers or 1) <= spec.num_layers, most)
        return Medusa2(self, spec)


class Medusa2(Medusa):
    """Medusa's heads, and LoRA on the target's last layers, which are trained with them.

    The loss is L_LM + heads_weight * L_Medusa (equation 5), and both reach the adapters. Each
    captured state runs through frozen copies of those layers with the adapters; what the target
    gives without them is the teacher of the paper's self-distillation (section 2.3.2), if L_LM
    compares distributions. For the first `head_warmup` of the steps the adapters' rate is zero, so
    that training is Medusa-1's (the paper's first stage); in as many further steps it rises to
    `target_rate` times the heads', and falls with theirs.

    Decoding needs the target with the adapters merged into its weights (`target_changes`): what it
    then writes is exactly what that target writes, which is not the model that was given.

    Where it departs from the paper: the copies take memory in training, once more that of the
    layers with adapters, in float32, where an adapter within the target would take none; norms,
    embedding and head are not trained; layers must be like Llama's; the gradient's norm, by which
    it is clipped, has the adapters' share from the first step on.
    """

    about = About("A Medusa-2", "2401.10774")
    published = quoted(
        "arXiv:2401.10774",
        "static tree",
        {"Vicuna 7B": (2.83, 3.47), "Vicuna 13B": (2.83, 3.51), "Vicuna 33B": (2.35, 3.01)},
        trained_on="ShareGPT",
    )
    begins_from_target = True
    changes_target = True

    def __init__(self, config: Medusa2Config, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        self.config: Medusa2Config = config
        self.reach = None  # the layers with adapters attend to the whole text
        number = config.lora_layers or spec.num_layers
        self.first = spec.num_layers - number
        self.captures = (self.first,)
        self.shape = config.shape(spec)
        # Frozen copies of its last layers, and of its final norm; a checkpoint holds none of them.
        self.target_layers = nn.ModuleList(BlockLayer(self.shape) for _ in range(number))
        self.target_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps).requires_grad_(False)
        add_lora(self.target_layers, config.lora_rank, config.lora_alpha)
        freeze(self.target_layers, saved=False)
        freeze(self.target_norm, saved=False)

    def initialise(self, model: Any, tokenizer: Any) -> None:
        """Copy the target's layers; ValueError if these compute something else than ours."""
        target, device = (model, self.config, self.spec), device_of(self)
        norm = copy_layers(self.target_layers, self.first, *target, device)
        assert norm is not None, "the last layer is among them"
        self.target_norm.weight = norm.weight.detach()  # type: ignore[assignment]  # a buffer

    def rates(self, done: float) -> dict[str, float]:
        """Return the target's, zero while the heads warm up."""
        warmup, full = self.config.head_warmup, self.config.target_rate
        risen = min(1.0, max(0.0, done / warmup - 1)) if warmup else 1.0
        return {TARGET: full * risen}

    def target_changes(self) -> dict[str, Float[Tensor, "out in"]]:
        products = lora_products(self.target_layers).items()
        return {f"layers.{_renumbered(name, self.first)}": product for name, product in products}

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the loss of the target's own next token, and each head's (section 2.2)."""
        hidden = self._tuned(batch, features.captured[self.first])
        tuned = replace(features, final_hidden=hidden)
        heads = super().forward(batch, tuned, chance)
        weight = self.config.heads_weight
        scaled = {name: replace(term, weight=weight * term.weight) for name, term in heads.items()}
        # Correct means that its choice is that of the target without adapters.
        own = next_token_loss(self.config.of_target, hidden, batch, features)
        return {"target": own, **scaled}

    def _tuned(self, batch: Batch, hidden: Hidden) -> Hidden:
        """Return the final hidden states of the target with adapters."""
        dtype = dtype_of(self)
        turn = self.shape.rotation(batch.positions, dtype)
        mask = attention_mask(batch)
        hidden = hidden.to(dtype)
        for layer in self.target_layers:
            hidden = call_layer(_run, layer, hidden, turn, mask)
        return self.target_norm(hidden)

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Load heads and adapters. The copies of layers are released: drafting needs none."""
        super().load_weights(tensors)
        release(self.target_layers)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the settings, heads and adapters: no engine reads them."""
        return Drafter.to_serving(self)


def _run(layer: nn.Module, hidden: Hidden, turn: Rotation, mask: Tensor | None) -> Hidden:
    return run_layers([layer], hidden, turn, lambda _, heads: attend(heads, mask))


def _renumbered(name: str, first: int) -> str:
    """Return a weight's name by the number of its layer in the target."""
    number, _, rest = name.partition(".")
    return f"{int(number) + first}.{rest}"
