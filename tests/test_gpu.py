"""What must hold on a CUDA device: run by benchmarks/gpu.sh, `pytest -m gpu`."""

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from plain_training import attention
from test_drafters import ALL, PROMPTS, TRAINABLE, NoChance, as_batch, build, random_drafter

from drafttrain.commands.setup.plan import accelerator_of, default_settings, job_of
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import TrainConfig
from drafttrain.core.chance import SeededChance
from drafttrain.core.ops.graphs import CAPTURES
from drafttrain.core.ops.layers import document_mask
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import placed
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Batch, weighted_sum
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.decode.policy import DynamicTree, Policy, chain, tree_of_widths
from drafttrain.plan.memory import memory_of
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
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_greedy_speculative_output_is_greedy_output_on_the_gpu(
    name: str, graphs: bool, target: Target, tiny_target_dir: Path
) -> None:
    drafter = random_drafter(name, target).to("cuda")
    settings: dict[str, Any] = {
        "sampling": GREEDY,
        "max_new_tokens": 24,
        "chance": SeededChance(0),
        "stop_tokens": [],
    }
    if graphs:
        target = load_target(model_config(tiny_target_dir), torch.float32, "cuda")
        assert target.use_graphs() is None
        drafter.use_graphs(CAPTURES["cuda"])
    for prompt in PROMPTS:
        plain = autoregressive_decode(target, prompt, **settings)
        assert (
            speculative_decode(target, drafter, prompt, policy=3, **settings).tokens == plain.tokens
        )


