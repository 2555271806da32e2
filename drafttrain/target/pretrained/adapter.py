"""A LoRA adapter (Hu et al., 2021, arXiv:2106.09685) that `peft` merges into a target's weights."""

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from drafttrain.runtime.disk import digest_of
from drafttrain.runtime.untrusted_input import read_object, shown
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.config import MERGE, ModelConfig
from drafttrain.target.pretrained.limits import without_weights

WEIGHTS = "adapter_model.safetensors"
# Of adapter_config.json: the keys on which the merged weights depend,
READ = {"r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out", "bias", "modules_to_save"}
READ |= {"rank_pattern", "alpha_pattern"}
# those that change nothing after training (the names of the tensors say which modules are adapted),
IGNORED = {"base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version"}
IGNORED |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
IGNORED |= {"auto_mapping", "eva_config", "megatron_core", "qalora_group_size"}
# and those with the only values that can be merged: other initialisations (PiSSA, LoftQ, ...)
# change the model's own weights as well, and those in model.path are as they were.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
PLAIN = re.compile(r"[\w.^$\\-]+")  # a regular expression that repeats nothing, so it is quick


class LoraAdapter(NamedTuple):
    """An adapter on the disk: its settings, and the shapes of its tensors by name."""

    folder: Path
    trained_for: str  # the model, as PEFT recorded it
    settings: dict[str, Any]
    shapes: dict[str, list[int]]

    @property
    def modules(self) -> list[str]:
        """The names of the modules that it adapts."""
        adapted = {name.split(".lora_")[0] for name in self.shapes if ".lora_" in name}
        return sorted(name.removeprefix("base_model.model.") for name in adapted)

    @property
    def fingerprint(self) -> str:
        """A hash of its settings and weights."""
        weights = files.fingerprint(self.folder, [self.folder / WEIGHTS], {})
        return digest_of({"weights": weights, **self.settings})[:23]

    def peft_config(self, modules: list[str]) -> Any:
        """Return the configuration by which `peft` adapts these modules."""
        import peft

        fixed = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": modules}
        return peft.LoraConfig(**{**self.settings, **fixed})


def open_adapter(path: str) -> LoraAdapter:
    """Return the adapter in a directory, of anyone's; no weight is read.

    ValueError unless it is whole and of a kind that can be merged.
    """
    folder, origin = Path(path).expanduser(), f"model.adapter={path}"
    if missing := [name for name in (files.ADAPTER, WEIGHTS) if not (folder / name).is_file()]:
        raise ValueError(
            f"{origin} must be a local directory that holds a LoRA adapter as PEFT saves it; "
            f"missing: {', '.join(missing)}; one on the Hub is downloaded by hf download "
            "OWNER/NAME --local-dir DIR, a pickled one (.bin) must be converted to safetensors"
        )
    raw = read_object(folder / files.ADAPTER, f"{origin}: {files.ADAPTER}")
    settings = {key: raw[key] for key in READ & raw.keys() if raw[key] or key == "lora_alpha"}
    odd = [key for key, values in ALLOWED.items() if raw.get(key) not in values]
    odd += [key for key in raw if raw[key] and key not in {*READ, *IGNORED, *ALLOWED}]
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = settings.get(key, {})
        quick = isinstance(pattern, dict) and all(map(PLAIN.fullmatch, pattern))
        odd += [] if quick else [key]
    if odd:
        raise ValueError(
            f"{origin} must be a LoRA adapter that can be merged here, and its {files.ADAPTER} "
            f"states {shown(odd[0])}={shown(raw.get(odd[0]))}{MERGE}"
        )
    tensors = files.tensors_in(folder / WEIGHTS, origin)
    shapes = {name: entry.shape for name, entry in tensors.items()}
    trained_for = shown(raw.get("base_model_name_or_path") or "a model without name")
    return LoraAdapter(folder, trained_for, settings, shapes)


def check_adapter(config: ModelConfig, model_config: Any) -> None:
    """Raise ValueError unless model.adapter, if there is one, fits the target; nothing is loaded.

    `peft` adapts a model without weights, whose new tensors must be those in the file.
    model_config: the target's, of Transformers.
    """
    if config.adapter is None:
        return
    import peft

    adapter = open_adapter(config.adapter)
    plain = getattr(model_config, "quantization_config", None) is None
    config.require("adapter", plain, "be null for weights that come quantised", MERGE)
    model = without_weights(model_config, config.trust_remote_code)
    modules = dict(model.named_modules())
    known = [name for name in adapter.modules if name in modules]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    misfit = f"model.adapter={config.adapter}, trained for {adapter.trained_for}, must fit"
    if model.config.tie_word_embeddings and any(modules[name] in ends for name in known):
        raise ValueError(
            f"{misfit} {config.origin}, whose embedding and head are one matrix: what it adds to "
            "one of them would change the other, too"
        )
    needed: dict[str, Any] = {}
    own: dict[str, list[int]] = {}
    try:
        if known:
            with warnings.catch_warnings(action="ignore"):
                parts = adapter.peft_config(known)
                adapted = peft.get_peft_model(model, parts, low_cpu_mem_usage=True)
                needed = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
            weights = adapted.state_dict() | needed  # which have shorter names
            own = {name: list(weight.shape) for name, weight in weights.items()}
    except Exception as error:  # of many classes, for what anyone's settings may hold
        raise ValueError(f"{misfit} {config.origin}: {shown(error, 400)}") from error
    wrong = [
        f"{shown(name)} is {adapter.shapes.get(name, 'missing')} instead of {own.get(name, 'none')}"
        for name in sorted({*needed, *adapter.shapes})
        if adapter.shapes.get(name) != own.get(name)
    ]
    if wrong or not known:
        told = f"{wrong[0]} ({len(wrong)} differ)" if wrong else "it holds no LoRA weights"
        raise ValueError(f"{misfit} {config.origin}; {told}")


def merge(path: str, model: Any) -> Any:
    """Return the model with the adapter in its weights, which are changed in place.

    `check_adapter` comes first. ValueError where the result is not finite.
    """
    import peft

    adapter = open_adapter(path)
    how = {"config": adapter.peft_config(adapter.modules), "torch_device": str(model.device)}
    try:
        with warnings.catch_warnings(action="ignore"):
            adapted = peft.PeftModel.from_pretrained(model, str(adapter.folder), **how)
            return adapted.merge_and_unload(safe_merge=True)  # safe: it looks for NaN
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"model.adapter={path} cannot be merged: {shown(error, 400)}") from error
