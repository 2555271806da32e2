"""Which models cannot be targets, by name; what can, and up to where, is test_architectures.py."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import LATENT, SHAPE
from builders import model_config
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafttrain.target.describe import describe
from drafttrain.target.model import load_target
from drafttrain.target.pretrained.limits import limits_of

CONFIG = model_config(Path("/unused"))
STATE, STRUCTURE = "recurrent state", "must be a decoder with `layers` and a final `norm`"
POSITIONS, SHAPES = "must have rotary positions", "its layers differ in shape"


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        *(
            (kind, {}, STATE)
            for kind in ("mamba", "mamba2", "rwkv", "jamba", "qwen3_next", "bamba")
        ),
        *((kind, {}, STATE) for kind in ("falcon_h1", "nemotron_h", "zamba2", "recurrent_gemma")),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}, "layers of kind conv"),
        ("minimax", {}, "layers of kind linear_attention"),
        ("deepseek_v32", {}, "layers of kind indexed_attention"),
        ("minimax_m3_vl_text", {}, "selects index_topk_blocks=16"),
        *((kind, {}, POSITIONS) for kind in ("gpt2", "opt", "gpt_bigcode", "gptj", "biogpt")),
        ("falcon", {"alibi": True}, POSITIONS),
        ("bloom", {}, "states no max_position_embeddings"),
        ("mpt", {}, "states no max_position_embeddings"),
        ("falcon", {}, STRUCTURE),
        ("lfm2", {"layer_types": ["full_attention"] * 32}, STRUCTURE),
        ("gemma4_text", {}, SHAPES),
        ("gemma3n_text", {}, "must state one intermediate_size for all layers"),
        ("kolibri1", {}, "must state one intermediate_size for all layers"),
        ("bert", {}, POSITIONS),
        ("t5", {}, "but not as a causal language model"),
    ],
)
def test_what_cannot_be_a_target_is_refused_by_name(kind: str, changes: Any, reason: str) -> None:
    config = AutoConfig.for_model(kind, **changes)
    with pytest.raises(
        ValueError, match=rf"model=tiny_test \({kind}\) cannot be a target: .*{reason}"
    ):
        describe(CONFIG, config, None, None)


def test_an_unknown_rope_is_refused_by_name() -> None:
    config = AutoConfig.for_model("llama", **SHAPE)
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 100.0}
    with pytest.raises(ValueError, match="rope_type spiral is not known; known are default"):
        limits_of(CONFIG, config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_causal_model_of_transformers_is_accepted_or_refused_in_one_line(kind: str) -> None:
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:  # its own defaults do not fit each other
        return
    try:
        told = limits_of(CONFIG, config).reason
        refused = False
    except ValueError as error:
        told, refused = str(error), True
    pattern = (
        r"model=tiny_test \(.+ cannot be a target: " if refused else r"^$|longrope|=\d+: past it"
    )
    assert re.search(pattern, told)
    assert "\n" not in told


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2", "gemma", "cohere", "granite", "phi3"])
def test_attention_in_every_layer_is_accepted(kind: str) -> None:
    assert limits_of(CONFIG, AutoConfig.for_model(kind)).reason == ""


def test_a_sliding_window_is_no_limit_where_nothing_slides() -> None:
    full = AutoConfig.for_model("mistral", sliding_window=None)
    assert limits_of(CONFIG, full).positions == full.max_position_embeddings


def test_the_refusal_comes_before_weights_are_read(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = changed(tiny_target_dir, tmp_path, {"model_type": "gpt2", "rope_parameters": None})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"\(gpt2\) cannot be a target: it must have rotary"):
        load_target(model_config(folder), torch.float32, "cpu")


def test_latent_attention_is_described_by_its_own_head(tiny_target_dir: Path) -> None:
    config = AutoConfig.for_model("deepseek_v3", **SHAPE | LATENT)
    spec = describe(CONFIG, config, None, None)
    assert spec.head_dim % 2 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": -1},
            "num_hidden_layers must be a whole number of at least 1, got -1",
        ),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        ({"vocab_size": 10**12}, "vocab_size must be a whole number of at most 4,000,000"),
        ({"max_position_embeddings": -5}, "max_position_embeddings must be a whole number of at"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    changes: Any, message: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_target_dir, tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        load_target(model_config(folder), torch.float32, "cpu")


@pytest.mark.parametrize("content", ["[1]", "3", '"llama"', "null"])
def test_a_configuration_that_is_no_object_is_refused(
    content: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_target_dir, tmp_path, {})
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config.json must hold an object, got"):
        load_target(model_config(folder), torch.float32, "cpu")


def test_weights_that_are_not_finite_are_named(tiny_target_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed(tiny_target_dir, tmp_path, {})
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"finite logits.*: model.layers.1.mlp.up_proj.weight holds NaN"
    ):
        load_target(model_config(folder), torch.float32, "cpu")


def test_rotary_frequencies_that_loading_rounded_are_refused(tiny_target_dir: Path) -> None:
    """As an engine that casts all buffers does: a few tokens hardly differ, far ones do."""
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    rotary = target.decoder.rotary_emb
    rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"rotates position 511 by .* radians.*inv_freq"):
        target.check_readout()


def test_a_cache_that_remembers_rejected_drafts_is_refused(tiny_target_dir: Path) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    target.rollback = lambda cache, lengths: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="keeps what rejected drafts left in its cache"):
        target.check_readout()


def changed(model: Path, tmp_path: Path, changes: dict[str, Any]) -> Path:
    """A copy of a model with another configuration."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return folder
