"""Every drafter trains alike, to the stated tolerance, whatever holds its weights, and where.

Run as a script under torchrun, this file trains on its ranks and writes what rank 0 saw.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from paths import PYTHONPATH
from safetensors.torch import load_file
from test_drafters import TRAINABLE, as_batch, build
from test_engine import deepspeed_config

from drafttrain.core.types import Batch, weighted_sum
from drafttrain.drafters.base import Drafter
from drafttrain.target.model import Target, load_target
from drafttrain.training.checkpoint import Checkpoints, TrainState
from drafttrain.training.engine.build import build_engine
from drafttrain.training.engine.engine import Engine
from drafttrain.training.loop import StepChance

SHARDED = ["zero2_offload", "zero3", "zero3_offload"]
# LoRA: frozen weights are sharded as well; tied: two modules own one weight.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in TRAINABLE},
    "lora": ("small_lm", {"layers": [0, 2], "lora_rank": 4}),
    "tied": ("small_lm", {"tie_embeddings": True}),
    "eagle_reduced": ("eagle", {"draft_vocab_size": 40}),
    "eagle3_reduced": ("eagle3", {"draft_vocab_size": 40, "own_embedding": True}),
}


def make_drafter(variant: str, target: Target) -> Drafter:
    torch.manual_seed(3)
    name, changes = VARIANTS[variant]
    drafter = build(name, target.spec, **changes)
    drafter.initialise(target.model, target.tokenizer)
    drafter.prepare(torch.arange(target.spec.vocab_size), target.readout)
    return drafter


def make_engine(drafter: Drafter, engine: str, **how: Any) -> Engine:
    values: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "max_grad_norm": 0.5}
    values |= {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    return build_engine(drafter, deepspeed_config(engine), **values | how)


def rows_of(step: int) -> Batch:
    """Eight conversations of 5 to 14 tokens, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(5, 15, (8,), generator=generator).tolist()
    rows = [torch.randint(6, 97, (n,), generator=generator).tolist() for n in lengths]
    return as_batch(*rows)


def train(
    engine: Engine, target: Target, first: int = 0, steps: int = 4, lr: float = 1e-3
) -> list[list[float]]:
    """Train, each rank on its share of the rows; return loss and gradient norm of each step."""
    drafter = engine.module
    assert isinstance(drafter, Drafter)
    curve = []
    for step in range(first, first + steps):
        batch, chance = rows_of(step), StepChance(0, step)
        mine = list(range(engine.rank, 8, engine.world_size))
        parts = [mine[i : i + 2] for i in range(0, len(mine), 2)]
        total = torch.zeros(())
        for number, rows in enumerate(parts):
            part = Batch(*(tensor[rows] for tensor in vars(batch).values()))
            features = target.features(part, drafter.captures)
            loss = weighted_sum(engine.losses(part, features, chance)) / batch.loss_mask.sum()
            engine.backward(loss, last=number == len(parts) - 1)
            total += loss.detach()
        norm = engine.step(lr)
        curve.append([engine.ranks.sum_over_ranks(total).item(), norm])
    return curve


def assert_close(curve: list[list[float]], expected: list[list[float]], rel: float) -> None:
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=rel, atol=0)


