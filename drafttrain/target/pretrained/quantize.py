"""Quantised weights: the schemes of Transformers, and the package that each one needs."""

from importlib.util import find_spec
from typing import Any

# Scheme -> the module it needs, the package to install, its name there, bytes of a weight in the
# linear layers, scales included (one per 128 or per row). Not quanto: its tensors cannot be
# copied, and evaluation decodes with a copy of the drafter.
SCHEMES = {
    "torchao-int8": ("torchao", "drafttrain[quant]", "Int8WeightOnlyConfig", 1.01),
    "torchao-int4": ("torchao", "drafttrain[quant]", "Int4WeightOnlyConfig", 0.53),
    "torchao-float8": ("torchao", "drafttrain[quant]", "Float8WeightOnlyConfig", 1.01),
    "bnb-8bit": ("bitsandbytes", "bitsandbytes", "load_in_8bit", 1.01),
    "bnb-4bit": ("bitsandbytes", "bitsandbytes", "load_in_4bit", 0.56),
}
WEIGHT_BYTES = {name: size for name, (*_, size) in SCHEMES.items()}


def quantization_of(name: str | None, settings: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a scheme; settings: the model's configuration.

    Weights that are already quantised say so in their configuration and need no scheme. ValueError
    if a scheme is asked for them, or if the scheme's package is not installed.
    """
    if name is None:
        return {}
    given = getattr(settings, "quantization_config", None)
    if given is not None:
        method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
        raise ValueError(
            f"model.quantization must be null for weights that are quantised already ({method}), "
            f"got {name}"
        )
    module, package, kind, _ = SCHEMES[name]
    if find_spec(module) is None:
        raise ValueError(
            f"model.quantization={name} needs a package that is not installed: "
            f"pip install '{package}'"
        )
    import transformers

    if module == "bitsandbytes":
        return {"quantization_config": transformers.BitsAndBytesConfig(**{kind: True})}
    import torchao.quantization

    scheme = getattr(torchao.quantization, kind)()
    return {"quantization_config": transformers.TorchAoConfig(scheme)}
