"""What `hardware` leaves open is measured, what it sets is kept, what is not there is refused."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from drafttrain.runtime.config import HardwareConfig
from drafttrain.runtime.hardware import (
    choose_decoding,
    choose_device,
    choose_draft_dtype,
    choose_train_dtype,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def hardware(**changes: Any) -> HardwareConfig:
    values = {"name": "test", "device": "cpu", "dtype": "auto", "train_dtype": "float32"}
    values |= {"draft_dtype": "auto", "weights_dtype": "float32"}
    values |= {"ranks": "auto", "target_placement": "auto"}
    values |= {"graphs": "auto", "compile": False, "gradient_checkpointing": False}
    values |= {"accelerator": None, "check_fit": True}
    return HardwareConfig(**{**values, "threads": 0, "micro_batch": 1, **changes})


def pass_of(seconds: dict[tuple[torch.dtype, int], float]) -> Any:
    """A target whose pass over 8 tokens takes as long as said, by dtype and threads."""

    def for_dtype(dtype: torch.dtype) -> Callable[[int], None]:
        return lambda tokens: time.sleep(
            seconds[dtype, torch.get_num_threads()] if tokens == 8 else 0
        )

    return for_dtype


def test_a_gpu_that_emulates_bfloat16_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a T4, for which there are no fused kernels of attention in bfloat16."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    found = choose_train_dtype(hardware(train_dtype="auto"), torch.device("cuda"))
    assert found == torch.float32


@pytest.mark.parametrize("fastest", [(torch.float32, 1), (torch.bfloat16, 2)])
def test_what_verifies_fastest_is_taken_and_said(fastest: tuple[torch.dtype, int]) -> None:
    torch.set_num_threads(2)
    seconds = {(d, n): 0.004 for d in (torch.float32, torch.bfloat16) for n in (1, 2)}
    choice = choose_decoding(hardware(), CPU, pass_of({**seconds, fastest: 0.001}))
    assert (choice.dtype, choice.threads) == fastest
    assert torch.get_num_threads() == fastest[1]
    assert "verifies 8 tokens fastest here (float32 with 1 thread" in choice.reason


def test_what_is_set_is_not_measured() -> None:
    torch.set_num_threads(2)
    choice = choose_decoding(hardware(dtype="float32", threads=2), CPU, pass_of({}))
    assert (choice.dtype, choice.threads) == (torch.float32, 2)


def test_the_drafter_decodes_in_what_is_set_or_in_float32_on_a_cpu() -> None:
    small, large = 8_000_000, 26_000_000
    assert choose_draft_dtype(hardware(), CPU, torch.bfloat16, small) == torch.float32
    assert choose_draft_dtype(hardware(), CPU, torch.bfloat16, large) == torch.bfloat16
    assert choose_draft_dtype(hardware(), CPU, torch.float32, large) == torch.float32
    gpu = torch.device("cuda")
    assert choose_draft_dtype(hardware(), gpu, torch.bfloat16, small) == torch.bfloat16
    asked = hardware(draft_dtype="bfloat16")
    assert choose_draft_dtype(asked, CPU, torch.float32, small) == torch.bfloat16


def test_threads_are_those_asked_for_or_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(hardware(threads=3)) == "cpu"
    assert torch.get_num_threads() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    choose_device(hardware())
    assert torch.get_num_threads() == 1


def test_a_run_on_the_cpu_wakes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for one takes seconds where there are many, and warns where a driver is broken."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a GPU"))
    assert choose_device(hardware(device="cpu")) == "cpu"


def test_on_a_gpu_attention_does_not_plan_anew_for_every_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        assert choose_device(hardware(device="cuda")) == "cuda"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_training_dtype_is_kept_or_what_the_processor_has() -> None:
    assert choose_train_dtype(hardware(), CPU) == torch.float32
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    expected = torch.bfloat16 if fast else torch.float32
    assert choose_train_dtype(hardware(train_dtype="auto"), CPU) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hardware.device=cuda needs a CUDA GPU .* found none"):
        choose_device(hardware(device="cuda"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": "float16"},
            "hardware.dtype must be one of auto, float32, bfloat16, got",
        ),
        ({"device": "tpu"}, r"hardware.device must be auto, cpu or cuda\[:N\], got tpu"),
        ({"device": "cuda:x"}, r"hardware.device must be auto, cpu or cuda\[:N\], got cuda:x"),
        ({"device": "cuda:"}, r"hardware.device must be auto, cpu or cuda\[:N\], got cuda:"),
        ({"device": "auto:1"}, r"hardware.device must be auto, cpu or cuda\[:N\], got auto:1"),
        ({"threads": -1}, "hardware.threads must be at least 0"),
        ({"micro_batch": 0}, "hardware.micro_batch must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hardware(**changes)
