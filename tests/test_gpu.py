"""What must hold on a CUDA device: run by benchmarks/gpu.sh, `pytest -m gpu`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from test_drafters import ALL, PROMPTS, TRAINABLE, NoChance, as_batch, build, random_drafter

from drafttrain.commands.setup.plan import accelerator_of, default_settings, job_of
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import TrainConfig
from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Batch, weighted_sum
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.plan.memory import Sharding, memory_of
from drafttrain.target.model import Target, load_target
from drafttrain.training.engine.build import build_engine

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
            speculative_decode(target, drafter, prompt, policy=3, **settings).tokens == plain.tokens
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


@pytest.mark.parametrize("drafter", ["eagle3", "eagle", "medusa"])
def test_a_step_takes_the_memory_that_was_planned(drafter: str) -> None:
    """Peak of loading and two steps within 15 %, on a target of two gigabytes."""
    told = ["model=random_1b", f"drafter={drafter}", "hardware=h100x1", "hardware.accelerator=null"]
    told += ["hardware.micro_batch=4", "data.max_length=1024", "trainer.tokens_per_step=4096"]
    config = typed(compose("train", told), TrainConfig)
    settings = default_settings()
    job = job_of(config, settings, accelerator_of(config.hardware, 0.01))
    planned = memory_of(job, Sharding("none", None, False, False, 0), "device")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    target = load_target(config.model, torch.bfloat16, "cuda")
    vocab = target.spec.vocab_size
    module = config.drafter.build(target.spec)
    module.prepare(torch.arange(vocab) % 7 + 100, target.readout)
    engine = build_engine(
        module,
        config.deepspeed,
        device="cuda",
        dtype=torch.bfloat16,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    tokens = torch.randint(0, vocab, (4, 1024))
    document = torch.arange(4)[:, None].repeat(1, 1024)
    mask = torch.rand(4, 1024) < settings.loss_share
    batch = Batch(tokens, mask, torch.arange(1024).repeat(4, 1), document).to(torch.device("cuda"))
    for _ in range(2):
        features = target.features(batch, module.captures)
        engine.backward(weighted_sum(engine.losses(batch, features, NoChance())), last=True)
        engine.step(1e-4)
    peak = torch.cuda.max_memory_allocated() - before
    counted = planned.total - planned.parts["overhead"]  # which the allocator does not see
    assert abs(counted - peak) <= 0.15 * peak, f"planned {counted / 1e9:.2f} GB, {peak / 1e9:.2f}"
