"""Whether what was written is what engines expect, by its config.json alone.

Engines load a file with a missing tensor, a dropped bias or a wrong layer id without a word, and
draft badly. Here all of it is an error.
"""

from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.known import written_layout
from drafttrain.drafters.serving.layout import Config, Expected, ServedLayout


def check(
    config: Config,
    tensors: dict[str, Tensor],
    spec: TargetSpec,
    captures: tuple[int, ...],
    layout: ServedLayout | None = None,
) -> None:
    """Raise ValueError naming everything that an engine would misread, not only the first.

    captures: the layers that the drafter was trained on. layout: None takes what config.json is of.
    """
    layout = layout or written_layout(config)
    complaints = _check_config(config, layout, spec)
    if not complaints:
        try:
            complaints = _check_tensors(layout.expected_tensors(config), tensors)
        except KeyError as error:  # a key that the table is derived from
            complaints = [f"config.json must hold {error.args[0]}"]
    if not complaints:
        complaints = [*not_finite(tensors), *layout.misread(config, tensors, spec, captures)]
    if complaints:
        raise ValueError(f"this {layout.method} drafter cannot be served: {'; '.join(complaints)}")


def _check_config(config: Config, layout: ServedLayout, spec: TargetSpec) -> list[str]:
    required = layout.required_keys(config, spec)
    absent = dict.fromkeys(layout.false_by_default, False)
    held = {key: config.get(key, absent.get(key)) for key in required}
    return [
        f"config.json's {key} must be {wanted}, got {held[key]}"
        for key, wanted in required.items()
        if held[key] != wanted
    ]


def _check_tensors(table: dict[str, Expected], tensors: dict[str, Tensor]) -> list[str]:
    complaints = [
        f"missing {name} of shape {list(expected.shape)}"
        for name, expected in table.items()
        if expected.required and name not in tensors
    ]
    complaints += [f"unknown {name}" for name in tensors if name not in table]
    for name, tensor in tensors.items():
        expected = table.get(name)
        if expected is None:
            continue
        if tuple(tensor.shape) != expected.shape:
            complaints.append(f"{name} must be {list(expected.shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in expected.dtypes:
            names = " or ".join(str(dtype) for dtype in expected.dtypes)
            complaints.append(f"{name} must be {names}, got {tensor.dtype}")
    return complaints


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Return which tensors hold values that are no numbers, and how many."""
    return [
        f"{name} holds {int((~tensor.isfinite()).sum())} values that are not finite"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
