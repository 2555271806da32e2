"""A target with scaled rotary positions: `train` says that the drafter's are not."""

from dataclasses import replace

import pytest
import transformers
from builders import drafter_config

from drafttrain.commands.setup.training import scaling_lines
from drafttrain.target.pretrained.limits import rope_scaling_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}  # fmt: skip


@pytest.mark.parametrize("scaling", [YARN, LLAMA3])
def test_a_target_with_scaled_positions_is_named(scaling: dict[str, object]) -> None:
    text = transformers.AutoConfig.for_model("llama", rope_parameters=scaling | {"rope_theta": 5e5})
    found = rope_scaling_of(text)
    assert found == scaling
    (line,) = scaling_lines(drafter_config("eagle3"), found)
    assert f"the target's are scaled ({scaling['rope_type']}), the drafter's are unscaled" in line
    assert f"drafter.rope_scaling='{{rope_type: {scaling['rope_type']}, factor: " in line
    assert not scaling_lines(replace(drafter_config("eagle3"), rope_scaling=scaling), found)


def test_a_target_without_scaling_needs_no_word() -> None:
    text = transformers.AutoConfig.for_model("llama", rope_theta=5e5)
    assert rope_scaling_of(text) is None
    assert not scaling_lines(drafter_config("eagle3"), None)
    assert not scaling_lines(drafter_config("medusa"), YARN)
