"""Loading targets: what is refused and in which words, what loads, and that it loads as drawn."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.files import HASHED_WHOLE_BYTES
from drafttrain.target.pretrained.models import (
    EMBEDDED,
    fingerprint,
    load_model,
    load_model_config,
    load_tokenizer,
)


def model_config(**changes: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "name": "mine",
        "path": None,
        "adapter": None,
        "repo": None,
        "revision": None,
        "embedded": False,
        "max_positions": None,
        "attention": "auto",
        "quantization": None,
        "trust_remote_code": False,
        "allow_pickle": False,
        "inflate": None,
        "shape": None,
    }
    return ModelConfig(**(settings | changes))


def random_config(**changes: Any) -> RandomModelConfig:
    settings: dict[str, Any] = {
        **dataclasses.asdict(model_config(embedded=True)),
        "name": "random",
        "embedded": False,
        "max_positions": 64,
        "architecture": "llama",
        "vocab_size": 4096,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "tie_embeddings": False,
        "initializer_range": 0.2,
        "seed": 0,
    }
    return RandomModelConfig(**(settings | changes))


def load(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(config, load_model_config(config), dtype, "cpu")


@pytest.fixture
def folder(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target that a test may damage."""
    return Path(shutil.copytree(tiny_target_dir, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# What a configuration may say


def test_a_target_from_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="must say where the target is, got none; for example"):
        model_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "flash"}, "model.attention must be one of auto, sdpa, eager, got flash"),
        ({"max_positions": 0}, "model.max_positions must be at least 1, got 0"),
        ({"path": "/x"}, "model=random draws its weights, so model.path=/x must not be set"),
        ({"architecture": "gpt"}, "model.architecture must be one of llama, qwen3, mistral, got"),
        ({"num_layers": 0}, "model.num_layers must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "must divide model.num_attention_heads (4), got 3"),
        ({"head_dim": 7}, "model.head_dim must be even (rotary pairs) and above 0, got 7"),
    ],
)
def test_a_wrong_value_is_answered_with_key_and_remedy(changes: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        random_config(**changes)
    assert message in str(error.value)


# What a directory must hold


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.path=\S+/nowhere must be a directory that holds"):
        load_model_config(model_config(path=str(tmp_path / "nowhere")))


def test_a_file_in_place_of_a_directory_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="which is a file; give the directory that holds"):
        load_model_config(model_config(path=str(folder / "config.json")))


@pytest.mark.parametrize(
    ("removed", "missing"),
    [
        (["config.json"], "missing: config.json"),
        (["model.safetensors"], "missing: weights (model.safetensors or model.safetensors.index"),
        (["tokenizer.json"], "missing: a tokenizer (tokenizer.json or tokenizer.model)"),
        (
            ["config.json", "tokenizer.json", "model.safetensors"],
            "missing: config.json, a tokenizer (tokenizer.json or tokenizer.model), weights (",
        ),
    ],
)
def test_everything_that_a_directory_lacks_is_named_at_once(
    folder: Path, removed: list[str], missing: str
) -> None:
    for name in removed:
        (folder / name).unlink()
    with pytest.raises(
        ValueError, match=r"must hold config.json, a tokenizer and weights"
    ) as error:
        load_model(model_config(path=str(folder)), None, torch.float32, "cpu")
    assert f"model.path={folder}" in str(error.value)
    assert missing in str(error.value)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"index.json names") as error:
        load(model_config(path=str(sharded)))
    assert f"{len(shards)} shards, missing: {shards[1].name}; copy" in str(error.value)


def test_a_torn_weight_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 10)
    with pytest.raises(ValueError, match=r"model.safetensors is torn: [\d,]+ bytes, its header sa"):
        load(model_config(path=str(folder)))
    file.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"model.safetensors is no safetensors file"):
        load(model_config(path=str(folder)))


def test_an_unreadable_configuration_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json must be valid JSON"):
        load_model_config(model_config(path=str(folder)))


def test_a_configuration_that_contradicts_itself_is_one_error(folder: Path) -> None:
    edit_config(folder, model_type="qwen3", layer_types=["full_attention"], num_hidden_layers=2)
    with pytest.raises(
        ValueError, match=r"model.path=\S+: config.json cannot be used: .*layer_typ"
    ):
        load_model_config(model_config(path=str(folder)))


def test_weights_that_do_not_fit_the_configuration_are_not_drawn_at_random(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"must fit config.json; missing: model.layers.4"):
        load(model_config(path=str(folder)))
    edit_config(folder, num_hidden_layers=4, intermediate_size=32)
    shapes = r"of another shape: \S+\.mlp\.down_proj\.weight is \[32, 64\] instead of \[32, 32\]"
    with pytest.raises(ValueError, match=rf"model.path=\S+: the weights must fit .*{shapes}"):
        load(model_config(path=str(folder)))


