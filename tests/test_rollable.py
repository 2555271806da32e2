"""Which targets can forget: verification writes drafts into a cache that must lose them again."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import model_config
from transformers import AutoConfig

from drafttrain.pretrained import refuse_unless_rollable
from drafttrain.target.target import load_target

CONFIG = model_config(Path("/unused"))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mamba", {}, "recurrent state"),
        ("rwkv", {}, "recurrent state"),
        ("jamba", {}, "recurrent state"),
        ("qwen3_next", {}, "recurrent state"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}, "layers of kind conv"),
        ("minimax", {}, "layers of kind linear_attention"),
        ("mistral", {"sliding_window": 4096}, "sliding_window=4096 is less than its 131072 posi"),
        ("gemma2", {}, "sliding_window=4096 is less than its 8192 positions"),
        ("llama4_text", {}, "attention_chunk_size=8192 is less than its"),
    ],
)
def test_a_target_that_cannot_forget_is_refused_by_name(
    kind: str, changes: Any, reason: str
) -> None:
    config = AutoConfig.for_model(kind, **changes)
    with pytest.raises(
        ValueError, match=rf"model=tiny_test \({kind}\) cannot be a target: .*{reason}"
    ):
        refuse_unless_rollable(CONFIG, config)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2", "gemma", "cohere", "granite", "phi3"])
def test_attention_in_every_layer_is_accepted(kind: str) -> None:
    refuse_unless_rollable(CONFIG, AutoConfig.for_model(kind))


def test_a_sliding_window_is_accepted_where_nothing_slides() -> None:
    refuse_unless_rollable(CONFIG, AutoConfig.for_model("mistral", sliding_window=None))
    refuse_unless_rollable(
        dataclasses.replace(CONFIG, max_positions=4096),
        AutoConfig.for_model("mistral", sliding_window=4096),
    )


def test_the_refusal_comes_before_weights_are_read(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "model"))
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "mistral", "sliding_window": 8}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").unlink()
    config = model_config(folder)
    with pytest.raises(ValueError, match=r"sliding_window=8 is less than its 512 positions"):
        load_target(config, torch.float32, "cpu")
