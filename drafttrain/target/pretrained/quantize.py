"""Weights in fewer bits, by the schemes of Transformers: each is a package's, named here."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def _torchao(kind: str) -> Any:
    import torchao.quantization
    import transformers

    return transformers.TorchAoConfig(getattr(torchao.quantization, kind)())


def _bitsandbytes(bits: int) -> Any:
    import transformers

    return transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})


# Scheme -> the module it needs, what installs that, and what Transformers is told. Not quanto: its
# tensors cannot be copied, and evaluation decodes with a copy of the drafter.
SCHEMES: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "torchao-int8": ("torchao", "drafttrain[quant]", lambda: _torchao("Int8WeightOnlyConfig")),
    "torchao-int4": ("torchao", "drafttrain[quant]", lambda: _torchao("Int4WeightOnlyConfig")),
    "torchao-float8": ("torchao", "drafttrain[quant]", lambda: _torchao("Float8WeightOnlyConfig")),
    "bnb-8bit": ("bitsandbytes", "bitsandbytes", lambda: _bitsandbytes(8)),
    "bnb-4bit": ("bitsandbytes", "bitsandbytes", lambda: _bitsandbytes(4)),
}


def quantization_of(name: str | None, settings: Any) -> dict[str, Any]:
    """Return what `from_pretrained` is told for a scheme; settings: the model's configuration.

    Weights that come quantised say so in their configuration and need no scheme. ValueError where
    they do and one is asked for, or where the scheme's package is not installed.
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
    module, package, settings_of = SCHEMES[name]
    if find_spec(module) is None:
        raise ValueError(
            f"model.quantization={name} needs a package that is not installed: "
            f"pip install '{package}'"
        )
    return {"quantization_config": settings_of()}