# Pickle and code


@pytest.fixture
def pickled(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def test_pickled_weights_load_only_when_allowed(pickled: Path, tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"only as pickle .* or set model.allow_pickle=true"):
        load(model_config(path=str(pickled)))
    allowed = load(model_config(path=str(pickled), allow_pickle=True))
    expected = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    assert torch.equal(allowed.lm_head.weight, expected.lm_head.weight)


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("open('/tmp/drafttrain_was_here', 'w')",)


def test_a_pickle_that_holds_more_than_tensors_is_not_run(pickled: Path) -> None:
    torch.save({"lm_head.weight": RunsCode()}, pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model.path=\S+: the (pickled )?weights .*weights_only"):
        load(model_config(path=str(pickled), allow_pickle=True))
    assert not Path("/tmp/drafttrain_was_here").exists()


def test_code_that_comes_with_a_model_needs_the_users_word(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')\n")
    edit_config(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    with pytest.raises(ValueError, match=r"set model.trust_remote_code=true"):
        load_model_config(model_config(path=str(folder)))
    assert not ran.exists()


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    edit_config(folder, model_type="llama9")
    with pytest.raises(ValueError, match=r"Transformers \S+ knows, got 'llama9'; a newer"):
        load_model_config(model_config(path=str(folder)))


# What loads


def test_single_and_sharded_files_load_the_same_weights(
    sharded: Path, tiny_target_dir: Path
) -> None:
    one = load(model_config(path=str(tiny_target_dir))).state_dict()
    many = load(model_config(path=str(sharded))).state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[key], many[key]) for key in one)


def test_a_path_wins_over_a_repository_and_the_package(tiny_target_dir: Path) -> None:
    config = model_config(path=str(tiny_target_dir), repo="nobody/nothing", embedded=True)
    assert load_model_config(config).vocab_size == 97


def test_the_embedded_target_loads_and_chats() -> None:
    config = model_config(embedded=True)
    tokenizer = load_tokenizer(config)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|begin|><|user|>\nHi<|end|>\n"
    model = load(config, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not any(weight.requires_grad for weight in model.parameters())
    assert not model.training


def test_the_embedded_target_is_small_and_safe() -> None:
    assert [file.name for file in EMBEDDED.glob("*.safetensors")] == ["model.safetensors"]
    assert (EMBEDDED / "model.safetensors").stat().st_size <= 32e6
    assert not list(EMBEDDED.glob("*.bin"))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_random_target_has_the_shape_that_was_asked_for(architecture: str, tied: bool) -> None:
    config = random_config(architecture=architecture, tie_embeddings=tied)
    model = load(config)
    assert model.config.model_type == architecture
    assert getattr(model.config, "sliding_window", None) is None
    weights = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1}
    assert sum(weight.numel() for weight in weights.values()) == config.num_parameters
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    tokenizer = load_tokenizer(config)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 5


def test_random_weights_follow_the_seed_and_not_the_dtype_or_the_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load(random_config()).lm_head.weight
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(load(random_config()).lm_head.weight, first)
    half = load(random_config(), torch.bfloat16)
    assert torch.equal(half.lm_head.weight, first.bfloat16())
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not torch.equal(load(random_config(seed=1)).lm_head.weight, first)


def test_a_random_target_must_have_room_for_its_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"model.vocab_size must be at least 4096, the embedded"):
        load_model_config(random_config(vocab_size=4000))


def test_a_tokenizer_that_cannot_be_loaded_is_one_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model.path=\S+: the tokenizer cannot be loaded"):
        load_tokenizer(model_config(path=str(folder)))


# Fingerprints


def mark(config: ModelConfig) -> str:
    return fingerprint(config, torch.float32, "cpu")


def test_a_copy_has_the_same_fingerprint_and_a_changed_weight_another(
    folder: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, copy = (model_config(path=str(path)) for path in (tiny_target_dir, folder))
    for limit in (HASHED_WHOLE_BYTES, 0):  # 0: as models above the limit are sampled
        monkeypatch.setattr("drafttrain.target.pretrained.files.HASHED_WHOLE_BYTES", limit)
        assert mark(copy) == mark(original)
    edit_config(folder, transformers_version="9.9.9")
    assert mark(copy) == mark(original)
    edit_config(folder, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert mark(copy) != mark(original)
    shutil.copy(tiny_target_dir / "config.json", folder)
    assert mark(copy) == mark(original)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert mark(copy) != mark(original)


def test_the_fingerprint_of_random_weights_is_over_what_determines_them() -> None:
    config = random_config()
    assert mark(config) == mark(dataclasses.replace(config, name="other", attention="eager"))
    assert mark(config) != mark(dataclasses.replace(config, seed=1))
    assert mark(config) != mark(dataclasses.replace(config, hidden_size=64))
    assert transformers.__version__  # which is no part of it
