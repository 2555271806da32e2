"""A plan says before a run what it takes: beside published sizes and measured bytes."""

import functools
import io
import json
import re
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import EXACT, SHAPE, build, model_config_of, settings_of
from builders import drafter_config
from memory_tracker import PeakBytes, bytes_of
from pairs import dealt
from rich.console import Console
from torch import Tensor
from transformers import CONFIG_MAPPING

from drafttrain.__main__ import main
from drafttrain.commands.setup import plan
from drafttrain.commands.setup.plan import (
    accelerator_of,
    default_settings,
    foresee,
    job_of,
    measured_efficiency,
    plan_of,
    ranks_of,
)
from drafttrain.config.compose import compose, load_choice, typed
from drafttrain.config.groups import choices
from drafttrain.config.sections import PlanConfig, TrainConfig
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, LossTerm, TargetFeatures, TargetSpec, weighted_sum
from drafttrain.drafters.base import (
    Drafter,
    DrafterConfig,
    TrainingChance,
)
from drafttrain.plan import accelerator, shapes
from drafttrain.plan.accelerator import host_memory, matching
from drafttrain.plan.job import Job, feature_bytes
from drafttrain.plan.memory import (
    memory_of,
    place,
    target_activations,
    training_bytes,
)
from drafttrain.plan.pages import blocks, headline, serving
from drafttrain.plan.serving import accepted, fitting, host_of, paying, rate_of, serve
from drafttrain.plan.shapes import Shape, inflated, shape_of
from drafttrain.plan.shapes import settings_of as configuration_of
from drafttrain.plan.throughput import LAYER_OPERATIONS, Throughput, cost
from drafttrain.plan.trace import DrafterCost, Load, UnknownCostError, trace
from drafttrain.report.results import Table
from drafttrain.report.tables import rich_table
from drafttrain.runtime.hardware import dtype_name
from drafttrain.runtime.run_folder import write_config
from drafttrain.target.model import load_target
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.models import EMBEDDED
from drafttrain.training.engine.build import build_engine
from drafttrain.training.engine.config import DeepSpeedConfig

PUBLISHED = {  # parameters, as the weights' files hold them
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
    "qwen3_8b": 8_190_735_360,
    "smollm2_135m": 134_515_008,
}
WITHIN = 0.15
SIZES = (
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_embeddings"),
)
PLAIN = load_choice("deepspeed", "none")


def zero(stage: int, offload: bool = False) -> DeepSpeedConfig:
    """A stage of ZeRO without buffers."""
    keys = {"stage": stage, "reduce_bucket_size": 0}
    keys |= {"offload_optimizer": {"device": "cpu"}} if offload else {}
    return DeepSpeedConfig(name="x", enabled=True, config={"zero_optimization": keys})


def within(planned: float, measured: float) -> bool:
    return abs(planned - measured) <= WITHIN * measured


def sized(**changes: Any) -> ModelConfig:
    """A random target of these sizes."""
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_embeddings": False,
        "max_positions": 2048,
        "rope_theta": 10000.0,
    }
    return model_of("random", **values | changes)


def shape(**changes: Any) -> Shape:
    return shape_of(sized(**changes))


def model_of(name: str, **changes: Any) -> ModelConfig:
    """A target as conf/model/<name>.yaml says, less what is changed."""
    return replace(load_choice("model", name), **changes)


WIDE = shape()
NARROW = shape(vocab_size=8192, hidden_size=64, intermediate_size=128, head_dim=16)
DEEP = shape(vocab_size=2048, hidden_size=128, num_key_value_heads=4, head_dim=32, num_layers=7)


def traced(
    config: DrafterConfig, of: Shape, dtype: torch.dtype = torch.float32, share: float = 0.75
) -> DrafterCost:
    """What a drafter takes, of a micro batch of four rows of 256 tokens on a CPU."""
    sizes = sized(**{key: getattr(of, key) for key in SIZES})
    load = Load(4, 256, 1, 1, 1024, share, dtype_name(dtype), False, False, True)
    return trace(config, of, lambda: configuration_of(sizes), load)


@functools.cache
def planned(*overrides: str) -> Any:
    """The plan of these settings, which no test may change."""
    return plan_of(typed(compose("plan", overrides), PlanConfig))


def job_planned(*overrides: str) -> Job:
    """What is planned with these settings, without the choices and the advice of a plan."""
    config = planned_config(*overrides)
    return job_of(config, config.plan, accelerator_of(config.hardware, 0.01))


# --- what is counted exactly


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_architectures_in_conf_have_the_published_parameters(name: str) -> None:
    assert shape_of(model_of(name)).num_parameters == PUBLISHED[name]


def test_every_model_that_is_named_can_be_planned_without_the_hub() -> None:
    for name in choices("model"):
        assert shape_of(model_of(name)).num_parameters > 1e4, name


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_real_model(kind: str, tied: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80}
    settings |= {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    if kind == "llama":
        settings |= {"attention_bias": True, "mlp_bias": True}
    config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=tied, **settings)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = shape_of(model_config_of(path=str(tmp_path)))
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(m.weight): m.weight.numel() for m in (embedding, head)}
    assert found.readout_parameters == sum(tables.values()) + found.hidden_size


def test_the_embedded_target_is_planned_as_it_is() -> None:
    from safetensors import safe_open

    with safe_open(EMBEDDED / "model.safetensors", "pt") as file:
        sizes = [torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys()]  # noqa: SIM118
    found = shape_of(model_of("tiny"))
    assert found.num_parameters == sum(sizes)
    assert (found.hidden_size, found.num_layers, found.rope_theta) == (384, 8, 10000.0)


def test_an_inflated_target_has_the_parameters_asked_for() -> None:
    tiny = shape_of(model_of("tiny"))
    larger = inflated(model_of("tiny", inflate="500M"), tiny)
    assert larger.num_parameters == pytest.approx(5e8, rel=0.001)
    assert inflated(model_of("tiny"), tiny) == tiny


