"""Check that an export is what engines expect, by its config.json alone."""

from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.layout import Config, ServedLayout, check_tensors


def check(
    config: Config,
    tensors: dict[str, Tensor],
    spec: TargetSpec,
    captures: tuple[int, ...],
    layout: ServedLayout,
) -> None:
    """Raise ValueError naming everything that an engine would misread, not only the first.

    captures: the layers that the drafter was trained on.
    """
    complaints = _check_config(config, layout, spec)
    if not complaints:
        try:
            complaints = check_tensors(layout.expected_tensors(config), tensors)
        except KeyError as error:  # a key that the table needs
            complaints = [f"config.json must hold {error.args[0]}"]
    if not complaints:
        complaints = [*not_finite(tensors), *layout.misread(config, tensors, spec, captures)]
    if complaints:
        raise ValueError(f"this {layout.method} drafter cannot be served: {'; '.join(complaints)}")


def _check_config(config: Config, layout: ServedLayout, spec: TargetSpec) -> list[str]:
    required = layout.required_keys(config, spec)
    absent = dict.fromkeys(layout.false_by_default, False)
    held = {key: config.get(key, absent.get(key)) for key in required}
    own = {key: f" (drafter.{name} of its training)" for key, name in layout.settings.items()}
    return [
        f"config.json's {key} must be {wanted}, got {held[key]}{own.get(key, '')}"
        for key, wanted in required.items()
        if held[key] != wanted
    ]


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Return which tensors hold values that are not finite, and how many."""
    return [
        f"{name} holds {int((~tensor.isfinite()).sum())} values that are not finite"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
