"""The training loop: resumed, batched or spread over ranks, it takes the same steps."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from paths import PYTHONPATH
from test_drafters import TRAINABLE, build
from test_engine import deepspeed_config

from drafttrain.core.types import Sample
from drafttrain.data.batches import Batches, token_counts
from drafttrain.drafters.base import Drafter
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import Tell
from drafttrain.runtime.tracker import JsonlTrackerConfig, open_tracker, read_metrics
from drafttrain.target.model import Target, load_target
from drafttrain.training.checkpoint import (
    Checkpoints,
    TrainState,
    load_state,
    load_weights,
    verify,
)
from drafttrain.training.config import TrainerConfig
from drafttrain.training.engine.build import build_engine
from drafttrain.training.engine.engine import Engine, NonFiniteError
from drafttrain.training.loop import ERROR, METRIC, Meter, StepChance, resumed, train
from drafttrain.training.validation import Validation, held_out_prompts

STEPS = 6
Validate = Callable[[Tell], dict[str, float]]


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return load_target(model_config(tiny_target_dir), torch.float32, "cpu")


def random_samples(count: int = 24) -> list[Sample]:
    """Conversations of 6 to 24 random tokens; what is trained starts after a prompt."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for index in range(count):
        length = int(torch.randint(6, 25, (), generator=generator))
        tokens = torch.randint(6, 97, (length,), generator=generator)
        samples.append(Sample(tokens, torch.arange(length) >= 3, index))
    return samples


def trainer(**changes: Any) -> TrainerConfig:
    values: dict[str, Any] = {
        "name": "test",
        "epochs": 1,
        "max_steps": STEPS,
        "tokens_per_step": 90,
        "lr": 2e-3,
        "schedule": "cosine",
        "warmup_steps": 2,
        "final_lr_ratio": 0.1,
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "ema_decay": 0.0,
        "max_grad_norm": 1.0,
        "log_every": 1,
        "validate_every": 100,
        "validation_prompts": 4,
        "validation_tokens": 8,
        "save_every": 100,
        "keep_checkpoints": 2,
    }
    return TrainerConfig(**values | changes)


def constant(tell: Tell) -> dict[str, float]:
    return {METRIC: 1.0}


def interrupt(tell: Tell) -> dict[str, float]:
    raise KeyboardInterrupt


def metrics_on_rank_0(values: Sequence[float], error: float = 0.0) -> Validate:
    rest = iter(values)
    return lambda tell: {METRIC: next(rest), METRIC + ERROR: error}


# Families that draw what a step trains do draw here, where their texts are short.
DRAWN: dict[str, dict[str, Any]] = {
    "p_eagle": {"cod_ratio": 0.6},
    **{name: {"num_anchors": 2} for name in ("dflash", "dflash2", "dspark")},
}


