"""What several test files build in the same way."""

import importlib
from pathlib import Path
from typing import Any

import yaml

from drafttrain.drafters.base import DrafterConfig
from drafttrain.pretrained import ModelConfig


def model_config(folder: Path) -> ModelConfig:
    """A target in a local directory."""
    return ModelConfig(
        name="tiny_test",
        path=str(folder),
        repo=None,
        revision=None,
        embedded=False,
        max_positions=None,
        attention="auto",
        trust_remote_code=False,
        allow_pickle=False,
        inflate=None,
    )


def drafter_config(name: str, **changes: Any) -> DrafterConfig:
    """A drafter as conf/drafter/<name>.yaml says, less what is changed."""
    file = Path(__file__).parents[1] / "conf" / "drafter" / f"{name}.yaml"
    values = yaml.safe_load(file.read_text())
    module, _, kind = values.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), kind)(**values | changes)
