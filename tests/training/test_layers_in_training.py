"""Layers computed again in the backward pass: the same gradients to the bit, fewer bytes kept."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from paths import PYTHONPATH
from test_drafters import build
from test_engine import deepspeed_config
from test_engine_drafters import VARIANTS, make_drafter, make_engine, rows_of, train
from test_hardware import hardware
from torch import Tensor

from drafttrain.core.ops.layer_calls import AS_WRITTEN, LayerCalls
from drafttrain.core.types import Batch, weighted_sum
from drafttrain.drafters.base import Drafter
from drafttrain.runtime.hardware import choose_compiler
from drafttrain.target.model import Target, load_target
from drafttrain.training.loop import StepChance


def gradients(
    drafter: Drafter, target: Target, batch: Batch, calls: LayerCalls = AS_WRITTEN
) -> tuple[Tensor, int]:
    """Leave gradients in the drafter; return the loss and the bytes kept for the backward pass.

    Each storage counts once; weights, which are there anyway, and the features do not.
    """
    features = target.features(batch, drafter.captures)
    there = {id(features.final_hidden.untyped_storage())}
    there |= {t.untyped_storage().data_ptr() for t in features.captured.values()}
    there |= {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), calls.active():
        loss = weighted_sum(drafter(batch, features, StepChance(0, 0))) / 50
    num_bytes = sum(kept.values())
    loss.backward()
    return loss.detach(), num_bytes


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_the_same_to_the_bit(variant: str, target: Target) -> None:
    batch, found = rows_of(0), []
    for again in (False, True):
        drafter = make_drafter(variant, target)
        found.append((drafter, *gradients(drafter, target, batch, LayerCalls(again))))
    (plain, loss, kept), (again, same, fewer) = found
    assert torch.equal(loss, same)
    for (name, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    assert fewer < kept


@pytest.mark.parametrize("engine", ["none", "zero3_offload"])
@pytest.mark.parametrize("variant", ["eagle3", "lora"])
def test_it_changes_no_step_whatever_holds_the_weights(
    variant: str, engine: str, target: Target
) -> None:
    expected = train(make_engine(make_drafter(variant, target), "none"), target)
    drafter = make_drafter(variant, target)
    trained = make_engine(drafter, engine, layer_calls=LayerCalls(recompute=True))
    curve: Any = train(trained, target)
    torch.testing.assert_close(
        torch.tensor(curve), torch.tensor(expected), rtol=0 if engine == "none" else 1e-5, atol=0
    )
    twin = trained.copy_of_module()  # whose layers are its own, not the trained ones'
    assert isinstance(twin, Drafter)
    with torch.no_grad():
        for parameter in trained.module.parameters():
            parameter.fill_(torch.nan)
    loss, _ = gradients(twin, target, rows_of(3))
    assert loss.isfinite()


@pytest.mark.parametrize("recompute", [False, True])
def test_own_words_are_written_as_ever(recompute: bool, target: Target) -> None:
    batch, written = rows_of(0), []
    for called in (False, recompute):
        torch.manual_seed(3)
        drafter = build("small_lm", target.spec, on_policy=1.0)
        assert drafter.text_source is not None
        with LayerCalls(called).active():
            written.append(drafter.text_source.rewrite(drafter, batch, StepChance(0, 1)).tokens)
    assert torch.equal(*written)
    assert not torch.equal(written[0], batch.tokens)


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients(tiny_target_dir: Path) -> None:
    # Elsewhere: here every call's shapes are checked by code that the compiler would compile, too.
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, __file__, str(tiny_target_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def compare_compiled(variant: str, target: Target, recompute: bool) -> None:
    found = []
    torch._dynamo.utils.counters.clear()
    for backend in (None, "aot_eager"):
        drafter = make_drafter(variant, target)
        calls = LayerCalls(recompute, backend)
        found.append((drafter, gradients(drafter, target, rows_of(0), calls)[0]))
        assert bool(calls.programs) == (backend is not None)
    (plain, loss), (compiled, same) = found
    torch.testing.assert_close(loss, same, rtol=1e-6, atol=0)
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)
    if variant == "eagle3":  # what is before attention and what is after it, whatever the depth
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"hardware\.compile=true needs a C\+\+ compiler"):
        choose_compiler(hardware(compile=True), torch.device("cpu"))
    assert choose_compiler(hardware(), torch.device("cpu")) is None
    with pytest.raises(ValueError, match=r"hardware\.compile must be false with .*=zero3"):
        deepspeed_config("zero3").check_compiled()
    deepspeed_config("zero2").check_compiled()


if __name__ == "__main__":
    its_target = load_target(model_config(Path(sys.argv[1])), torch.float32, "cpu")
    for its_variant in ("eagle3", "eagle", "medusa", "lora"):
        compare_compiled(its_variant, its_target, recompute=False)
    compare_compiled("eagle", its_target, recompute=True)