def torchrun(task: str, *arguments: Path | str, ranks: int = 2) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    command += [str(ranks), __file__, task, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_sharded_weights_take_the_steps_of_whole_ones(variant: str, target: Target) -> None:
    expected = train(make_engine(make_drafter(variant, target), "none"), target, steps=2)
    engine = make_engine(make_drafter(variant, target), "zero3_offload")
    assert_close(train(engine, target, steps=2), expected, rel=1e-5)


@pytest.mark.parametrize("engine", ["none", "zero2", "zero3"])
@pytest.mark.parametrize("variant", ["eagle3_reduced", "lora", "tied"])
def test_a_copy_is_whole_computes_alike_and_is_no_longer_trained(
    variant: str, engine: str, target: Target
) -> None:
    trained = make_engine(make_drafter(variant, target), engine)
    train(trained, target, steps=1)
    twin = trained.copy_of_module()
    assert isinstance(twin, Drafter)
    weights = trained.weights()
    assert list(twin.state_dict()) == list(weights)
    assert all(torch.equal(weights[name], value) for name, value in twin.state_dict().items())
    batch = rows_of(9)
    features = target.features(batch, twin.captures)
    before = twin(batch, features, StepChance(0, 0))["depth_1"].sum
    torch.testing.assert_close(
        before, trained.losses(batch, features, StepChance(0, 0))["depth_1"].sum, rtol=1e-6, atol=0
    )
    train(trained, target, first=1, steps=1)
    assert torch.equal(twin(batch, features, StepChance(0, 0))["depth_1"].sum, before)
    before.backward()  # its gradients are its own


def test_own_words_are_written_by_whole_weights(target: Target) -> None:
    VARIANTS["own_words"] = ("small_lm", {"on_policy": 1.0})
    try:
        engines = [make_engine(make_drafter("own_words", target), n) for n in ("none", "zero3")]
    finally:
        del VARIANTS["own_words"]
    batch, written = rows_of(0), []
    for engine in engines:
        train(engine, target, steps=1)
        writer = engine.whole_module()
        assert isinstance(writer, Drafter)
        assert writer.text_source is not None
        written.append(writer.text_source.rewrite(writer, batch, StepChance(0, 1)).tokens)
        train(engine, target, first=1, steps=1)
    assert torch.equal(*written)
    assert not torch.equal(written[0], batch.tokens)


@pytest.mark.slow
def test_every_drafter_takes_the_steps_of_one_plain_rank_on_two(
    target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "curves.json"
    torchrun("curves", tiny_target_dir, output)
    curves = json.loads(output.read_text())
    for variant in VARIANTS:
        expected = train(make_engine(make_drafter(variant, target), "none"), target)
        for engine in SHARDED:
            assert_close(curves[f"{variant} {engine}"], expected, rel=1e-5)


STATE = TrainState(3, 0, {}, None, "", {})


def assert_equal_files(one: Path, other: Path, rel: float) -> None:
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(one / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=rel, atol=rel * 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zero2_offload"])
def test_a_checkpoint_goes_from_two_sharded_ranks_to_one_plain_and_back(
    name: str, target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    plain = make_engine(make_drafter("eagle3_reduced", target), "none")
    train(plain, target, steps=3)
    Checkpoints(tmp_path / "plain", 2).save(plain, STATE, best=True)
    expected = train(plain, target, first=3)
    torchrun("go_on", tiny_target_dir, tmp_path, name)
    goes_on = json.loads((tmp_path / "curve.json").read_text())
    assert_close(goes_on, expected, rel=1e-5)
    # The same steps from the start, by two ranks; the same files.
    latest = Checkpoints(tmp_path / "sharded", 2).latest()
    assert latest is not None
    assert_equal_files(latest, tmp_path / "plain" / latest.name, rel=1e-4)
    back = make_engine(make_drafter("eagle3_reduced", target), "none")
    assert Checkpoints(tmp_path / "sharded", 2).resume(back) == STATE
    assert_close(train(back, target, first=3), expected, rel=1e-5)
    # What two ranks loaded and saved without a step is the file to the bit.
    assert_equal_files(tmp_path / "again" / latest.name, tmp_path / "plain" / latest.name, rel=0)


def go_on(folder: Path, checkpoints: Path, name: str) -> None:
    target = load_target(model_config(folder), torch.float32, "cpu")
    engine = make_engine(make_drafter("eagle3_reduced", target), name)
    Checkpoints(checkpoints / "plain", 2).resume(engine)
    Checkpoints(checkpoints / "again", 2).save(engine, STATE, best=True)
    curve = train(engine, target, first=3)
    if engine.is_main:
        (checkpoints / "curve.json").write_text(json.dumps(curve))
    fresh = make_engine(make_drafter("eagle3_reduced", target), name)
    train(fresh, target, steps=3)
    Checkpoints(checkpoints / "sharded", 2).save(fresh, STATE, best=True)


def curves_of_all(folder: Path, output: Path) -> None:
    target = load_target(model_config(folder), torch.float32, "cpu")
    curves = {}
    for variant in VARIANTS:
        for name in SHARDED:
            engine = make_engine(make_drafter(variant, target), name)
            curves[f"{variant} {name}"] = train(engine, target)
    if engine.is_main:
        output.write_text(json.dumps(curves))


if __name__ == "__main__":
    task, *rest = sys.argv[1:]
    if task == "curves":
        curves_of_all(Path(rest[0]), Path(rest[1]))
    elif task == "go_on":
        go_on(Path(rest[0]), Path(rest[1]), rest[2])