def start(
    name: str,
    target: Target,
    folder: Path,
    config: TrainerConfig,
    validate: Validate | None = None,
    micro_batch: int = 4,
) -> Engine:
    """Do what a process that trains does, from new objects; `validate` None is the real one."""
    torch.manual_seed(0)
    samples = random_samples()
    drafter = build(name, target.spec, **DRAWN.get(name, {}))
    drafter.prepare(token_counts(samples, target.spec.vocab_size), target.readout)
    engine = build_engine(
        drafter,
        deepspeed_config("none"),
        device="cpu",
        dtype=torch.float32,
        betas=(config.beta1, config.beta2),
        eps=1e-8,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
    checkpoints = Checkpoints(folder / "checkpoints", config.keep_checkpoints)
    latest = checkpoints.latest()
    tracker = open_tracker(
        JsonlTrackerConfig(name="none"),
        folder,
        config={},
        resume_step=None if latest is None else load_state(latest).step,
        is_main=True,
    )
    if validate is None:
        held_out = [Sample(s.tokens, s.loss_mask, 100 + s.index) for s in samples[:4]]
        validate = Validation(
            target,
            engine,
            held_out_prompts(held_out),
            most=4,
            depth=2,
            max_new_tokens=8,
            draft_dtype=torch.float32,
            stop=StopRequest(),
        )
    batches = Batches(samples, config.tokens_per_step, micro_batch, seed=3)
    train(engine, target, batches, checkpoints, tracker, config, validate, 7, StopRequest())
    tracker.finish()
    return engine


def recorded(folder: Path, key: str = "train/loss") -> list[tuple[int, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row[key]) for row in rows if key in row]


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_resumed_run_ends_bitwise_where_an_uninterrupted_one_does(
    name: str, target: Target, tmp_path: Path
) -> None:
    whole = start(name, target, tmp_path / "whole", trainer(), constant)
    # Step 4 is trained and recorded, then lost: the newest checkpoint is of step 3.
    broken = trainer(save_every=3, validate_every=4)
    with pytest.raises(KeyboardInterrupt):
        start(name, target, tmp_path / "broken", broken, interrupt)
    assert [step for step, _ in recorded(tmp_path / "broken")] == [1, 2, 3, 4]
    again = start(name, target, tmp_path / "broken", broken, constant)
    expected = whole.module.state_dict()
    for key, value in again.module.state_dict().items():
        assert torch.equal(value, expected[key]), key
    losses = recorded(tmp_path / "whole")
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert recorded(tmp_path / "broken") == losses
    for key in ("train/lr", "train/grad_norm", "train/tokens"):
        assert recorded(tmp_path / "broken", key) == recorded(tmp_path / "whole", key)


def test_a_finished_run_resumed_trains_no_further(target: Target, tmp_path: Path) -> None:
    first = start("medusa", target, tmp_path, trainer(), constant)
    losses = recorded(tmp_path)
    again = start("medusa", target, tmp_path, trainer(), constant)
    assert recorded(tmp_path) == losses
    for key, value in first.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[key], value), key


def test_a_run_resumed_past_its_last_step_ends(target: Target, tmp_path: Path) -> None:
    start("medusa", target, tmp_path, trainer(), constant)
    losses = recorded(tmp_path)
    start("medusa", target, tmp_path, trainer(max_steps=2), constant)
    assert recorded(tmp_path) == losses
    assert [step for step, _ in recorded(tmp_path, "val/acceptance_length")][-1] == 6


def test_the_micro_batch_changes_no_loss_noise_included(target: Target, tmp_path: Path) -> None:
    assert build("eagle", target.spec).config.feature_noise > 0
    curves = {}
    for micro_batch in (1, 2, 8):
        folder = tmp_path / str(micro_batch)
        start("eagle", target, folder, trainer(), constant, micro_batch)
        curves[micro_batch] = [
            value for key in ("train/loss", "train/grad_norm") for _, value in recorded(folder, key)
        ]
    assert curves[2] == pytest.approx(curves[1], rel=1e-4)
    assert curves[8] == pytest.approx(curves[1], rel=1e-4)


def test_noise_is_a_conversations_own_and_new_at_every_step() -> None:
    document = torch.tensor([[4, 4, 7, 7, -1], [9, 9, 9, -1, -1]])
    values = torch.zeros(2, 5, 3)
    drawn = StepChance(0, 1).uniform_like(values, document)
    alone = StepChance(0, 1).uniform_like(values[:1, :2], torch.tensor([[7, 7]]))
    assert torch.equal(drawn[0, 2:4], alone[0])
    assert not drawn[document < 0].any()
    assert not torch.equal(drawn[0, :2], drawn[0, 2:4])
    assert not torch.equal(drawn, StepChance(0, 2).uniform_like(values, document))
    assert not torch.equal(drawn, StepChance(1, 1).uniform_like(values, document))


def test_the_best_checkpoint_is_the_last_one_that_validated_highest(
    target: Target, tmp_path: Path
) -> None:
    config = trainer(validate_every=1, keep_checkpoints=1)
    start("medusa", target, tmp_path, config, metrics_on_rank_0([1.1, 1.5, 1.4, 1.5, 1.2, 1.3]))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    assert checkpoints.best() == tmp_path / "checkpoints" / "step-000004"
    assert checkpoints.latest() == tmp_path / "checkpoints" / "step-000006"
    assert load_state(checkpoints.folder / "step-000006").best_metric == 1.5
    assert recorded(tmp_path, METRIC)[1] == (2, 1.5)