DRAFTERS = [
    ("eagle3", {"unroll": 1, "draft_vocab_size": 512}),
    ("eagle3", {"unroll": 4, "draft_vocab_size": 512}),
    ("eagle3", {"unroll": 2, "draft_vocab_size": 9000, "fc_norm": True, "own_embedding": True}),
    ("eagle", {}),
    ("eagle", {"fc_bias": True, "qk_norm": True}),
    ("eagle", {"draft_vocab_size": 512}),
    ("medusa", {}),
    ("medusa", {"num_layers": 2, "losses": {"soft_cross_entropy": 1.0}}),
    ("small_lm", {}),
    ("small_lm", {"num_layers": 4, "tie_embeddings": False}),
]


class Uniform(TrainingChance):
    """Feature noise."""

    def uniform_like(self, values: Tensor, document: Tensor) -> Tensor:
        return torch.rand_like(values)


class Step:
    """A drafter on the CPU, and one micro batch of random features."""

    def __init__(self, name: str, changes: dict[str, Any], of: Shape, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        everything = {"draft_vocab_coverage": 1.0} if name == "eagle3" else {}
        self.config = drafter_config(name, **everything, **changes)
        self.shape, self.dtype = of, dtype
        self.spec = of
        self.drafter = self.config.build(self.spec)
        draw = lambda *size: torch.randn(*size).to(dtype)  # noqa: E731
        vocab, width, rows, length = of.vocab_size, of.hidden_size, 4, 256
        readout = Readout(draw(vocab, width), draw(vocab, width), torch.ones(width).to(dtype))
        self.drafter.prepare(torch.arange(vocab) % 7 + 100, readout)
        if self.drafter.vocab is not None:  # as of real data: the target says what can be drafted
            readout.head[~self.drafter.vocab.t2d] = 0
        tokens = torch.randint(0, vocab, (rows, length))
        document = torch.arange(rows)[:, None].repeat(1, length)
        mask = torch.rand(rows, length) < 0.75
        self.batch = Batch(tokens, mask, torch.arange(length).repeat(rows, 1), document)
        captured = {layer: draw(rows, length, width) for layer in self.drafter.captures}
        self.features = TargetFeatures(captured, draw(rows, length, width), readout)
        trained = int((mask & (self.batch.positions >= 2)).sum())
        share, name = trained / mask.numel(), dtype_name(dtype)
        self.load = Load(rows, length, 1, 1, mask.numel(), share, name, False, False, True)

    @cached_property
    def parts(self) -> DrafterCost:
        """What the plan says of it; traced when asked for, since a trace seems to hold memory."""
        return traced(self.config, self.shape, self.dtype, self.load.loss_share)

    def inputs(self) -> list[Tensor]:
        """What is there before the step."""
        features, batch = self.features, self.batch
        readout = features.readout
        found = [*features.captured.values(), features.final_hidden, readout.embedding]
        return [
            *found,
            readout.head,
            batch.tokens,
            batch.loss_mask,
            batch.positions,
            batch.document,
        ]


@pytest.mark.parametrize(("drafter", "of"), dealt(DRAFTERS, [NARROW, DEEP]))
def test_a_drafters_parameters_are_counted_exactly(
    drafter: tuple[str, dict[str, Any]], of: Shape
) -> None:
    name, changes = drafter
    step = Step(name, changes, of, torch.float32)
    assert step.parts.num_parameters == sum(p.numel() for p in step.drafter.parameters())
    assert step.parts.captures == step.drafter.captures


def test_eagles_heads_have_their_published_sizes() -> None:
    """0.24B, 0.37B and 0.99B for 7B, 13B and 70B (Li et al., 2024, arXiv:2401.15077, section 4)."""
    llama2 = {"vocab_size": 32000, "head_dim": 128}
    sizes = {
        0.24e9: shape(hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
                      num_key_value_heads=32, **llama2),
        0.37e9: shape(hidden_size=5120, intermediate_size=13824, num_attention_heads=40,
                      num_key_value_heads=40, **llama2),
        0.99e9: shape(hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
                      num_key_value_heads=8, **llama2),
    }  # fmt: skip
    for published, of in sizes.items():
        parts = traced(drafter_config("eagle"), of)
        assert parts.num_parameters == pytest.approx(published, rel=0.02)


def test_adapters_are_counted_as_the_drafter_makes_them() -> None:
    from drafttrain.drafters.shared.lora import add_lora

    settings = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**settings))
    add_lora(model, 4, 8)
    real = sum(p.numel() for p in model.parameters() if p.requires_grad)
    of = shape(vocab_size=97, hidden_size=48, intermediate_size=80, num_layers=5,
               num_attention_heads=6, num_key_value_heads=2, head_dim=8)  # fmt: skip
    config = drafter_config("small_lm", layers=[0, 4], lora_rank=4)
    assert traced(config, of).num_trained == real


@pytest.mark.parametrize(
    ("name", "averaged"),
    dealt(["eagle3", "eagle", "medusa", "early_exit", "small_lm"], [False, True]),
)
def test_weights_gradients_and_moments_are_counted_exactly(name: str, averaged: bool) -> None:
    step = Step(name, {}, DEEP, torch.float32)
    engine = engine_of(step, "none", ema_decay=0.9 if averaged else 0.0)
    losses = engine.losses(step.batch, step.features, Uniform())
    engine.backward(weighted_sum(losses), last=True)
    counted = training_bytes(step.parts, PLAIN, 1, averaged=averaged)
    parameters = list(step.drafter.parameters())
    copies = [buffer for buffer in step.drafter.buffers() if buffer.dim() > 1]  # of the target's
    assert counted["weights"] == bytes_of([*parameters, *copies])
    assert bool(copies) == (name == "early_exit")
    assert counted["gradients"] == bytes_of([p.grad for p in parameters if p.grad is not None])
    states = [
        value
        for state in engine._optimizer.state.values()
        for value in state.values()
        if value.dim()
    ]
    assert counted["moments"] == bytes_of(states)
    assert counted["masters"] == counted["buckets"] == step.parts.step(False).copies == 0


def engine_of(step: Step, name: str, **settings: Any) -> Any:
    return build_engine(
        step.drafter,
        load_choice("deepspeed", name),
        device="cpu",
        dtype=step.dtype,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        **settings,
    )


# --- what is estimated, beside what is measured


