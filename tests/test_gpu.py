"""What must hold on a CUDA device: run by benchmarks/gpu.sh, `pytest -m gpu`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_drafters import ALL, PROMPTS, TRAINABLE, NoChance, as_batch, build, random_drafter
from tests_support import model_config

from drafttrain.chance import SeededChance
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.target.target import Target, load_target
from drafttrain.types import GREEDY, weighted_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(model_config(tiny_target_dir), torch.float32, "cuda")


@pytest.mark.parametrize("name", ALL)
def test_greedy_speculative_output_is_greedy_output_on_the_gpu(name: str, target: Target) -> None:
    drafter = random_drafter(name, target).to("cuda")
    settings: dict[str, Any] = {
        "sampling": GREEDY,
        "max_new_tokens": 24,
        "chance": SeededChance(0),
        "stop_tokens": [],
    }
    for prompt in PROMPTS:
        plain = autoregressive_decode(target, prompt, **settings)
        assert (
            speculative_decode(target, drafter, prompt, depth=3, **settings).tokens == plain.tokens
        )


@pytest.mark.parametrize("name", TRAINABLE)
def test_gpu_and_cpu_give_the_same_loss(name: str, target: Target, tiny_target_dir: Path) -> None:
    on_cpu = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    batch = as_batch(list(range(20, 60)), [1, 9, 8, 30, 31])
    losses = []
    for place in (on_cpu, target):
        torch.manual_seed(0)
        drafter = build(name, place.spec)
        drafter.prepare(torch.arange(place.spec.vocab_size), on_cpu.readout)
        drafter.to(place.device)
        moved = batch.to(place.device)
        losses.append(
            float(weighted_sum(drafter(moved, place.features(moved, drafter.captures), NoChance())))
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
