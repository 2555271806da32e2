"""An inflated target costs more and says the same: tokens, logits, fingerprint, acceptance."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import model_config

from drafttrain.commands.setup.target_and_drafter import inflate_as, inflate_drafter
from drafttrain.config.compose import load_choice
from drafttrain.core.chance import SeededChance
from drafttrain.core.ops.layers import MLP
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.target.model import Target, load_target
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.models import load_model, load_model_config
from drafttrain.target.pretrained.size import parameters, parse_size

PROMPT = [1, 3, 6, 20, 33, 41, 20]
TOKENS = torch.tensor([PROMPT])
SIZE = "700K"  # of a model of 43 thousand
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def inflated(config: ModelConfig, size: str = SIZE) -> ModelConfig:
    return dataclasses.replace(config, inflate=size)


def pair(folder: Path, dtype: torch.dtype) -> tuple[Target, Target]:
    """The target as it is, and inflated."""
    config = model_config(folder)
    return load_target(config, dtype, "cpu"), load_target(inflated(config), dtype, "cpu")


def load(config: ModelConfig) -> Any:
    return load_model(config, load_model_config(config), torch.float32, "cpu")


def size_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_size_is_a_number_with_a_unit() -> None:
    texts = {"500M": 500_000_000, "0.5B": 500_000_000, " 8b ": 8_000_000_000, "64K": 64_000}
    assert {text: parse_size(text) for text in texts} == texts


@pytest.mark.parametrize("text", ["large", "8", "-1B", "0M", "1e9", "8GB", "", "B", "1,5B"])
def test_what_is_not_a_size_is_refused_before_anything_loads(text: str) -> None:
    with pytest.raises(ValueError, match=r"model.inflate must be a number .* got '" + text + "'"):
        inflated(model_config(Path("/nowhere")), text)


def test_a_size_below_the_model_is_refused_with_the_models_own(tiny_target_dir: Path) -> None:
    message = r"inflate must be at least the [\d,]+ parameters of model=tiny_test, got 1K; null"
    with pytest.raises(ValueError, match=message):
        load(inflated(model_config(tiny_target_dir), "1K"))


@pytest.mark.parametrize(("size", "exact"), [("700K", 700e3), ("3M", 3e6), ("0.01B", 1e7)])
def test_the_parameters_come_within_a_percent(
    tiny_target_dir: Path, size: str, exact: float
) -> None:
    model = load(inflated(model_config(tiny_target_dir), size))
    # Of 700K a step of 64 columns is 3.5 %.
    assert size_of(model) == pytest.approx(exact, rel=0.02 if size == "700K" else 0.01)
    widths = {layer.mlp.gate_proj.out_features for layer in model.model.layers}
    assert widths == {model.config.intermediate_size}
    assert model.config.intermediate_size % 64 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_function_stays_up_to_rounding(tiny_target_dir: Path, dtype: torch.dtype) -> None:
    plain, wide = pair(tiny_target_dir, dtype)
    assert size_of(wide.model) > 10 * size_of(plain.model)
    ours, theirs = (target.step(target.begin(), TOKENS, captures=(2,)) for target in (wide, plain))
    # In bfloat16 a product's own rounding is 2**-8; where kernels differ, it differs by layer.
    bound = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.01}[dtype]
    for got, wanted in (
        (ours[0], theirs[0]),
        (ours[1].final_hidden, theirs[1].final_hidden),
        (ours[1].captured[2], theirs[1].captured[2]),
    ):
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound * float(wanted.abs().max()))


def test_every_added_row_works_and_every_added_column_is_zero(tiny_target_dir: Path) -> None:
    model = load(inflated(model_config(tiny_target_dir)))
    for layer in model.model.layers:
        for rows in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
            assert rows.shape[0] > 640
            assert rows.abs().amax(1).min() > 0
            assert rows[64:].std() == pytest.approx(rows[:64].std().item(), rel=0.05)
        assert layer.mlp.down_proj.weight[:, 64:].abs().max() == 0
        assert layer.mlp.down_proj.weight[:, :64].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)], ids=["greedy", "sampled"])
def test_the_text_stays(tiny_target_dir: Path, dtype: torch.dtype, sampling: Sampling) -> None:
    texts = [
        autoregressive_decode(
            target,
            PROMPT,
            sampling=sampling,
            max_new_tokens=40,
            chance=SeededChance(1),
            stop_tokens=[],
        ).tokens
        for target in pair(tiny_target_dir, dtype)
    ]
    assert texts[0] == texts[1]


def test_drafters_are_built_for_the_original_and_reports_name_the_inflation(
    tiny_target_dir: Path,
) -> None:
    plain, wide = pair(tiny_target_dir, torch.float32)
    assert wide.spec.fingerprint == plain.spec.fingerprint
    assert wide.spec.name == "tiny_test inflated to 700K"
    assert dataclasses.replace(wide.spec, name=plain.spec.name) == plain.spec


def test_a_saved_inflated_model_loads_as_any_other(tiny_target_dir: Path, tmp_path: Path) -> None:
    model = load(inflated(model_config(tiny_target_dir)))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert size_of(again) == size_of(model)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_the_original_configuration_is_left_as_it_was(tiny_target_dir: Path) -> None:
    config = inflated(model_config(tiny_target_dir))
    settings = load_model_config(config)
    load_model(config, settings, torch.float32, "cpu")
    assert settings.intermediate_size == 64
    drawn = inflated(load_choice("model", "random"), "2M")  # drawn models keep what they are given
    settings = load_model_config(drawn)
    load_model(drawn, settings, torch.float32, "cpu")
    assert settings.intermediate_size == 128


def built(name: str, target: Target) -> Drafter:
    torch.manual_seed(0)
    return load_choice("drafter", name).build(target.spec).to(target.dtype).eval()


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_the_drafter_grows_by_the_same_ratio_and_accepts_the_same(
    tiny_target_dir: Path, name: str
) -> None:
    plain, wide = pair(tiny_target_dir, torch.float64)
    small, large = built(name, plain), built(name, plain)
    label = inflate_as(inflated(model_config(tiny_target_dir)), wide, [large])
    ratio = wide.model.config.intermediate_size / 64
    assert label is not None
    assert f"{name} inflated from" in label
    assert f"feed-forward layers {ratio:.1f} times as wide" in label
    widths = [m.gate_proj.out_features for m in large.modules() if isinstance(m, MLP)]
    assert widths == [64 * ratio]
    # Sampled, because the distributions of random weights overlap where their first choices do not
    # meet.
    one, other = (
        speculative_decode(
            target,
            drafter,
            PROMPT,
            policy=3,
            sampling=Sampling(1.0, 0, 1.0),
            max_new_tokens=60,
            chance=SeededChance(2),
            stop_tokens=[],
        )
        for target, drafter in ((plain, small), (wide, large))
    )
    assert one.tokens == other.tokens
    assert one.stats.untrimmed == other.stats.untrimmed
    assert one.stats.untrimmed.num_accepted_tokens > 5


def test_frozen_copies_of_the_targets_layers_grow_as_the_target_does(tiny_target_dir: Path) -> None:
    plain, wide = pair(tiny_target_dir, torch.float32)
    drafter = built("early_exit", plain)
    drafter.initialise(plain.own_model, None)
    layers = [module for module in drafter.modules() if isinstance(module, MLP)]
    mlp, trained = layers[0], dict(drafter.named_parameters()).keys()
    given = torch.randn(3, plain.spec.hidden_size)
    before, held = mlp(given), sum(value.numel() for value in drafter.state_dict().values())
    width = wide.model.config.intermediate_size
    told = inflate_drafter(drafter, width / 64)
    assert mlp.gate_proj.out_features == width
    assert torch.allclose(mlp(given), before, rtol=1e-4, atol=1e-6)
    after = held + 3 * len(layers) * plain.spec.hidden_size * (width - 64)
    assert told == f"early_exit inflated from {parameters(held)} to {parameters(after)}"
    shapes = {name: value.shape for name, value in drafter.state_dict().items()}
    assert shapes["shallow.0.mlp.gate_proj.weight"] == (width, plain.spec.hidden_size)
    assert dict(drafter.named_parameters()).keys() == trained


@pytest.mark.parametrize("name", ["medusa", "ngram"])
def test_a_drafter_without_feed_forward_layers_stays_and_says_so(
    tiny_target_dir: Path, name: str
) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    drafter = built(name, target)
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    assert inflate_drafter(drafter, 10.0) == (
        f"{name} not inflated (it has no gated feed-forward layer)"
    )
    assert {key: value.shape for key, value in drafter.state_dict().items()} == {
        key: value.shape for key, value in before.items()
    }


def test_nothing_is_said_where_nothing_is_inflated(tiny_target_dir: Path) -> None:
    config = model_config(tiny_target_dir)
    target = load_target(config, torch.float32, "cpu")
    drafter = built("eagle", target)
    assert inflate_as(config, target, [drafter]) is None
    assert drafter.layers[0].mlp.gate_proj.out_features == 64


# What cannot be inflated


def other_architecture(folder: Path, config: Any) -> ModelConfig:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return inflated(model_config(folder), "10M")


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mixtral", {"num_local_experts": 2}),
        ("phi3", {}),  # gate and up in one matrix
        ("starcoder2", {}),  # no gate
        ("bitnet", {}),  # a norm across the inner width
    ],
)
def test_other_feed_forward_layers_are_refused_by_name(
    tiny_target_dir: Path, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "model"))
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **changes)
    with pytest.raises(
        ValueError, match=rf"model.inflate must be null for model=tiny_test \({kind}\): its feed-"
    ):
        load(other_architecture(folder, config))


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "olmo2", "granite"])
def test_other_models_with_llamas_layers_are_inflated(
    tiny_target_dir: Path, tmp_path: Path, kind: str
) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "model"))
    config = transformers.AutoConfig.for_model(kind, **SHAPE, head_dim=8)
    wide = load(other_architecture(folder, config))
    plain = load(model_config(folder))
    assert size_of(wide) == pytest.approx(10e6, rel=0.01)
    torch.testing.assert_close(wide(TOKENS).logits, plain(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_biases_are_widened_too(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "model"))
    config = transformers.AutoConfig.for_model("llama", **SHAPE, mlp_bias=True)
    settings = other_architecture(folder, config)
    wide, plain = load(settings), load(dataclasses.replace(settings, inflate=None))
    assert size_of(wide) == pytest.approx(10e6, rel=0.01)
    torch.testing.assert_close(wide(TOKENS).logits, plain(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_a_size_below_the_model_is_refused_before_weights_are_there(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "no weights"
    shutil.copytree(tiny_target_dir, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = inflated(model_config(folder), "1K")
    with pytest.raises(ValueError, match=r"model\.inflate must be at least"):
        load_target(config, torch.float32, "cpu")


def test_quantised_weights_are_refused_before_they_are_read(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "model"))
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"model.inflate must be null for quantised weights"):
        load(inflated(model_config(folder)))