@pytest.mark.parametrize("of", [NARROW, DEEP], ids=["narrow", "deep"])
@pytest.mark.parametrize(
    ("name", "changes"), [("eagle3", {"unroll": 2}), ("eagle", {}), ("medusa", {})]
)
def test_activations_are_within_15_percent(name: str, changes: dict[str, Any], of: Shape) -> None:
    check_activations(name, changes, of, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("of", [WIDE, NARROW, DEEP], ids=["wide", "narrow", "deep"])
@pytest.mark.parametrize(("name", "changes"), DRAFTERS)
def test_activations_of_every_kind_are_within_15_percent(
    name: str, changes: dict[str, Any], of: Shape, dtype: torch.dtype
) -> None:
    check_activations(name, changes, of, dtype)


def check_activations(name: str, changes: dict[str, Any], of: Shape, dtype: torch.dtype) -> None:
    """The peak of forward and backward beside weights, gradients and features."""
    step = Step(name, changes, of, dtype)
    drafter = step.drafter
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in drafter.parameters() if p.grad is not None]
    with PeakBytes([*drafter.parameters(), *drafter.buffers(), *grads, *step.inputs()]) as tracked:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses = drafter(step.batch, step.features, Uniform())
        weighted_sum(losses).backward()
    cost = step.parts.step(False)
    counted = cost.peak(step.load.tokens) + cost.copies
    assert within(counted, tracked.peak), f"{counted / tracked.peak:.2f} of what is measured"


