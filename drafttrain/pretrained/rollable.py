"""Which models can forget: rejected drafts must leave the cache of target and drafter alike."""

from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from drafttrain.pretrained.models import ModelConfig


def refuse_unless_rollable(config: "ModelConfig", model_config: Any, role: str = "target") -> None:
    """Raise ValueError if a model's cache cannot forget its newest positions one by one.

    Verification writes drafted tokens into the cache before it knows which of them stay. Decided
    from the configuration, before any weight is read.
    """
    text = model_config.get_text_config(decoder=True)
    who = f"model={config.name} ({text.model_type}) cannot be a {role}"
    kinds = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(model_config) in kinds:
        if getattr(kinds[type(model_config)], "_is_stateful", False):
            raise ValueError(
                f"{who}: it keeps a recurrent state (state-space or linear attention), from which"
                " rejected tokens cannot be removed; choose a model with attention in every layer"
            )
    elif not config.trust_remote_code:
        raise ValueError(f"{who}: Transformers knows it, but not as a causal language model")
    layers = set(getattr(text, "layer_types", None) or ())
    unknown = layers - {"full_attention", "sliding_attention", "chunked_attention"}
    if unknown:
        raise ValueError(
            f"{who}: layers of kind {', '.join(sorted(unknown))} keep a state from which rejected"
            " tokens cannot be removed; choose a model with attention in every layer"
        )
    positions = config.max_positions or text.max_position_embeddings
    for field, kind in (
        ("sliding_window", "sliding_attention"),
        ("attention_chunk_size", "chunked_attention"),
    ):
        window = getattr(text, field, None)
        if window is not None and (kind in layers or not layers) and window < positions:
            raise ValueError(
                f"{who}: {field}={window} is less than its {positions} positions, and a cache that"
                " wraps cannot be rolled back; keep to the window with"
                f" model.max_positions={window}"
            )
