"""Find a target and load its configuration, tokenizer and weights with Transformers."""

import dataclasses
import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers  # lazy: the heavy parts are imported where they are first used

from drafttrain.core.tokenizer import check_file, panics_as_errors
from drafttrain.runtime.disk import digest_of
from drafttrain.runtime.rank_process import rank
from drafttrain.runtime.terminal import console, working
from drafttrain.runtime.untrusted_input import read_object, shown
from drafttrain.target.pretrained import files, gguf, hub
from drafttrain.target.pretrained.adapter import merge, open_adapter
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.fit import refuse_loaded_misfit, require_fit
from drafttrain.target.pretrained.inflate import inflate, inflated_width
from drafttrain.target.pretrained.quantize import quantization_of

EMBEDDED = Path(__file__).parents[2] / "assets" / "tiny"
TOKEN_IDS = ("_token_id", "_token_ids", "_token_index")
QUIET_BYTES = 1 << 30  # smaller models load too fast for a progress bar


def find(config: ModelConfig, weights: bool) -> Path | None:
    """Return the complete directory of a target, downloaded if necessary; None if it is random.

    With weights=False only the configuration and the tokenizer need to be there.
    ValueError says what is missing, or how to do without the Hub.
    """
    if isinstance(config, RandomModelConfig):
        return None
    if config.path:
        folder = local_directory(config.path, config.origin, weights)
    elif config.embedded:
        folder = EMBEDDED
    else:
        assert config.repo, "ModelConfig makes sure of it"
        folder = hub.download(
            config.name,
            config.repo,
            config.revision,
            weights=weights,
            code=config.trust_remote_code,
            pickle=config.allow_pickle,
        )
    files.check(folder, config.origin, weights=weights, allow_pickle=config.allow_pickle)
    return folder


def local_directory(path: str, origin: str, weights: bool) -> Path:
    """Return the directory of a model in Transformers' format; GGUF is dequantised into one."""
    folder = Path(path).expanduser()
    file = gguf.file_of(folder, origin)
    return folder if file is None else gguf.directory_of(file, origin, weights)


def load_model_config(config: ModelConfig) -> Any:
    """Return Transformers' configuration of a target; no weight is read or downloaded."""
    folder = find(config, weights=False)
    if folder is None:
        assert isinstance(config, RandomModelConfig), "only random targets have no directory"
        return _random_config(config)
    raw = read_object(folder / "config.json", f"{config.origin}: config.json")
    kind = raw.get("model_type")
    if kind not in transformers.CONFIG_MAPPING and not config.trust_remote_code:
        if "auto_map" in raw:
            raise ValueError(
                f"{config.origin} brings its own code (auto_map in config.json) for model_type"
                f" {shown(repr(kind))}, and code from a download runs only if you say so: read it,"
                " then set model.trust_remote_code=true"
            )
        raise ValueError(
            f"{config.origin}: config.json must name a model_type that Transformers"
            f" {transformers.__version__} knows, got {shown(repr(kind))}; a newer Transformers may"
            " know it"
        )
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # the model's own code, or a validator of Transformers
        reason = shown(" ".join(str(error).split()), 400)
        raise ValueError(f"{config.origin}: config.json cannot be used: {reason}") from error


def load_generation_config(config: ModelConfig) -> Any:
    """Return Transformers' generation configuration of a target; None if it has none."""
    folder = find(config, weights=False)
    if folder is None or not (folder / files.GENERATION).is_file():
        return None
    try:
        return transformers.GenerationConfig.from_pretrained(folder)
    except Exception as error:  # its keys are keyword arguments of Transformers
        reason = shown(error, 400)
        raise ValueError(f"{config.origin}: {files.GENERATION} cannot be used: {reason}") from error


def load_tokenizer(config: ModelConfig) -> Any:
    """Return the target's tokenizer, chat template included; a random target has the embedded one.

    ValueError if the tokenizer needs code of its own and that is not allowed.
    """
    folder = find(config, weights=False) or EMBEDDED
    check_file(folder / "tokenizer.json", config.origin)
    try:
        with panics_as_errors(folder):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=config.trust_remote_code
            )
    except Exception as error:  # error classes vary, and the tokenizers package raises bare ones
        raise ValueError(
            f"{config.origin}: the tokenizer cannot be loaded: {shown(error, 400)}; if it brings"
            " its own code, read it, then set model.trust_remote_code=true"
        ) from error
    if isinstance(config, RandomModelConfig):
        need = f"be at least {len(tokenizer)}, the embedded tokenizer's size"
        config.require("vocab_size", config.vocab_size >= len(tokenizer), need)
    return tokenizer


def load_model(
    config: ModelConfig,
    model_config: Any,
    dtype: torch.dtype,
    device: str,
    spread: dict[str, Any] | None = None,
) -> Any:
    """Return a Transformers causal language model in evaluation mode, without gradients.

    spread: arguments of `from_pretrained` that place modules; None: all of them on `device`.
    ValueError if a weight is missing or misshapen; Transformers would initialise it at random.
    With `config.inflate` it computes the same at the cost of a larger model (see `inflate`).
    """
    width = None
    if config.inflate is not None:
        width = inflated_width(config.inflate, model_config, config.name, config.trust_remote_code)
    folder = find(config, weights=True)
    attention = attention_of(model_config) if config.attention == "auto" else config.attention
    if folder is None:
        assert isinstance(config, RandomModelConfig), "only random targets have no directory"
        model = _draw(config, model_config, attention, dtype, device)
    else:
        # Straight to the device: host memory need not hold a 70B model.
        whole = {"device_map": None if device == "cpu" else {"": device}}
        model = _read(config, folder, model_config, attention, dtype, spread or whole)
    if config.adapter is not None:
        model = merge(config.adapter, model)
    if width is not None:
        inflate(model, width, config.name)
    return model.eval().requires_grad_(False)


