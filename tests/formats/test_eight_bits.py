"""Exports in 8 bits: what they are worth, what reads them, and what rounding cost."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from published import Published, eagle3
from safetensors.torch import load_file
from test_read import admitted
from test_write import CARD, config_of, drafter_of, export, layout_of
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.formats.eight_bits import (
    FP8,
    KEY,
    LARGEST,
    WRITTEN,
    quantised,
    rounded_by_token,
    worth,
)
from drafttrain.formats.write.export import export_drafter
from drafttrain.formats.write.precision import Precision
from drafttrain.target.model import Target

FAMILIES = ("dflash", "dflash2", "dspark", "eagle3", "eagle3_1", "eagle", "p_eagle")
PRODUCTS = ("fc.weight", "_proj.weight")


def in_eight_bits(published: Published) -> Published:
    for name in [name for name in published.tensors if name.endswith(PRODUCTS)]:
        stored, scale = quantised(published.tensors[name])
        published.tensors |= {name: stored, f"{name}_scale": scale}
    published.config[KEY] = json.loads(json.dumps(WRITTEN))
    return published


def test_a_weight_is_worth_its_nearest_number_on_the_scale_of_its_row() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 64) * torch.logspace(-6, 4, 5)[:, None]
    weight[3] = 0
    stored, scale = quantised(weight)
    assert stored.dtype == FP8
    assert scale.shape == (5, 1)
    found = worth(stored, scale)
    assert torch.equal(found[3], weight[3])
    largest = weight.abs().amax(1)
    torch.testing.assert_close(found.abs().amax(1), largest, rtol=1e-6, atol=0)
    # Three bits of mantissa: half a step is a sixteenth; below 2**-6 steps are 2**-9 of the scale.
    allowed = torch.maximum(weight.abs() / 16, largest[:, None] / LARGEST / 2**10)
    assert bool(((found - weight).abs() <= allowed * (1 + 1e-5)).all())
    assert bool((found != weight).any())


def test_activations_are_rounded_token_by_token() -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 3, 16) * torch.tensor([1.0, 1e3, 0.0])[:, None]
    found = rounded_by_token(values)
    assert torch.equal(found[0, 0], rounded_by_token(values[0, 0]))  # whatever stands beside it
    assert torch.equal(found[:, 2], values[:, 2])
    assert 0 < float((found - values).abs()[:, 0].max()) < float(values[:, 0].abs().max() / 16)


def test_engines_are_told_which_products_stay_in_sixteen_bits() -> None:
    """vLLM matches a layer's name from its start; "Linear" would take what is not named here."""
    patterns = [name.removeprefix("re:") for name in WRITTEN["ignore"]]

    def ignored(layer: str) -> bool:
        return any(re.match(f"{pattern}$", layer) is not None for pattern in patterns)

    assert ignored("lm_head")
    assert ignored("model.layers.32.attention_conv.kernel_projection")
    assert ignored("model.layers.32.mlp_conv.kernel_projection")
    assert not ignored("model.layers.32.self_attn.qkv_proj")
    assert not ignored("model.fc")


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_written_in_eight_bits_and_read_back_as_measured(
    family: str, tmp_path: Path
) -> None:
    drafter = drafter_of(family)
    done = export(drafter, tmp_path / "out", dtype="fp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config[KEY] == WRITTEN
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    table = layout_of(drafter).expected_tensors(config)
    for name in (name for name, expected in table.items() if expected.required):
        eight = name.endswith(PRODUCTS)
        floats = tensors[name].is_floating_point()
        assert tensors[name].dtype == (FP8 if eight else torch.bfloat16) or not floats, name
        assert (f"{name}_scale" in tensors) == eight
        if eight:
            assert tuple(tensors[f"{name}_scale"].shape) == (len(tensors[name]), 1)
    assert len([name for name in tensors if name.endswith("_scale")]) >= 8
    assert done.rounding.exact
    rounded = done.rounding.written.state_dict()
    for name, weight in drafter.state_dict().items():
        if name == "scale.factor":  # of EAGLE's embeddings: in fc
            continue
        wanted: Tensor = weight
        if name.endswith(PRODUCTS):
            wanted = worth(*quantised(weight))
        elif weight.is_floating_point():
            wanted = weight.to(torch.bfloat16).float()
        assert torch.equal(rounded[name], wanted), name
    text = "\n".join(done.lines())
    assert "parameters in fp8 (fc and the decoder layers' products) and bfloat16" in text
    assert "rounding to fp8 moved logits by at most" in text
    assert "serve with SGLang" not in text
    assert "with a scale for each row" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("medusa", {}, "export.dtype=fp8 must be of a drafter that vLLM serves in 8 bits, got med"),
        ("eagle3", {"format": "speculators"}, "must come with export.format=vllm, got speculator"),
    ],
)
def test_eight_bits_that_no_engine_reads_are_refused(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        export(drafter_of(family), tmp_path / "out", dtype="fp8", **changes)
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_others_in_eight_bits_is_admitted_as_its_numbers(
    target: Target, tmp_path: Path
) -> None:
    plain = eagle3()
    for name in plain.tensors:
        if name.endswith(PRODUCTS):
            plain.tensors[name] = worth(*quantised(plain.tensors[name]))
    one = admitted(plain.write(tmp_path / "plain"), target)
    two = admitted(in_eight_bits(eagle3()).write(tmp_path / "eight"), target)
    found = two.drafter.state_dict()
    assert all(torch.equal(found[name], t) for name, t in one.drafter.state_dict().items())
    assert any("activations are not rounded" in line for line in two.lines())
    assert not any("activations" in line for line in one.lines())
    whole = in_eight_bits(eagle3())  # one scale for a matrix, which compressed-tensors has too
    for name in [name for name in whole.tensors if name.endswith("_scale")]:
        whole.tensors[name] = torch.tensor([0.5])
    whole.config[KEY]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    three = admitted(whole.write(tmp_path / "whole"), target).drafter.state_dict()
    assert torch.equal(three["fc.weight"], whole.tensors["fc.weight"].float() / 2)


def four_bits(published: Published) -> None:
    published.config[KEY]["config_groups"]["group_0"]["weights"]["num_bits"] = 4


def no_scale(published: Published) -> None:
    del published.tensors["fc.weight_scale"]


def short_scale(published: Published) -> None:
    published.tensors["fc.weight_scale"] = published.tensors["fc.weight_scale"][1:]


def needless_scale(published: Published) -> None:
    published.tensors["norm.weight_scale"] = torch.ones(1)


def groups_of_nothing(published: Published) -> None:
    published.config[KEY]["config_groups"] = {"group_0": 3}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (four_bits, "quantization_config must be compressed-tensors' float-quantized"),
        (groups_of_nothing, "quantization_config must be compressed-tensors' float-quantized"),
        (no_scale, "fc.weight must have a scale where it is torch.float8_e4m3fn, and no other"),
        (needless_scale, "norm.weight must have a scale where it is"),
        (short_scale, r"fc.weight_scale must be of each row .*, got \[31, 1\] for \[32, 96\]"),
    ],
)
def test_eight_bits_of_another_kind_are_refused_by_name(
    spoil: Any, said: str, target: Target, tmp_path: Path
) -> None:
    published = in_eight_bits(eagle3())
    spoil(published)
    with pytest.raises(ValueError, match=said):
        admitted(published.write(tmp_path), target)


def test_an_export_is_measured_as_engines_compute_and_says_it(tmp_path: Path) -> None:
    drafter = drafter_of("dflash")
    seen: list[Drafter] = []

    def measure(written: Drafter, depth: int) -> str:
        seen.append(written)
        assert depth == 7, "a whole block"
        return "It cost nothing."

    folder = tmp_path / "out"
    done = export_drafter(
        drafter, "/models/tiny", folder, config_of(dtype="fp8"), CARD, None, measure
    )
    assert "It cost nothing." in "\n".join(done.lines())
    assert "It cost nothing." in (folder / "README.md").read_text()
    inputs = torch.randn(2, seen[0].get_parameter("fc.weight").shape[1])
    weight = seen[0].get_parameter("fc.weight")
    assert torch.equal(seen[0].get_submodule("fc")(inputs), rounded_by_token(inputs) @ weight.T)
    plain, own = Precision(torch.bfloat16).as_engines_compute(drafter), drafter.get_submodule("fc")
    assert torch.equal(own(inputs), inputs @ plain.get_parameter("fc.weight").T)
