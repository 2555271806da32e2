"""Targets and drafters in fewer bits, by Transformers' own schemes.

What loads quantised weights needs the extra `quant`, and is skipped without it.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import draft_model_dir, model_config
from test_drafters import build

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.target.model import load_target
from drafttrain.target.pretrained.models import load_model, load_model_config, load_tokenizer

# torchao quantises groups of inputs: wider than the other tiny models.
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8}
SETTINGS: dict[str, Any] = {
    "sampling": GREEDY,
    "max_new_tokens": 24,
    "chance": SeededChance(0),
    "stop_tokens": [],
}


def num_quantized(model: Any) -> int:
    return sum("Int8" in type(parameter).__name__ for parameter in model.parameters())


needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs pip install 'drafttrain[quant]'"
)


@pytest.fixture(scope="module")
def quantized_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that carries its quantisation."""
    folder = tmp_path_factory.mktemp("quantized")
    config = replace(model_config(Path(draft_model_dir(97, **WIDE))), quantization="torchao-int8")
    settings = load_model_config(config)
    model = load_model(config, settings, torch.float32, "cpu")
    model.save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return folder


@needs_torchao
def test_a_quantised_target_and_a_quantised_drafter_decode_losslessly() -> None:
    folder = draft_model_dir(97, **WIDE, num_hidden_layers=3)
    config = replace(model_config(Path(folder)), quantization="torchao-int8")
    target = load_target(config, torch.float32, "cpu")
    assert num_quantized(target.model) == 3 * 7
    drafter = build(
        "two_model",
        target.spec,
        path=draft_model_dir(97, **WIDE),
        quantization="torchao-int8",
    )
    drafter.attach(target.tokenizer)
    assert num_quantized(drafter) == 2 * 7
    drafter.to("cpu", torch.bfloat16).to(torch.bfloat16)  # as evaluation moves every drafter
    assert num_quantized(drafter) == 2 * 7
    plain = autoregressive_decode(target, [1, 3, 6, 20], **SETTINGS)
    drafted = speculative_decode(target, drafter, [1, 3, 6, 20], policy=3, **SETTINGS)
    assert drafted.tokens == plain.tokens
    exact = load_target(model_config(Path(folder)), torch.float32, "cpu")
    tokens = torch.arange(6, 30)[None]
    logits, _ = target.step(target.begin(), tokens)
    expected, _ = exact.step(exact.begin(), tokens)
    assert 0 < (logits - expected).abs().mean() < 0.1 * expected.abs().mean()


@needs_torchao
def test_weights_that_come_quantised_stay_so(quantized_dir: Path) -> None:
    target = load_target(model_config(quantized_dir), torch.float32, "cpu")
    drafter = build("two_model", target.spec, path=str(quantized_dir))
    assert num_quantized(target.model) == num_quantized(drafter) == 2 * 7
    drafted = speculative_decode(target, drafter, [1, 3, 6, 20], policy=3, **SETTINGS)
    counters = drafted.stats.untrimmed
    assert counters.num_accepted_tokens == counters.num_draft_tokens, "it is the target itself"


@needs_torchao
def test_a_scheme_on_top_of_another_is_refused(quantized_dir: Path) -> None:
    config = replace(model_config(quantized_dir), quantization="torchao-int8")
    with pytest.raises(ValueError, match=r"weights that are quantised already \(torchao\), got to"):
        load_target(config, torch.float32, "cpu")


def test_a_scheme_whose_package_is_missing_says_how_to_get_it(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafttrain.target.pretrained.quantize.find_spec", lambda name: None)
    config = replace(model_config(tiny_target_dir), quantization="bnb-4bit")
    with pytest.raises(ValueError, match=r"^model\.quantization=bnb-4bit .* 'bitsandbytes'$"):
        load_target(config, torch.float32, "cpu")
    spec = load_target(model_config(tiny_target_dir), torch.float32, "cpu").spec
    with pytest.raises(ValueError, match=r"^drafter\.quantization=torchao-int8 .*\[quant\]'$"):
        build("two_model", spec, path=str(tiny_target_dir), quantization="torchao-int8")


def test_an_unknown_scheme_is_refused_by_name(tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.quantization must be one of torchao-int8"):
        replace(model_config(tiny_target_dir), quantization="int3")
    spec = load_target(model_config(tiny_target_dir), torch.float32, "cpu").spec
    with pytest.raises(ValueError, match=r"drafter\.quantization must be one of torchao"):
        build("two_model", spec, path=str(tiny_target_dir), quantization="int3")