def test_resuming_a_finished_run_leaves_its_checkpoints(target: Target, tmp_path: Path) -> None:
    """Their names stand in evaluations and tuned.json, and batch scripts always resume."""
    config = trainer(validate_every=3, keep_checkpoints=1)
    start("medusa", target, tmp_path, config, metrics_on_rank_0([1.1, 1.5], error=0.1))

    def written() -> dict[Path, tuple[int, int]]:
        every = (tmp_path / "checkpoints").rglob("*")
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in every}

    before = written()
    start("medusa", target, tmp_path, config, metrics_on_rank_0([1.5], error=0.1))
    assert written() == before
    assert Checkpoints(tmp_path / "checkpoints", 1).best() in before


def test_validation_takes_prompts_that_the_drafter_has_room_for(target: Target) -> None:
    engine = build_engine(
        *(build("medusa", target.spec), deepspeed_config("none")),
        **{"device": "cpu", "dtype": torch.float32, "betas": (0.9, 0.95), "eps": 1e-8},
        **{"weight_decay": 0.0, "max_grad_norm": 1.0},
    )
    assert isinstance(engine.module, Drafter)
    lengths = [20, 12, 11, 5]
    ends = [torch.arange(length + 1) >= length for length in lengths]
    held_out = [Sample(torch.arange(len(end)), end, i) for i, end in enumerate(ends)]
    asked: dict[str, Any] = {"most": 4, "depth": 2, "max_new_tokens": 8}
    asked |= {"draft_dtype": torch.float32, "stop": StopRequest()}
    engine.module.longest = 21
    validation = Validation(target, engine, held_out_prompts(held_out), **asked)
    assert [len(prompt.tokens) for prompt in validation.prompts] == [11, 5]
    engine.module.longest = 14
    with pytest.raises(ValueError, match="in the 14 positions of drafter=medusa; raise"):
        Validation(target, engine, held_out_prompts(held_out), **asked)


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([1.1, 1.5, 1.45, 1.2, 1.2, 1.2], 3),  # longer trained, and no worse within the error
        ([1.5, 1.43, 1.36, 1.29, 1.22, 1.15], 2),  # each within the error of the last: a decline
    ],
)
def test_of_two_checkpoints_that_prompts_cannot_tell_apart_the_later_is_best(
    values: list[float], best: int, target: Target, tmp_path: Path
) -> None:
    config = trainer(validate_every=1, keep_checkpoints=1)
    start("medusa", target, tmp_path, config, metrics_on_rank_0(values, error=0.1))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    folder = checkpoints.best()
    assert folder == tmp_path / "checkpoints" / f"step-{best:06d}"
    assert load_state(folder).best_metric == values[best - 1]


def test_a_resumed_run_says_in_what_it_is_measured_or_computed_otherwise(
    target: Target, tmp_path: Path
) -> None:
    """And acceptance lengths of another depth are not compared with those before."""
    config = trainer(validate_every=3, max_steps=3)
    start("medusa", target, tmp_path, config, metrics_on_rank_0([1.5], error=0.1))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    said: list[str] = []

    def resume(dtype: torch.dtype, depth: int | None) -> TrainState:
        torch.manual_seed(0)
        drafter = build("medusa", target.spec)
        optimizer = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
        engine = build_engine(
            *(drafter, deepspeed_config("none")), device="cpu", dtype=dtype, **optimizer
        )
        batches = Batches(random_samples(), config.tokens_per_step, 4, seed=3)
        yardstick = None if depth is None else {"depth": depth, "prompts": 4}
        state = resumed(engine, batches, checkpoints, target.spec, METRIC, yardstick, said.append)
        checkpoints.save(engine, state, best=False)
        return state

    assert resume(torch.float32, None).best_metric == 1.5
    assert said == []
    assert resume(torch.float32, 2).best_metric is None
    said.clear()
    assert resume(torch.bfloat16, 3).best_metric is None
    products, validated = said
    assert products.startswith("products in training are bfloat16 from here on, and were float32")
    assert validated.startswith("validation is by depth 3, prompts 4, and was by depth 2, prompts")
    assert resume(torch.bfloat16, 3).best_metric is None, "none has been measured since"
    assert len(said) == 2