def attention_of(model_config: Any) -> str:
    """Return the fastest attention implementation that is exact for the architecture."""
    text = model_config.get_text_config(decoder=True)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    # Gemma 2 caps scores, gpt-oss has attention sinks: sdpa can do neither.
    return "sdpa" if getattr(kind, "_supports_sdpa", True) and not capped else "eager"


def fingerprint(config: ModelConfig, dtype: torch.dtype, device: str) -> str:
    """Return a hash of the target's configuration and weights, to which features are bound.

    For a directory it does not depend on its path, on how its weights are split over files or on
    the dtype they are loaded in (see `files.fingerprint` and `settings_that_count`); for random
    weights it covers what determines them. Inflating a target
    does not change it: a drafter that was trained on the one serves the other. An adapter adds a
    third hash, of its own; the hash of weights that come from GGUF begins with "gguf".
    """
    folder = find(config, weights=True)
    if folder is not None:
        parts = [_fingerprint(folder, load_model_config(config))]
        parts += [open_adapter(config.adapter).fingerprint] if config.adapter is not None else []
        return "-".join(parts)
    assert isinstance(config, RandomModelConfig), "only random targets have no directory"
    common = {field.name for field in dataclasses.fields(ModelConfig)}
    drawn = {k: v for k, v in dataclasses.asdict(config).items() if k not in common}
    if not config.portable:
        drawn |= {"drawn_as": str(dtype), "drawn_on": torch.device(device).type}
    return digest_of(drawn)[:32]


def fingerprint_of(folder: Path) -> str:
    """Return the fingerprint of a model's directory whose configuration Transformers knows."""
    return _fingerprint(
        folder, transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    )


def _fingerprint(folder: Path, model_config: Any) -> str:
    whole = files.fingerprint(folder, settings=settings_that_count(model_config))
    if getattr(model_config, gguf.SOURCE, None) is None:
        return whole
    settings, weights = whole.split("-")
    return f"{settings}-gguf{weights[4:]}"


def settings_that_count(model_config: Any) -> dict[str, Any]:
    """Return the settings by which a configuration differs from the defaults of its class.

    Only keys that the class itself defines: others are not read by the model. Not token ids, dtype
    and caching, which change no hidden state. Defaults are left out so that a key which a later
    Transformers adds changes nothing.
    """
    kind = type(model_config)
    common = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    # A class that brings its own code may state its keys as arguments.
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "self":
            defaults.setdefault(name, parameter.default)
    found: dict[str, Any] = {"model_type": model_config.model_type}
    for name in defaults.keys() - common - {"use_cache", "cache_implementation"}:
        value = getattr(model_config, name, None)
        if name.endswith(TOKEN_IDS) or value == defaults[name]:
            continue
        nested = isinstance(value, transformers.PretrainedConfig)
        found[name] = settings_that_count(value) if nested else value
    if (quantized := getattr(model_config, "quantization_config", None)) is not None:
        found["quantization_config"] = quantized
    return found


def _read(
    config: ModelConfig,
    folder: Path,
    model_config: Any,
    attention: str,
    dtype: torch.dtype,
    places: dict[str, Any],
) -> Any:
    weights = files.weight_files(folder)
    safe = weights[0].suffix == ".safetensors"
    large = sum(file.stat().st_size for file in weights) >= QUIET_BYTES
    shows_bar = large and console.is_terminal and rank() == 0
    was_shown = transformers.utils.logging.is_progress_bar_enabled()
    quantized = quantization_of(config.quantization, model_config)
    require_fit(config.origin, weights, model_config, config.trust_remote_code)
    try:
        if not shows_bar:
            transformers.utils.logging.disable_progress_bar()
        with nullcontext() if shows_bar else working(f"loading {config.name}"):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=model_config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=safe,
                weights_only=True,
                local_files_only=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                **quantized,
                **places,
            )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as error:
        reason = shown(error, 400)
        raise ValueError(f"{config.origin}: the weights cannot be loaded: {reason}") from error
    except Exception as error:  # torch raises pickle's own errors, whose classes vary
        if safe:
            raise
        raise ValueError(
            f"{config.origin}: the pickled weights hold more than tensors, so they are not loaded"
            " (weights_only=True); convert them to safetensors where you trust them"
        ) from error
    finally:
        if was_shown:
            transformers.utils.logging.enable_progress_bar()
    model, report = loaded
    refuse_loaded_misfit(config.origin, report)
    return model


def _random_config(config: RandomModelConfig) -> Any:
    tokenizer = load_tokenizer(config)
    alike = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
    alike += ["num_key_value_heads", "head_dim", "initializer_range"]
    settings: dict[str, Any] = {
        **{key: getattr(config, key) for key in alike},
        **{
            key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.architecture == "mistral":
        settings["sliding_window"] = None  # as in every Mistral since 7B v0.2
    return transformers.AutoConfig.for_model(config.architecture, **settings)


def _draw(
    config: RandomModelConfig, model_config: Any, attention: str, dtype: torch.dtype, device: str
) -> Any:
    place = "cpu" if config.portable else device
    devices = [] if place == "cpu" else [torch.device(place)]
    with torch.random.fork_rng(devices=devices), torch.device(place):
        torch.manual_seed(config.seed)
        model = transformers.AutoModelForCausalLM.from_config(
            model_config,
            dtype=torch.float32 if config.portable else dtype,
            attn_implementation=attention,
        )
    for weight in model.parameters():  # not model.to(dtype): rotary frequencies stay float32
        weight.data = weight.data.to(dtype)
    return model.to(device)
