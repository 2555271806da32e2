"""What a store must hold for the drafters that will train on it."""

from collections.abc import Sequence

from drafttrain.drafters.base import Drafter
from drafttrain.target.store.config import StoreConfig, StoreContents


def asked_by(drafters: Sequence[Drafter], config: StoreConfig) -> StoreContents:
    """Return what drafters read; ValueError names one that no store can serve."""
    for drafter in drafters:
        refuse_without_store(drafter)
    layers = sorted({layer for drafter in drafters for layer in drafter.captures})
    if config.layers is not None:
        spec = drafters[0].spec
        layers = sorted(set(config.layers))
        wrong = [layer for layer in layers if not 0 <= layer <= spec.num_layers]
        if wrong:
            raise ValueError(
                f"store.layers must be in 0..{spec.num_layers} for model={spec.name}, got {wrong}"
            )
    if not layers and not config.final_hidden:
        raise ValueError(
            "store.final_hidden must be true where no layer is captured, got false: nothing would "
            "be stored"
        )
    if not config.assistant_only:
        return StoreContents(tuple(layers), None)
    reach = 1
    for drafter in drafters:
        if drafter.reach is None:
            raise ValueError(
                f"store.assistant_only must be false for drafter={drafter.config.name}, which "
                "attends to the whole conversation, got true; it suits drafters that read single "
                "positions (Drafter.reach)"
            )
        reach = max(reach, drafter.reach)
    return StoreContents(tuple(layers), reach)


def refuse_without_store(drafter: Drafter) -> None:
    """Raise ValueError for a drafter that no stored features can train."""
    if not drafter.config.trainable:
        raise ValueError(
            f"drafter={drafter.config.name} has nothing to train, so no features to store; choose "
            "another drafter"
        )
    if drafter.text_source is not None:
        raise ValueError(
            f"drafter={drafter.config.name} trains on text of its own, for which no store "
            "has features; use features=online, or drafter.on_policy=0"
        )
