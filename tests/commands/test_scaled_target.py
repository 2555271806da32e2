"""A target with scaled rotary positions: a drafter has the same scaling, and a line says so."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import drafter_config

from drafttrain.__main__ import main
from drafttrain.commands.setup.target_and_drafter import scaling_lines
from drafttrain.core.ops.layers import rotation
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.shared.layer import ROPE_SCALINGS
from drafttrain.target.model import Target
from drafttrain.target.pretrained.limits import rope_scaling_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0}
SCALINGS: list[dict[str, Any]] = [YARN, LLAMA3, LINEAR]
SHORT = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
FAMILIES = ("eagle", "eagle3", "p_eagle", "dflash", "dspark", "mtp", "early_exit")


def scaled(spec: TargetSpec, scaling: dict[str, Any] | None) -> TargetSpec:
    return replace(spec, rope_scaling=scaling)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_rotates_as_its_target_unless_told_otherwise(family: str, target: Target) -> None:
    for scaling in SCALINGS:
        spec = scaled(target.spec, scaling)
        shape = drafter_config(family).shape(spec)  # type: ignore[attr-defined]
        assert shape.rope_scaling == scaling
        shape = drafter_config(family, rope_scaling=None).shape(spec)  # type: ignore[attr-defined]
        assert shape.rope_scaling is None
        shape = drafter_config(family, rope_scaling=LINEAR).shape(spec)  # type: ignore[attr-defined]
        assert shape.rope_scaling == LINEAR
    shape = drafter_config(family).shape(target.spec)  # type: ignore[attr-defined]
    assert shape.rope_scaling is None


@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_inherited_scaling_turns_as_transformers_does(
    scaling: dict[str, Any], target: Target
) -> None:
    spec, places = scaled(target.spec, scaling), torch.arange(0, 2000, 37)[None]
    ours = drafter_config("eagle3").shape(spec).rotation(places, torch.float32)  # type: ignore[attr-defined]
    config = transformers.LlamaConfig(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=2048,
        rope_parameters=scaling | {"rope_theta": spec.rope_theta},
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), places)
    torch.testing.assert_close(ours.cos, cos)
    torch.testing.assert_close(ours.sin, sin)
    assert not torch.equal(cos, rotation(places, spec.head_dim, spec.rope_theta, cos.dtype).cos)


@pytest.mark.parametrize(
    ("scaling", "settings", "said"),
    [
        (YARN, {}, "the target's are scaled (yarn), the drafter's are too, which vLLM and SGLang"),
        (YARN | {"partial_rotary_factor": 0.5}, {}, "the drafter's are too"),
        (LLAMA3, {"rope_scaling": None}, "the drafter's are not; drafter.rope_scaling=target"),
        (LLAMA3, {"rope_scaling": YARN}, "the drafter's are scaled otherwise; drafter.rope_scal"),
        ({"rope_type": "dynamic", "factor": 2.0}, {}, "are not; drafters can be scaled by linear"),
        (SHORT, {}, "scaled (longrope), the drafter's are not; drafters can be scaled by linear"),
    ],
)
def test_a_line_says_whether_a_drafter_is_scaled(
    scaling: dict[str, Any], settings: dict[str, Any], said: str, target: Target
) -> None:
    drafter = drafter_config("eagle3", **settings).build(scaled(target.spec, scaling))
    (line,) = scaling_lines(drafter)
    assert said in line
    assert set(ROPE_SCALINGS) == {one["rope_type"] for one in SCALINGS}


def test_a_target_without_scaling_needs_no_word(target: Target) -> None:
    assert rope_scaling_of(transformers.AutoConfig.for_model("llama", rope_theta=5e5)) is None
    assert not scaling_lines(drafter_config("eagle3").build(target.spec))
    assert not scaling_lines(drafter_config("medusa").build(scaled(target.spec, YARN)))


def test_a_setting_that_is_no_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"drafter.rope_scaling must be target, null for none, or"):
        drafter_config("eagle3", rope_scaling="none")


def test_train_and_export_say_so(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, data, run = tmp_path / "target", tmp_path / "data.jsonl", tmp_path / "run"
    shutil.copytree(tiny_target_dir, target)
    settings = json.loads((target / "config.json").read_text())
    settings["rope_parameters"] = YARN | {"rope_theta": 1e4}
    (target / "config.json").write_text(json.dumps(settings))
    turns = [[("user", f"Say {n}."), ("assistant", f"It is {n}, I think.")] for n in range(8)]
    talks = [{"messages": [{"role": r, "content": c} for r, c in each]} for each in turns]
    data.write_text("".join(json.dumps(each) + "\n" for each in talks))
    told = ["train", f"run.dir={run}", f"model.path={target}", "data=jsonl", f"data.path={data}"]
    told += ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32", "data.holdout=2"]
    told += ["trainer.tokens_per_step=32", "trainer.validation_prompts=1", "trainer.max_steps=1"]
    assert main([*told, "trainer.validation_tokens=4", "drafter.unroll=2"]) == 0
    line = "the target's are scaled (yarn), the drafter's are too"
    assert line in capsys.readouterr().out.replace("\n", " ")
    out = tmp_path / "out"
    assert main(["export", f"run.dir={run}", f"export.dir={out}", "export.dtype=float32"]) == 0
    assert line in capsys.readouterr().out.replace("\n", " ")
    written = json.loads((out / "config.json").read_text())
    assert {**written["rope_scaling"], **YARN} == written["rope_scaling"]
