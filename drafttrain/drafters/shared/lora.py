"""Low-rank adapters (LoRA, Hu et al., 2021, arXiv:2106.09685), by `peft`."""

from typing import Any

from torch import nn


def add_lora(model: Any, rank: int, alpha: int) -> None:
    """Freeze a model and add a trainable adapter to every linear layer except the output head.

    An adapter adds alpha / rank times the product of its two factors.
    """
    import peft

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)
    peft.inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def merge_lora(model: Any) -> None:
    """Merge every adapter into the weights it adapts, and remove it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            layer = module.get_base_layer()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
    # The weights are trainable again; norms of frozen weights would use another kernel.
    model.requires_grad_(True)