POLICIES = [chain(4), tree_of_widths([3, 2, 1]), DynamicTree(4, 3, 8)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("ngram", "ensemble")])
def test_the_host_waits_once_in_a_cycle_on_the_gpu(
    name: str, policy: Policy, target: Target
) -> None:
    """CUDA's own count of the calls that wait; tests/test_second_device.py names the lines."""
    drafter = random_drafter(name, target).to("cuda")
    settings: dict[str, Any] = {"sampling": Sampling(1.0, 0, 0.9), "stop_tokens": []}
    settings |= {"policy": policy, "chance": SeededChance(0), "max_new_tokens": 24}
    if isinstance(policy, DynamicTree):
        settings["draft_sampling"] = GREEDY
    waits: list[int] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            speculative_decode(
                *(target, drafter, PROMPTS[0]),
                record=lambda _: waits.append(sum("synchron" in str(w.message) for w in warned)),
                **settings,
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(waits) > 2
    assert waits[-1] - waits[0] == len(waits) - 1


def test_a_function_is_captured_after_one_that_could_not_be() -> None:
    capture, values = CAPTURES["cuda"], torch.arange(8.0, device="cuda")
    for scale in (2, 3):
        with pytest.raises(RuntimeError, match="captur"):
            capture(lambda: (values * values.sum().item(),), values.device)
        assert torch.rand(8, device="cuda").max() < 1
        (found,), replay = capture(lambda scale=scale: (values * scale,), values.device)
        values.add_(1)
        replay()
        assert torch.equal(found, values * scale)


def test_what_the_parts_of_a_decoding_take_adds_up_on_the_gpu(target: Target) -> None:
    drafter = random_drafter("eagle3", target).to("cuda")
    settings: dict[str, Any] = {"sampling": GREEDY, "chance": SeededChance(0), "stop_tokens": []}
    for _ in range(2):  # the first one warms up
        torch.cuda.synchronize()
        started = time.perf_counter()
        stats = speculative_decode(
            target, drafter, PROMPTS[0], policy=3, max_new_tokens=32, **settings
        ).stats
        wall = time.perf_counter() - started
    assert 0.8 * wall < stats.total_s < 1.05 * wall
    assert min(stats.prefill_s, stats.draft_s, stats.verify_s, stats.other_s) > 0


def test_an_id_without_mass_is_never_chosen_on_the_gpu() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    probs = torch.rand(4096, 5000, device="cuda", generator=generator)
    probs *= torch.rand(4096, 5000, device="cuda", generator=generator) < 0.01
    probs /= probs.sum(-1, keepdim=True)
    chosen = SeededChance(0).choose(probs, range(4096), [0] * 4096, 0)
    assert bool((probs.gather(1, chosen[:, None]) > 0).all())
    on_cpu = SeededChance(0).choose(probs.cpu(), range(4096), [0] * 4096, 0)
    assert int((chosen.cpu() != on_cpu).sum()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("depths", [1, 3])
def test_attention_has_the_gradient_of_its_definition_on_the_gpu(
    depths: int, packed: bool, dtype: torch.dtype
) -> None:
    """By every kernel, over what another program left in memory; heads share keys in groups."""
    rows, seq, width = 3, 87, 64
    document = torch.arange(seq).repeat(rows, 1) // 40 if packed else torch.zeros(rows, seq)
    document = document.long()
    document[:, seq - 5 :] = -1
    mask = document_mask(document.cuda(), document)
    assert (mask is not None) == packed
    torch.manual_seed(0)
    drawn = [
        torch.randn(rows, seq, heads, width, device="cuda").to(dtype).transpose(1, 2)
        for heads in [6, *[2] * (2 * depths)]
    ]
    given = [tensor.requires_grad_() for tensor in drawn]
    wide = [tensor.detach().double().requires_grad_() for tensor in drawn]
    left = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(8, 24)]
    del left
    found = unrolled_attention(given[0], list(zip(given[1::2], given[2::2], strict=True)), mask)
    expected = attention(wide[0], list(zip(wide[1::2], wide[2::2], strict=True)), mask)
    slope = torch.randn(rows, seq, 6, width, device="cuda").to(dtype).transpose(1, 2)
    grads = torch.autograd.grad(found, given, slope)
    exact = torch.autograd.grad(expected, wide, slope.double())
    for one, other in zip([found, *grads], [expected, *exact], strict=True):
        apart = (one.double() - other).norm() / other.norm()
        assert apart < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", TRAINABLE)
def test_gpu_and_cpu_give_the_same_loss_and_gradient(
    name: str, target: Target, tiny_target_dir: Path
) -> None:
    on_cpu = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    batch = as_batch(list(range(20, 60)), [1, 9, 8, 30, 31])
    found = []
    for place in (on_cpu, target):
        torch.manual_seed(0)
        drafter = build(name, place.spec)
        drafter.prepare(torch.arange(place.spec.vocab_size), on_cpu.readout)
        drafter.to(place.device)
        moved = placed(batch, place.device)
        features = place.features(moved, drafter.captures)
        loss = weighted_sum(drafter(moved, features, NoChance()))
        loss.backward()
        slopes = [p.grad.cpu().flatten() for p in drafter.parameters() if p.grad is not None]
        found.append((loss.item(), torch.cat(slopes)))
    (one, slope), (other, same) = found
    assert other == pytest.approx(one, rel=1e-4)
    assert (same - slope).norm() <= 1e-3 * slope.norm()


@pytest.mark.parametrize("drafter", ["eagle3", "eagle", "medusa"])
def test_a_step_takes_the_memory_that_was_planned(drafter: str) -> None:
    """Peak of loading and two steps within 15 %, on a target of two gigabytes.

    A plan is of a step of several micro batches: while one is differentiated, the gradients of
    those before it are there.
    """
    told = ["model=random_1b", f"drafter={drafter}", "hardware=h100x1", "hardware.accelerator=null"]
    told += ["hardware.micro_batch=4", "data.max_length=1024", "trainer.tokens_per_step=8192"]
    config = typed(compose("train", told), TrainConfig)
    settings = default_settings()
    job = job_of(config, settings, accelerator_of(config.hardware, 0.01))
    planned = memory_of(job, config.deepspeed, "device")
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
        optimizer=config.optimizer,
    )
    tokens = torch.randint(0, vocab, (4, 1024))
    document = torch.arange(4)[:, None].repeat(1, 1024)
    mask = torch.rand(4, 1024) < settings.loss_share
    batch = Batch(tokens, mask, torch.arange(1024).repeat(4, 1), document)
    batch = placed(batch, torch.device("cuda"))
    for _ in range(2):
        for last in (False, True):
            features = target.features(batch, module.captures)
            engine.backward(weighted_sum(engine.losses(batch, features, NoChance())), last=last)
        engine.step(1e-4)
    peak = torch.cuda.max_memory_allocated() - before
    counted = planned.total - planned.parts["overhead"]  # which the allocator does not see
    assert abs(counted - peak) <= 0.15 * peak, f"planned {counted / 1e9:.2f} GB, {peak / 1e9:.2f}"
