"""Weights in bfloat16 with float32 masters: the steps of autocast, and no small update is lost.

Run as a script under torchrun, this file trains on its ranks and writes the curves of rank 0.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import PYTHONPATH
from test_engine import Model, assert_same_curve, deepspeed_config, rows_of, train

from drafttrain.training.engine.build import build_engine
from drafttrain.training.engine.engine import Engine

ENGINES = ["none", "zero2", "zero3", "zero3_offload"]
LOW = torch.bfloat16


def make_engine(
    name: str, weights_dtype: torch.dtype = LOW, dtype: torch.dtype = torch.bfloat16
) -> Engine:
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return build_engine(
        Model(),
        deepspeed_config(name),
        device="cpu",
        dtype=dtype,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        max_grad_norm=0.8,
        weights_dtype=weights_dtype,
    )


def weight_bytes(engine: Engine) -> int:
    return sum(p.numel() * p.element_size() for p in engine._trainable.values())


@pytest.mark.parametrize("name", ENGINES)
def test_the_module_is_low_and_what_is_saved_is_not(name: str) -> None:
    engine, wide = make_engine(name), make_engine("none", torch.float32)
    assert all(p.dtype == LOW for p in engine.module.parameters())
    saved = engine.weights()
    for key, value in wide.weights().items():  # what it began with was not rounded
        assert torch.equal(saved[key], value), key
    twin = engine.copy_of_module()
    assert all(torch.equal(twin.state_dict()[key], value) for key, value in saved.items())


@pytest.mark.parametrize("name", ENGINES)
def test_the_steps_are_those_of_autocast_over_float32_weights(name: str) -> None:
    expected = train(make_engine("none", torch.float32), 3)
    curve = train(make_engine(name), 3)
    # Norms and embeddings are read in bfloat16, where autocast reads float32: all that differs.
    assert_same_curve(curve, expected, rel=1e-2)
    if name != "none":
        assert_same_curve(curve, train(make_engine("none"), 3), rel=2e-5)


@pytest.mark.parametrize("name", ENGINES)
def test_updates_too_small_for_bfloat16_add_up_in_the_masters(name: str) -> None:
    steps, lr = 20, 1e-6
    before = make_engine("none", torch.float32).weights()
    wide = make_engine("none", torch.float32)
    engine = make_engine(name)
    lost = {key: value.to(LOW) for key, value in before.items()}
    for step in range(steps):
        batch = rows_of(0)
        for each in (wide, engine):
            loss = sum(term.sum for term in each.losses(*batch).values()) / 20
            each.backward(loss, last=True)
            each.step(lr)
        # What bfloat16 alone would keep of updates as large as AdamW's are here.
        lost = {key: value - lr for key, value in lost.items()} if step == 0 else lost
    moved, expected = engine.weights(), wide.weights()
    for key in ("head.weight", "mix.weight"):
        distance = (moved[key] - before[key]).abs().mean()
        assert distance > 0.5 * steps * lr, (key, distance)
        assert (moved[key] - expected[key]).abs().mean() < 0.1 * distance
        still = (lost[key] == before[key].to(LOW)).float().mean()
        assert still > 0.95, (key, still)


@pytest.mark.parametrize("name", ENGINES)
def test_masters_are_saved_and_loaded_to_the_bit(name: str, tmp_path: Path) -> None:
    saving = make_engine(name)
    train(saving, 4, steps=3)
    saving.save(tmp_path)
    kept = saving.weights()
    expected = train(saving, 4, steps=3, first=3)
    loading = make_engine(name)
    loading.load_weights(kept)
    loading.load(tmp_path)
    assert train(loading, 4, steps=3, first=3) == expected
    for key, value in saving.weights().items():
        assert torch.equal(loading.weights()[key], value), key


@pytest.mark.parametrize("name", ENGINES)
def test_a_loss_that_is_not_finite_changes_no_master(name: str) -> None:
    engine = make_engine(name)
    train(engine, 4, steps=1)
    before = engine.weights()
    loss = sum(term.sum for term in engine.losses(*rows_of(1)).values())
    engine.backward(loss * float("nan"), last=True)
    with pytest.raises(ValueError, match="must have a finite loss"):
        engine.step(lr=0.02)
    assert all(torch.equal(before[key], value) for key, value in engine.weights().items())
    other = make_engine(name)
    train(other, 4, steps=1)
    assert train(engine, 4, steps=2, first=1) == train(other, 4, steps=2, first=1)


def test_masters_where_there_are_none_are_refused_by_key() -> None:
    with pytest.raises(ValueError, match=r"train_dtype must be bfloat16 if .*weights_dtype"):
        make_engine("none", dtype=torch.float32)
    for name in ("zero0", "zero1", "zero2_offload"):
        with pytest.raises(ValueError, match=rf"weights_dtype must be float32 with .*={name}"):
            make_engine(name)


@pytest.mark.slow
def test_two_ranks_with_masters_take_the_steps_of_one(tmp_path: Path) -> None:
    output = tmp_path / "curves.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", __file__, str(output)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    curves = json.loads(output.read_text())
    expected = train(make_engine("none"), micro_batch=1)
    assert list(curves) == ENGINES
    for curve in curves.values():
        assert_same_curve(curve, expected, rel=1e-5)


if __name__ == "__main__":
    curves = {}
    for name in ENGINES:
        engine = make_engine(name)
        curves[name] = train(engine, 1)
    if engine.is_main:
        Path(sys.argv[1]).write_text(json.dumps(curves))