def test_waiting_for_data_counts_across_a_checkpoint(target: Target, tmp_path: Path) -> None:
    meter, again = (Meter(start("medusa", target, tmp_path, trainer(), constant)) for _ in "12")
    meter.wait_s, meter.busy_s = 3.0, 4.0
    again.load_state_dict(meter.state_dict())
    assert (again.wait_s, again.busy_s) == (3.0, 4.0)


def test_the_real_validation_runs_at_its_steps_and_changes_no_training(
    target: Target, tmp_path: Path
) -> None:
    config = trainer(validate_every=2)
    start("eagle3", target, tmp_path / "real", config)
    start("eagle3", target, tmp_path / "none", trainer(), constant)
    lengths = recorded(tmp_path / "real", METRIC)
    assert [step for step, _ in lengths] == [2, 4, 6]
    assert all(1 <= value <= 3 for _, value in lengths)
    assert recorded(tmp_path / "real") == recorded(tmp_path / "none")


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_its_checkpoint(
    name: str, target: Target, tmp_path: Path
) -> None:
    head = target.readout.head
    healthy = head.clone()

    @torch.no_grad()
    def break_the_target(tell: Tell) -> dict[str, float]:
        head.fill_(float("nan"))
        return {METRIC: 1.0}

    config = trainer(validate_every=3)
    try:
        with pytest.raises(NonFiniteError, match=r"optimizer step 3 must have a finite loss"):
            start(name, target, tmp_path / "broken", config, break_the_target)
    finally:
        with torch.no_grad():
            head.copy_(healthy)
    latest = Checkpoints(tmp_path / "broken/checkpoints", 2).latest()
    assert latest is not None
    verify(latest)
    assert load_state(latest).step == 3
    assert all(bool(value.isfinite().all()) for value in load_weights(latest).values())
    resumed = start(name, target, tmp_path / "broken", config, constant)
    whole = start(name, target, tmp_path / "whole", config, constant)
    for key, value in whole.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[key], value), key
    assert recorded(tmp_path / "broken") == recorded(tmp_path / "whole")


# An untrained drafter gives all tokens nearly the same probability, so that rounding would decide
# which of two neighbours is drawn. A low temperature leaves it few tokens to choose from.
OWN_WORDS = ["drafter=small_lm", "drafter.on_policy=0.5", "drafter.on_policy_temperature=0.05"]
OWN_WORDS += ["drafter.hidden_size=64"]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [[], OWN_WORDS], ids=["default", "own_words"])
def test_two_ranks_and_deepspeed_record_the_losses_of_one_plain_rank(
    drafter: list[str], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    with data.open("w") as file:
        for number in range(40):
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": f"{number} plus {number} is {2 * number}. " * 3},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")

    def losses(name: str, ranks: int, *more: str) -> list[float]:
        folder = tmp_path / name
        command = [sys.executable, "-m"]
        if ranks > 1:
            command += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
            command += ["-m"]
        command += ["drafttrain", "train", "data=jsonl", f"data.path={data}", "data.holdout=2"]
        command += ["hardware=cpu", "hardware.threads=1", "hardware.micro_batch=2"]
        command += ["trainer.max_steps=4", "trainer.tokens_per_step=512", "trainer.log_every=1"]
        command += ["trainer.validation_prompts=1", "trainer.validation_tokens=4"]
        command += ["optimizer=adamw"]  # which DeepSpeed runs
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        done = subprocess.run(
            [*command, f"run.dir={folder}", *drafter, *more],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        curve = recorded(folder)
        assert [step for step, _ in curve] == [1, 2, 3, 4]
        return [value for _, value in curve]

    expected = losses("one", 1)
    assert losses("two", 2) == pytest.approx(expected, rel=1e-4)
    assert losses("deepspeed", 1, "deepspeed=zero1") == pytest.approx(expected, rel=1e-4)
    assert losses("sharded", 2, "deepspeed=zero3") == pytest.approx(expected, rel=1e-4)
