"""What several test files build in the same way."""

from pathlib import Path

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
