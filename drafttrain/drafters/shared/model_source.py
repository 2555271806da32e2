"""The source of a draft model: a local directory, else the Hub; it is loaded as targets are."""

import re
from pathlib import Path
from typing import Any

import torch

from drafttrain.target.pretrained import hub
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.limits import limits_of
from drafttrain.target.pretrained.models import load_model, load_model_config, load_tokenizer

LOCAL = re.compile(r"[./~\\]|.*/.*/")  # what a path begins with, or more slashes than a repository
KEYS = r"path|repo|revision|trust_remote_code|allow_pickle|quantization|attention|max_positions"


def draft_source(
    name: str,
    path: str,
    revision: str | None,
    *,
    allow_pickle: bool,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> ModelConfig:
    """Return the model configuration of a draft model: a local directory, else a Hub repository."""
    local = LOCAL.match(path) is not None or Path(path).is_dir()
    return ModelConfig(
        name=name,
        path=path if local else None,
        adapter=None,
        repo=None if local else path,
        revision=revision,
        embedded=False,
        max_positions=None,
        attention="auto",
        quantization=quantization,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        inflate=None,
        shape=None,
    )


def local_settings(name: str, path: str, revision: str | None) -> Any:
    """Return Transformers' configuration of a draft model that is on this machine already."""
    source = draft_source(name, path, revision, allow_pickle=False)
    if source.repo is not None:
        cached = hub.cached_config(source.repo, revision)
        if cached is None:
            raise ValueError(
                f"drafter.path must be a directory or in the Hub's cache to be planned, got {path}"
            )
        source = draft_source(name, str(cached.parent), None, allow_pickle=False)
    return load_model_config(source)


def load_draft_model(source: ModelConfig, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Return model and tokenizer, on the CPU; dtype None is the checkpoint's own.

    ValueError, in terms of drafter.path, if the model is incomplete or cannot be rolled back.
    """
    try:
        settings = load_model_config(source)
        limits_of(source, settings, "drafter")
        tokenizer = load_tokenizer(source)
        own = dtype or getattr(settings, "dtype", None) or torch.float32
        return load_model(source, settings, own, "cpu"), tokenizer
    except ValueError as error:
        raise ValueError(in_drafters_words(str(error), source.name)) from error


def in_drafters_words(text: str, name: str) -> str:
    """Return a message that names the keys of `model` with those of `drafter`."""
    text = re.sub(rf"\bmodel\.({KEYS})\b", r"drafter.\1", text)
    text = text.replace("drafter.repo", "drafter.path")
    return text.replace(f"model={name}", f"drafter={name}")
