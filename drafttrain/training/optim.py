"""The optimizer's plain parts: rate of a step, which weights decay, the file of its state."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.runtime.untrusted_input import header_of, shown

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW remembers of each parameter, besides the step


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return torch's parameter groups: matrices decay, vectors (biases, norm scales) do not.

    Frozen parameters are left out; so is a group with nothing in it.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def save_moments(path: Path, step: int, moments: dict[str, Tensor]) -> None:
    """Write the optimizer's state as safetensors: the finished steps, and "moment.parameter"."""
    tensors = {name: tensor.contiguous() for name, tensor in moments.items()}
    save_file({"step": torch.tensor(step), **tensors}, path)


def load_moments(path: Path, shapes: dict[str, torch.Size]) -> tuple[int, dict[str, Tensor]]:
    """Return the finished steps and the moments of what `save_moments` wrote, on the CPU.

    shapes: what must be there, "moment.parameter" by shape. Raises ValueError naming what differs.
    """
    steps = header_of(path).get("step")
    if steps is None or (steps.dtype, steps.shape) != ("I64", []):
        raise ValueError(f"{path} must hold the finished steps (step, one integer), and does not")
    moments = load_file(path)
    step = int(moments.pop("step"))
    differences = [f"{name} is missing" for name in shapes.keys() - moments.keys()]
    differences += [f"{name} is unknown" for name in moments.keys() - shapes.keys()]
    differences += [
        f"{name} is {list(moments[name].shape)} of {moments[name].dtype}, not {list(shapes[name])}"
        for name in shapes.keys() & moments.keys()
        if moments[name].shape != shapes[name] or not moments[name].is_floating_point()
    ]
    if step < 0:
        differences.append(f"step is {step}")
    if differences:
        first = shown(", ".join(sorted(differences)[:3]), 400)
        raise ValueError(
            f"{path} must hold the optimizer state of this drafter, got another's: "
            f"{first}{', ...' if len(differences) > 3 else ''}; "
            "resume with the drafter settings that the run was started with"
        )
    return step, moments
