"""A target with scaled rotary positions: `train` and `export` say that the drafter's are not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from builders import drafter_config

from drafttrain.__main__ import main
from drafttrain.commands.setup.target_and_drafter import scaling_lines
from drafttrain.target.pretrained.limits import rope_scaling_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}  # fmt: skip


@pytest.mark.parametrize("scaling", [YARN, LLAMA3])
def test_a_target_with_scaled_positions_is_named(scaling: dict[str, object]) -> None:
    text = transformers.AutoConfig.for_model("llama", rope_parameters=scaling | {"rope_theta": 5e5})
    found = rope_scaling_of(text)
    assert found == scaling
    (line,) = scaling_lines(drafter_config("eagle3"), text)
    assert f"the target's are scaled ({scaling['rope_type']}), the drafter's are unscaled" in line
    assert f"drafter.rope_scaling='{{rope_type: {scaling['rope_type']}, factor: " in line
    assert not scaling_lines(replace(drafter_config("eagle3"), rope_scaling=scaling), text)


def test_a_target_without_scaling_needs_no_word() -> None:
    text = transformers.AutoConfig.for_model("llama", rope_theta=5e5)
    assert rope_scaling_of(text) is None
    assert not scaling_lines(drafter_config("eagle3"), text)
    text = transformers.AutoConfig.for_model("llama", rope_parameters=YARN | {"rope_theta": 5e5})
    assert not scaling_lines(drafter_config("medusa"), text)


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
    line = "the target's are scaled (yarn), the drafter's are unscaled"
    assert line in capsys.readouterr().out.replace("\n", " ")
    assert main(["export", f"run.dir={run}", "export.dtype=float32"]) == 0
    assert line in capsys.readouterr().out.replace("\n", " ")