@pytest.mark.parametrize(
    "size", [{}, {"hidden_size": 128, "num_layers": 6, "intermediate_size": 512}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_targets_weights_features_and_pass_are_within_15_percent(
    size: dict[str, int], dtype: str
) -> None:
    model = model_of("random", **size)
    of, kind = shape_of(model), getattr(torch, dtype)
    target = load_target(model, kind, "cpu")
    weights = list(target.model.parameters())
    assert of.bytes(kind.itemsize, None) == bytes_of(weights)
    parts = traced(drafter_config("eagle3"), of)
    load = Load(4, 256, 1, 1, 1024, 0.75, dtype, False, False, True)
    tokens = torch.randint(0, of.vocab_size, (4, 256))
    document = torch.arange(4)[:, None].repeat(1, 256)
    batch = Batch(tokens, tokens >= 0, torch.arange(256).repeat(4, 1), document)
    with PeakBytes([*weights, *target.model.buffers(), tokens, *vars(batch).values()]) as tracked:
        features = target.features(batch, parts.captures)
    kept = bytes_of([*features.captured.values(), features.final_hidden])
    counted = feature_bytes(parts.captures, of.hidden_size, kind.itemsize) * load.tokens
    assert within(counted, kept)
    assert within(counted + target_activations(of, load), tracked.peak), (
        f"{counted + target_activations(of, load)} beside {tracked.peak}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "low"),
    [
        *(("none", False), ("zero0", False), ("zero1", False), ("zero2", False), ("zero3", False)),
        *(("none", True), ("zero2", True), ("zero3", True)),
    ],
)
def test_what_an_engine_holds_between_steps_is_as_planned(name: str, low: bool) -> None:
    """Weights, masters and moments on one rank; ZeRO 3 keeps gradients and bucket as well."""
    dtype = torch.bfloat16 if low else torch.float32
    with PeakBytes() as tracked:
        step = Step("eagle3", {"unroll": 1}, DEEP, dtype)
        engine = engine_of(step, name, weights_dtype=dtype)
        for _ in range(2):
            losses = engine.losses(step.batch, step.features, Uniform())
            engine.backward(weighted_sum(losses), last=True)
            engine.step(1e-4)
        del losses
        held = tracked.now - bytes_of(step.inputs())
    sharding = load_choice("deepspeed", name)
    counted = training_bytes(step.parts, sharding, 1, low)
    kept = ["weights", "masters", "moments"]
    kept += ["gradients", "buckets"] if sharding.stage == 3 else []
    # On a CPU the losses keep a float32 copy of a head of half precision.
    head = 4 * step.features.readout.head.numel() if low else 0
    assert held == pytest.approx(head + sum(counted[key] for key in kept), rel=0.02)


# --- what follows


def test_the_headline_is_planned_as_the_arithmetic_says() -> None:
    plan = planned("model=llama70b", "drafter=eagle3", "hardware=h100x8")
    job = plan.job
    assert job.target_bytes == 2 * PUBLISHED["llama70b"]  # 141 GB
    assert 1e9 < job.parts.num_parameters < 2e9
    assert plan.chosen.memory.placement == "zero3"
    assert plan.chosen.memory.fits
    assert plan.chosen.memory.parts["target"] == pytest.approx(17.64e9, rel=0.001)
    whole = [c.memory for c in plan.others if c.memory.placement == "device"]
    assert whole
    assert not any(memory.fits for memory in whole)
    assert job.token_bytes == 4 * 8192 * 2
    # Two operations per weight of the layers, and no more than a fifth for attention.
    assert 1.0 < plan.chosen.speed.target_flops / (2 * 68.4e9) < 1.2
    assert 5 < plan.chosen.hours < 100


def test_plan_is_printed_in_100_columns_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plan"
    command = ["plan", "model=llama70b", "hardware=h100x8", f"plan.dir={folder}"]
    assert main([*command, "hardware.target_placement=device"]) == 0
    text = capsys.readouterr().out
    printed = text.partition(f"plan: {folder}")[0]
    assert max(len(line) for line in printed.splitlines()) <= 100
    for words in (
        "70,553,706,496",
        "optimizer's state",
        "does speculation pay",
        "It does with",
    ):
        assert words in printed, words
    assert "…" not in printed
    data = json.loads((folder / "plan.json").read_text())
    assert data["target"]["num_parameters"] == PUBLISHED["llama70b"]
    assert {choice["target_placement"] for choice in data["choices"]} == {
        "device", "device_map", "zero3", "stored",
    }  # fmt: skip
    for choice in data["choices"]:
        parts = choice["bytes"]
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
    assert "optimizer&#39;s state" in (folder / "plan.html").read_text()
    assert "| total |" in (folder / "plan.md").read_text()
    assert printed.startswith("Does NOT fit: ")
    page = (folder / "plan.html").read_text()
    assert data["headline"] in page
    assert "Memory of each h100" in page


def test_the_headline_says_fit_time_cost_and_speedup() -> None:
    plan = planned("model=llama70b", "hardware=h100x8")
    assert re.fullmatch(
        r"Fits: 5\d\.\d GiB of the 79\.0 GiB of each h100 \(8 ranks, target_placement=zero3, "
        r"deepspeed=none\)\. Training takes \d+\.\d h and \$\d+, at [\d,]+ tokens/s\. Serving 1 "
        r"request is then "
        r"\d\.\d\d times as fast at depth \d, predicted\. The acceptance length, 3\.05 at depth "
        r"4, is assumed: plan\.acceptance_length or run\.dir takes a measured one\.",
        headline(plan),
    ), headline(plan)


def test_stored_features_hold_every_token_once_however_often_it_is_trained() -> None:
    many = ["data=selfgen", "data.num_conversations=10", "data.max_length=100"]
    plan = planned(*many, "trainer.max_steps=1000", "trainer.tokens_per_step=1000")
    assert plan.job.trained_tokens == 1_000_000
    assert plan.store_tokens == 1000
    few = planned(*many, "trainer.max_steps=2", "trainer.tokens_per_step=100")
    assert few.store_tokens == 200
    assert planned(*many, "plan.tokens=77").store_tokens == 77
    unknown = planned("data=jsonl", "data.path=x.jsonl", "trainer.max_steps=7")
    assert unknown.store_tokens == unknown.job.trained_tokens


@pytest.mark.parametrize(
    "told",
    [
        ("drafter=dflash", "drafter.block_size=16", "plan.loss_share=0.25"),
        ("drafter=dflash2", "plan.loss_share=0.1"),
        ("drafter=dspark", "plan.loss_share=0.05"),
        ("drafter=eagle3", "plan.loss_share=0.02"),
    ],
    ids=lambda told: told[0],
)
def test_a_drafter_is_planned_where_little_of_the_text_is_trained(told: tuple[str, ...]) -> None:
    job = job_planned(*told, "hardware=cpu", "hardware.train_dtype=float32")
    assert cost(job, memory_of(job, PLAIN, "device")).hours > 0


@pytest.mark.parametrize("drafter", ["eagle", "medusa", "small_lm"])
def test_other_drafters_and_small_targets_are_planned(drafter: str) -> None:
    plan = planned(f"drafter={drafter}", "hardware=cpu", "hardware.train_dtype=float32")
    assert plan.chosen.memory.fits
    assert plan.chosen.hours > 0
    assert plan.serving[0].predicted_speedup > 0


def test_stored_features_take_what_others_say_theirs_take() -> None:
    """DSpark's authors report 38 TB for Qwen3-4B (2607.05147): 1.3M answers, five layers."""
    qwen = shape(hidden_size=2560, num_layers=36)
    parts = traced(drafter_config("eagle3", layers=[1, 9, 17, 25, 33]), qwen)
    tokens_each = 38e12 / 1.3e6 / feature_bytes(parts.captures, 2560, 2)
    assert 500 < tokens_each < 1500  # as long as an answer is


def test_sharding_moves_bytes_and_loses_none() -> None:
    job = planned("model=llama8b", "hardware=h100x8").job
    for stage, moved in ((1, ("moments",)), (2, ("moments", "gradients"))):
        alone = training_bytes(job.parts, zero(stage), 1)
        eighth = training_bytes(job.parts, zero(stage), 8)
        for name in moved:
            assert eighth[name] == alone[name] / 8
        assert eighth["weights"] == alone["weights"]
    third = training_bytes(job.parts, zero(3), 8)
    assert third["weights"] == 4 * job.parts.num_parameters / 8
    host = training_bytes(job.parts, zero(2, offload=True), 8)
    assert host["moments"] == host["masters"] == 0
    low = training_bytes(job.parts, PLAIN, 1, low=True)
    assert low["weights"] == 2 * job.parts.num_parameters
    assert low["masters"] == 4 * job.parts.num_parameters
    assert host["host"] == pytest.approx((4 + 8 + 4) * job.parts.num_parameters / 8)


def test_more_of_anything_takes_more() -> None:
    job = planned("model=llama8b", "hardware=h100x1").job
    total = memory_of(job, PLAIN, "device").total
    for change in ({"rows": 2 * job.load.rows}, {"length": 2 * job.load.length}):
        more = replace(job, load=replace(job.load, **change))
        assert memory_of(more, PLAIN, "device").total > total
    less = replace(job, load=replace(job.load, checkpointing=True))
    assert memory_of(less, PLAIN, "device").total < total
    slow, fast = (cost(j, memory_of(j, PLAIN, "device")) for j in (less, job))
    assert slow.hours > fast.hours
    assert cost(job, memory_of(job, PLAIN, "stored")).hours < fast.hours


def test_a_target_goes_where_it_fits() -> None:
    small = planned("model=llama8b", "hardware=h100x8").job
    large = planned("model=llama70b", "hardware=h100x8").job
    assert place(small, PLAIN, "auto").placement == "device"
    assert place(large, PLAIN, "auto").placement == "zero3"
    assert place(large, PLAIN, "device_map").parts["target"] == large.target_bytes / 8


def test_a_target_is_placed_as_the_run_places_it() -> None:
    # Its 70.6 GB are 0.83 of the memory, of which the run gives the target 0.7.
    asked = ("model=random", "model.hidden_size=8192", "model.num_layers=38")
    asked += ("model.intermediate_size=28672", "hardware=h100x8")
    random = planned(*asked).job
    assert random.placement.kind == "device", "random weights cannot be cut"
    kinds = {
        "model=llama8b": "device",
        "model=llama70b": "zero3",
        "model=llama70b model.quantization=bnb-8bit": "device_map",  # quantised weights are not cut
    }
    for model, kind in kinds.items():
        assert planned(*model.split(), "hardware=h100x8").job.placement.kind == kind, model
    alone = planned("model=llama70b", "hardware=h100x1").job
    assert alone.placement.kind == "device_map"
    on_gpu, on_host = alone.spread
    assert on_gpu == 0.7 * alone.chip.memory
    assert on_gpu + on_host == alone.target_bytes


def test_a_target_in_vllm_takes_its_time_and_the_engines_memory() -> None:
    asked = ("model=llama8b", "hardware=h100x8", "hardware.target_placement=vllm")
    shared, whole = planned(*asked), planned(*asked[:2])
    assert shared.chosen.memory.parts["engine"] == pytest.approx(0.5 * 79 * 2**30)
    assert shared.chosen.hours == whole.chosen.hours, "its passes take as long there"
    assert any(cost.memory == shared.chosen.memory for cost in shared.others)
    assert "target_placement=vllm" in headline(shared)
    assert shared.chosen.memory.parts["target"] == shared.job.target_bytes, "to validate"
    apart = planned(*asked, "vllm.devices='8'").chosen.memory
    assert apart.parts["engine"] == 0
    full = planned(*asked, "vllm.memory=0.95")
    assert not full.chosen.memory.fits
    large = planned("model=llama70b", *asked[1:])
    assert large.chosen.memory.parts["engine"] == large.job.target_bytes
    spread = planned("model=llama70b", *asked[1:], "vllm.tensor_parallel=4", "vllm.memory=0.1")
    assert spread.chosen.memory.parts["engine"] == spread.job.target_bytes / 4


@pytest.mark.parametrize(
    ("told", "bits"),
    [
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
        ({"quant_method": "unheard-of"}, None),
    ],
)  # fmt: skip
def test_a_checkpoint_that_comes_quantised_takes_what_its_bits_take(
    told: dict[str, Any], bits: int | None, tmp_path: Path
) -> None:
    CONFIG_MAPPING["llama"](**SHAPE).save_pretrained(tmp_path)
    plain = shape_of(model_config_of(path=str(tmp_path)))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": told}))
    if bits is None:
        with pytest.raises(UnknownCostError, match="quantization_config must state the bits"):
            shape_of(model_config_of(path=str(tmp_path)))
        return
    shape = shape_of(model_config_of(path=str(tmp_path)))
    matrices = shape.num_layers * shape.layer.matrices
    saved = plain.bytes(2, None) - shape.bytes(2, None)
    assert saved == pytest.approx(matrices * (2 - bits / 8), rel=0.05)


def test_a_pass_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    kind, changes = EXACT["qwen3_moe"]
    settings_of(kind, changes).save_pretrained(tmp_path)
    shape = shape_of(model_config_of(path=str(tmp_path)))
    layer, rest = shape.layer, shape.readout_parameters
    one = shape.num_layers * (layer.all - layer.routed * (1 - layer.chosen)) + rest
    assert layer.chosen < 1
    assert shape.share_read(1) == pytest.approx(one / shape.num_parameters, rel=1e-3)
    assert shape.share_read(1) < shape.share_read(4) < shape.share_read(1000) <= 1
    assert shape.share_read(1000) == pytest.approx(1.0)
    # Transformers quantises linear modules, and the experts are none.
    left = shape.num_layers * layer.routed * 2
    assert shape.bytes(2, "bnb-4bit") > left
    plain = planned(f"model.path={tmp_path}", "hardware=h100x1", "plan.context=1").host
    few, many = (plain.target_pass(1, new) - plain.job.chip.pass_s for new in (1, 64))
    assert few / many == pytest.approx(shape.share_read(1) / shape.share_read(64), rel=0.2)


def test_a_plan_is_of_the_depth_that_the_drafter_has() -> None:
    heads = ("model=llama8b", "hardware=h100x1", "drafter=medusa", "drafter.num_heads=2")
    plan = planned(*heads, "plan.acceptance_length=3.0")
    assert plan.depth == 2
    (length,) = {row.acceptance_length for row in plan.serving}
    assert length == pytest.approx(accepted(rate_of(3.0, 4), 2))
    told = headline(plan)
    assert f"{length:.2f} at depth 2, is plan.acceptance_length's." in told
    assert "assumed" not in told
    assert "at depth 2, is assumed" in headline(planned(*heads))


def test_quantised_targets_take_less() -> None:
    plain = planned("model=llama8b", "hardware=h100x1").job.target_bytes
    eighth = planned("model=llama8b", "hardware=h100x1", "model.quantization=torchao-int8").job
    assert 0.5 < eighth.target_bytes / plain < 0.6


# --- serving


def test_acceptance_length_is_that_of_equal_rates() -> None:
    assert accepted(0.0, 4) == 1.0
    assert accepted(1.0, 4) == 5.0
    assert accepted(0.5, 2) == 1.75
    assert rate_of(accepted(0.7, 6), 6) == pytest.approx(0.7)


def test_speculation_pays_at_small_batches_and_not_at_large_ones() -> None:
    plan = planned("model=llama8b", "hardware=h100x1", "plan.batch_sizes=[1,32,512,4096]",
                   "plan.context=512")  # fmt: skip
    speedups = [row.predicted_speedup for row in plan.serving]
    assert speedups[0] > 1.5
    assert speedups[-1] < 1
    assert plan.serving[-1].best_predicted_speedup >= plan.serving[-1].predicted_speedup
    host = host_of(plan.job, replace(default_settings(), context=512))
    ((first, edge),) = paying(host, 4096, 4, 0.75)
    assert first == 1
    assert serve(host, edge, 4, 0.75).predicted_speedup > 1
    assert serve(host, edge + 1, 4, 0.75).predicted_speedup <= 1
    assert paying(host, 4096, 4, 0.0) == ()


def test_a_mixture_of_experts_pays_in_ranges_of_batches(tmp_path: Path) -> None:
    values = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    values |= {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    values |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    values |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(values))
    plan = planned(f"model.path={tmp_path}", "hardware=h100x1", "plan.context=256")
    edges = {edge for pair in plan.paying for edge in pair}
    for batch in edges | {edge + step for edge in edges for step in (-1, 1)} - {0}:
        pays = any(first <= batch <= last for first, last in plan.paying)
        fits = batch <= fitting(plan.host)
        assert (fits and serve(plan.host, batch, 4, 0.75).predicted_speedup > 1) == pays, batch
    assert plan.paying[0][0] > 1, "one request reads more experts for more tokens"
    assert f"pays at {plan.paying[0][0]} to " in serving(plan).notes[0]


def test_speculation_is_weighed_for_no_batch_that_the_memory_cannot_hold() -> None:
    plan = planned("model=llama8b", "hardware=h100x1")
    most = fitting(plan.host)
    each = 2048 * (32 * 2 * 8 * 128 * 2) + 2048 * 4096  # the target's cache, and the drafter's
    weights = plan.job.target_bytes + plan.job.parts.num_parameters * 2
    assert most * each <= 0.9 * 79 * 2**30 - weights < (most + 1) * each
    assert plan.paying == ((1, most),)
    assert f"pays at 1 to {most} requests" in serving(plan).notes[0]


def test_copies_of_the_targets_layers_are_held_and_read_by_a_drafter_that_drafts_with_them() -> (
    None
):
    plan = planned("model=llama8b", "drafter=early_exit", "hardware=h100x1")
    parts, attention = plan.job.parts, 2 * 4096 * 4096 + 2 * 4096 * 1024
    copied = 2 * (attention + 3 * 4096 * 14336)
    assert parts.num_kept == copied
    assert plan.host.drafter_bytes == 2 * (parts.num_parameters + copied)
    for one in (parts.draft().first, parts.draft().further):
        assert one.weights == copied + attention + 128256 * 4096  # and the target's head


def test_a_given_acceptance_length_is_what_is_counted_with() -> None:
    plan = planned("model=llama8b", "hardware=h100x1", "plan.acceptance_length=2.5")
    row = plan.serving[0]
    assert row.acceptance_length == pytest.approx(2.5)
    assert row.predicted_speedup == pytest.approx(2.5 * row.plain_s / (row.draft_s + row.verify_s))


def test_a_drafter_that_nobody_described_is_planned() -> None:
    """One of a user's own file, which selects trained states by a mask: asked of itself."""
    of = WIDE
    cost = traced(TwoLayersConfig(name="own"), of)
    assert cost.num_parameters == cost.num_trained == 2 * 256 * 256 + 1024 * 256
    assert cost.captures == (2,)
    assert (cost.draft().key_values, cost.max_depth) == (0, None)
    assert cost.draft().first.weights == cost.num_parameters
    # Two products forward and one or two back for each matrix; the head at trained positions.
    layers, head = 2 * 256 * 256 * (2 + 3), 2 * 1024 * 256 * 3 * 0.75
    assert cost.step(False).flops == pytest.approx(layers + head, rel=0.05)
    assert cost.step(False).peak(2048) > 1.5 * cost.step(False).peak(1024)


@dataclass(frozen=True, kw_only=True)
class TwoLayersConfig(DrafterConfig):
    """A drafter that plan cannot know."""

    def build(self, spec: TargetSpec) -> "TwoLayers":
        return TwoLayers(self, spec)


class TwoLayers(Drafter):
    """Reads one layer and has a plain cross-entropy."""

    def __init__(self, config: TwoLayersConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config, self.spec, self.captures = config, spec, (2,)
        width = spec.hidden_size
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(2)
        )
        self.head = torch.nn.Linear(width, spec.vocab_size, bias=False)

    def _states(self, features: TargetFeatures) -> Tensor:
        hidden = features.captured[2]
        for layer in self.layers:
            hidden = torch.nn.functional.silu(layer(hidden))
        return hidden

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Any:
        logits = self.head(self._states(features)[batch.loss_mask])
        labels = batch.tokens[batch.loss_mask]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        if bool(loss.isnan().any()):
            raise ValueError("a loss must be a number")
        return {"depth_1": LossTerm(1.0, loss, batch.loss_mask.sum())}

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> Any:
        return {}

    def observe(self, state: Any, tokens: Tensor, counts: Any, features: TargetFeatures) -> None:
        state["last"] = self._states(features)[:, -1:]

    def expand(self, state: Any, newest: Any) -> Tensor:
        return self.head(state["last"])

    def select(self, state: Any, rows: Any) -> None:
        state["last"] = state["last"][list(rows)]


# --- accelerators and measured efficiency


@pytest.mark.parametrize("name", choices("accelerator"))
def test_every_accelerator_can_be_planned_for(name: str) -> None:
    entry = load_choice("accelerator", name)
    assert entry.name == name
    if name == "cpu":
        return
    plan = planned("model=llama8b", "hardware=h100x1", f"hardware.accelerator={name}")
    assert plan.job.chip.memory == entry.memory_gib * 2**30
    assert plan.chosen.memory.fits == (entry.memory_gib > 30)


def test_devices_are_known_by_their_names() -> None:
    entries = {name: load_choice("accelerator", name) for name in choices("accelerator")}
    for device, expected in {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100_80gb",
        "NVIDIA A100-SXM4-40GB": "a100_40gb",
        # Boards: slower than the modules whose marks their names hold too; the longer mark wins.
        "NVIDIA H100 PCIe": "h100_pcie",
        "NVIDIA H100 NVL": "h100_nvl",
        "NVIDIA A100 80GB PCIe": "a100_80gb_pcie",
        "NVIDIA A100-PCIE-40GB": "a100_40gb_pcie",
        "NVIDIA B200": "b200",
        "NVIDIA L40S": "l40s",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "AMD Instinct MI300X": "mi300x",
    }.items():
        found = matching(device, entries)
        assert found is not None
        assert found.name == expected
    assert matching("NVIDIA T4", entries) is None


def test_the_processor_is_measured_and_its_memory_read() -> None:
    chip = accelerator_of(planned_config("hardware=cpu").hardware, 0.01)
    assert chip.is_cpu
    assert chip.flops["float32"] > 1e8
    assert chip.memory == host_memory() > 2**30


def planned_config(*overrides: str) -> PlanConfig:
    return typed(compose("plan", overrides), PlanConfig)


def test_a_measured_run_says_which_share_of_the_peak_is_reached(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    told = typed(compose("train", [f"run.dir={run}", "hardware=cpu"]), TrainConfig)
    write_config(told, run / "config.yaml")
    record = {"hardware": {"gpus": [], "cpu": "a processor"}}
    (run / "provenance.json").write_text(json.dumps(record))
    speeds = [1.0, 1.0, 500.0, 600.0, 700.0]
    rows = [{"step": i, "perf/tokens_per_s": speed} for i, speed in enumerate(speeds)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = accelerator_of(told.hardware, 0.01)
    chip = replace(found, flops={"float32": 1e12, "bfloat16": 1e12}, bandwidth=1e12)
    share = measured_efficiency(run, chip)
    job = job_of(told, default_settings(), replace(chip, efficiency=share))
    arithmetic = cost(job, memory_of(job, PLAIN, "device")).speed
    assert 0 < share < 1
    assert arithmetic.tokens_per_s == pytest.approx(600.0, rel=0.1)
    with pytest.raises(ValueError, match=r"plan\.measured must be the folder of a run, got .*/no,"):
        measured_efficiency(tmp_path / "no", chip)
    with pytest.raises(ValueError, match=r"plan\.measured must be a run on the accelerator"):
        measured_efficiency(run, replace(chip, is_cpu=False, name="h100"))
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"plan\.measured must be a run with tokens/s in its"):
        measured_efficiency(run, chip)


def test_what_stored_features_spare_is_not_counted_as_work(tmp_path: Path) -> None:
    telling = ["hardware=cpu", "features=stored", f"features.dir={tmp_path}"]
    run = tmp_path / "run"
    run.mkdir()
    write_config(typed(compose("train", telling), TrainConfig), run / "config.yaml")
    (run / "provenance.json").write_text(json.dumps({"hardware": {"gpus": [], "cpu": ""}}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "perf/tokens_per_s": 600.0}) + "\n")
    found = accelerator_of(typed(compose("train", telling), TrainConfig).hardware, 0.01)
    chip = replace(found, flops={"float32": 1e12, "bfloat16": 1e12}, bandwidth=1e12)
    job = job_of(typed(compose("train", telling), TrainConfig), default_settings(), chip)
    stored = cost(job, memory_of(job, PLAIN, "device"), stored=True)
    assert stored.speed.target_s == 0
    assert stored.memory.parts["target"] > 0, "validation decodes with it"
    whole = replace(chip, efficiency=1.0)
    ideal = cost(replace(job, chip=whole), memory_of(job, PLAIN, "stored")).speed.tokens_per_s
    assert measured_efficiency(run, chip) == pytest.approx(600.0 / ideal)


def test_a_small_target_on_a_gpu_takes_as_long_as_its_launches() -> None:
    """As an H200 took: 31 ms for a step of EAGLE-3 on the embedded target, by two micro batches."""

    def planned(*told: str) -> tuple[Job, Throughput]:
        job = job_planned("hardware.accelerator=h200", "hardware=h100x1", *told)
        return job, cost(job, memory_of(job, PLAIN, "device")).speed

    job, once = planned("trainer.tokens_per_step=1024", "hardware.micro_batch=1")
    _, twice = planned("trainer.tokens_per_step=2048", "hardware.micro_batch=1")
    assert once.bound == "launches"
    operations = 8 * LAYER_OPERATIONS + job.parts.step(False).operations
    assert once.target_s + once.drafter_s == pytest.approx(operations * 15e-6)
    assert twice.target_s + twice.drafter_s == pytest.approx(2 * operations * 15e-6)
    assert 0.015 < twice.step_s < 0.045
    _, large = planned("model=llama8b", "trainer.tokens_per_step=65536")
    assert large.bound == "arithmetic"


def test_train_from_stored_features_foresees_no_pass_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chip = accelerator_of(planned_config("hardware=cpu").hardware, 0.01)
    monkeypatch.setattr("drafttrain.commands.setup.plan.accelerator_of", lambda *_, **__: chip)

    def said(*features: str) -> str:
        return "\n".join(
            foresee(typed(compose("train", ["hardware=cpu", *features]), TrainConfig))[0]
        )

    def speed(text: str) -> float:
        return float(re.search(r"at ([\d,.]+) tokens/s", text)[1].replace(",", ""))

    online, stored = said(), said("features=stored", "features.dir=x")
    alone = said("features=stored", "features.dir=x", "features.validate=false")
    assert speed(stored) == speed(alone) > 1.1 * speed(online)
    assert "target_placement=device" in stored
    assert "stored features, no target" in alone


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_loses_no_number(width: int) -> None:
    plan = planned("model=llama70b", "hardware=h100x8")
    into = io.StringIO()
    console = Console(width=width, file=into)
    for content in blocks(plan):
        if not isinstance(content, Table):
            continue
        before = into.tell()
        console.print(rich_table(content))
        shown = into.getvalue()[before:]
        assert "\u2026" not in shown, content.title
        words = {word for row in content.rows for cell in row for word in cell.split()}
        lost = words - set(shown.split())
        assert not any(len(word) < 10 for word in lost), lost  # longer ones may be broken
        assert max(map(len, shown.splitlines())) <= width


# --- before training


def test_train_says_what_it_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (accelerator, "measured_peaks"),
        (shapes, "counted"),
        (plan, "drafter_cost"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)  # not remembered
    config = typed(compose("train", ["hardware=cpu"]), TrainConfig)
    foresee(config)  # the first call imports
    started = time.process_time()
    lines, _ = foresee(config)
    assert time.process_time() - started < 2  # 0.4 without CHECK_SHAPES, on an idle core
    assert 3 <= len(lines) <= 5
    text = " ".join(lines)
    for words in ("14.2M", "parameters", "memory: about", "GiB of this machine", "tokens/s"):
        assert words in text, text
    assert max(len(line) for line in lines) <= 110


def test_train_refuses_what_cannot_fit_and_says_so_before_the_hub_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["train", "model=random_70b", "hardware=cpu", "hardware.train_dtype=float32"]
    train += [f"run.dir={tmp_path / 'run'}"]
    assert main(train) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: hardware must hold the run: it takes at least 2")
    assert "weights of model=random_70b 263 GiB" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
    config = typed(compose("train", [*train[1:], "hardware.check_fit=false"]), TrainConfig)
    assert "263 GiB" not in foresee(config)[0][0]
    stored = ["features=stored", f"features.dir={tmp_path}", "features.validate=false"]
    small = ["trainer.tokens_per_step=512", "data.max_length=64", "drafter.intermediate_size=64"]
    small += ["drafter.num_attention_heads=1", "drafter.num_key_value_heads=1"]
    config = typed(compose("train", [*train[1:], *stored, *small]), TrainConfig)
    assert "stored features" in " ".join(foresee(config)[0]), "the target is not loaded"


def test_a_machines_memory_is_that_of_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = typed(
        compose("train", ["hardware=cpu", "data.max_length=64", "trainer.tokens_per_step=4096"]),
        TrainConfig,
    )
    chip = accelerator_of(config.hardware, 0.01)

    def planned(world: int, here: int | None) -> tuple[Any, list[str]]:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if here is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        job = job_of(config, default_settings(), chip)
        return memory_of(job, PLAIN, "device"), foresee(config)[0]

    alone, lines = planned(1, 1)
    assert "(1 rank, target_placement=device" in lines[1]
    both, lines = planned(2, 2)
    assert both.parts == {name: 2 * size for name, size in alone.parts.items()}
    apart, lines = planned(8, 2)
    assert apart.parts == both.parts
    assert "(8 ranks, 2 on each machine, target_placement=device" in lines[1]
    assert planned(8, None)[0].parts["target"] == 4 * both.parts["target"], "who knows where"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    stated = replace(config.hardware, ranks=2)
    assert ranks_of(stated, chip) == (8, 2)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ranks_of(stated, chip) == (2, 2)


@pytest.mark.parametrize(
    "name",
    [
        *("gemma", "gemma3", "phi3", "olmo2", "stablelm", "cohere", "granite", "smollm3", "glm4"),
        *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "phi", "gpt_neox"),
    ],
)
def test_every_accepted_architecture_is_planned(name: str, tmp_path: Path) -> None:
    """Its layers are counted on the model itself."""
    kind, changes = EXACT[name]
    settings_of(kind, changes).save_pretrained(tmp_path)
    target = build(kind, changes)
    shape = shape_of(model_config_of(path=str(tmp_path)))
    assert shape.num_parameters == pytest.approx(target.num_parameters, rel=0.02)  # head's bias
    layers = sum(weight.numel() for weight in target.decoder.layers.parameters())
    assert shape.num_layers * shape.layer.all == pytest.approx(layers, rel=1e-4)
    routed = name in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
    assert (shape.layer.active < shape.layer.matrices) == routed
    for size in ("hidden_size", "head_dim", "num_key_value_heads", "max_positions", "rope_theta"):
        assert getattr(shape, size) == getattr(target.spec, size)


def test_a_plan_of_another_form_than_llamas(tmp_path: Path) -> None:
    CONFIG_MAPPING["gemma"](**SHAPE).save_pretrained(tmp_path)
    plan = planned(f"model.path={tmp_path}")
    assert plan.job.shape.architecture == "gemma"
    assert plan.chosen.speed.tokens_per_s > 0


def test_a_target_of_an_unknown_form_is_trained_unplanned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 9}))
    config = typed(compose("train", [f"model.path={tmp_path}", "hardware=cpu"]), TrainConfig)
    (line,), placement = foresee(config)
    assert placement is None
    assert line.startswith("plan: none, ")
    assert "(mamba) cannot be a target: it keeps a recurrent state" in line
    with pytest.raises(UnknownCostError, match=r"\(mamba\) cannot be a target"):
        planned(f"model.path={tmp_path}")


def test_a_repository_that_conf_does_not_describe_is_not_guessed() -> None:
    with pytest.raises(UnknownCostError, match=r"model\.shape must describe someone/else, whose"):
        planned("model=llama8b", "model.repo=someone/else")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("architecture=deepseek_v3", r"model\.shape must be of a kind .* got deepseek_v3"),
        (
            "num_layers=20000",
            r"num_hidden_layers must be a whole number of at most 1,024, got 20000",
        ),
        (
            "num_attention_heads=0",
            r"num_attention_heads must be a whole number of at least 1, got 0",
        ),
    ],
)
def test_a_shape_that_is_not_the_whole_model_or_takes_minutes_is_refused(
    override: str, said: str
) -> None:
    with pytest.raises(UnknownCostError, match=said):
        planned("model=llama8b", f"model.shape.{override}")


def test_a_plan_needs_no_attention_kernels(tmp_path: Path) -> None:
    CONFIG_MAPPING["llama"](**SHAPE).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    named = {
        "_attn_implementation": "flash_attention_2",
        "attn_implementation": "flash_attention_2",
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    assert planned(f"model.path={tmp_path}").job.shape.architecture == "llama"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("plan.depth=0", r"plan\.depth must be at least 1, got 0"),
        ("plan.acceptance_length=9", r"plan\.acceptance_length must be in \[1, 5\] for plan\.dep"),
        (
            "plan.conditional_acceptance=2",
            r"plan\.conditional_acceptance must be in \[0, 1\], got 2",
        ),
        ("plan.loss_share=0", r"plan\.loss_share must be in \[0\.001, 1\], got 0"),
        ("plan.batch_sizes=[]", r"plan\.batch_sizes must not be empty, got \[\]"),
        ("drafter=ngram", r"drafter=ngram has nothing to train, and so nothing to plan"),
        ("hardware.accelerator=b999", r"hardware\.accelerator must be one of a100_40gb, .* b999"),
        ("hardware.device=cuda", r"hardware\.accelerator must name what to plan for"),
    ],
)
def test_what_cannot_be_planned_is_said(override: str, said: str) -> None:
    if override == "hardware.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU to plan for")
    with pytest.raises(ValueError, match=said):
        planned(override)


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_the_rows_of_the_head_that_a_drafter_copies_are_counted(name: str) -> None:
    of = shape(vocab_size=1000)
    whole, reduced = (
        traced(drafter_config(name, draft_vocab_size=size), of) for size in (None, 600)
    )
    fewer = (1000 - 600) * of.hidden_size
    assert (whole.draft_vocab, reduced.draft_vocab) == (1000, 600)
    assert reduced.num_served - whole.num_served == 600 * of.hidden_size
    one, other = whole.draft().further, reduced.draft().further
    assert one.weights - other.weights == fewer
    assert one.flops - other.flops == 2 * fewer
