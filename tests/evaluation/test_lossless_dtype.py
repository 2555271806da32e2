"""Losslessness where no float32 copy of the target fits: checked in the dtype that is served."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import drafttrain
from drafttrain.commands.setup import evaluation as setup
from drafttrain.data.suites import BUILTIN_PROMPTS
from drafttrain.report.results import Divergence, LosslessCheck, Report
from drafttrain.target import placement as placing

ROOM = 60_000_000  # bytes: 0.7 of them hold the tiny target's 28 MB in bfloat16, and not its 57 MB


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Report]]:
    """An evaluation with room for the float32 copy, and one without; what was loaded for each."""
    patch = pytest.MonkeyPatch()
    target = drafttrain.load_target("tiny", dtype="bfloat16", device="cpu")
    drafter = drafttrain.load_drafter("ngram", target)
    found, loaded, load = {}, [], setup.load_alone

    def noting(*asked: Any) -> Any:
        loaded.append(asked[2])
        return load(*asked)

    patch.setattr(setup, "load_alone", noting)
    prompts = tmp_path_factory.mktemp("prompts") / "three.jsonl"
    rows = [row for row in BUILTIN_PROMPTS.read_text().splitlines() if "tiny_literature_0" in row]
    prompts.write_text("\n".join(rows[:3]))
    settings: dict[str, Any] = {"prompts": str(prompts), "lossless_prompts": 3, "blocks": 1}
    settings |= {"max_new_tokens": 16, "certify": True, "batch_size": 2, "resamples": 100}
    found["room"] = drafttrain.evaluate(target, drafter, **settings | {"certify": False})
    assert loaded == [torch.float32]
    patch.setattr(placing, "free_bytes", lambda device: ROOM)
    found["none"] = drafttrain.evaluate(target, drafter, **settings)
    assert loaded == [torch.float32], "no second copy is loaded where it does not fit"
    yield found
    patch.undo()


def test_where_a_float32_copy_fits_it_is_checked_on(reports: dict[str, Report]) -> None:
    check = reports["room"].lossless
    assert check.dtype == "float32"
    assert check.identical


def test_without_room_it_is_checked_as_served_with_a_tolerance_that_is_said(
    reports: dict[str, Report],
) -> None:
    report = reports["none"]
    check = report.lossless
    assert (check.dtype, check.greedy_total) == ("bfloat16", 3)
    assert check.identical
    assert check.divergences, "else the tolerance is not tried here"
    assert "the others but for choices within twice its rounding noise" in check.statement
    assert not any(flag.kind == "lossless" for flag in report.flags)
    note = next(note for note in report.notes if "float32 takes" in note)
    assert "checked in bfloat16" in note
    assert "takes 54.0 MiB more, and there is room for 40.1 MiB" in note


def test_the_certificate_judges_nothing_that_rounding_alone_changes(
    reports: dict[str, Report],
) -> None:
    section = reports["none"].certificate
    assert section is not None
    assert section.certified, section.statement
    bounds = {check.name: check.bound for check in section.checks}
    assert bounds["cache and positions"] == "at most 0.02"
    assert {check.name: check.passed for check in section.checks}["batch"] is None


def test_a_difference_that_is_no_near_tie_is_no_tolerance() -> None:
    tie = Divergence("one", 3, gap=0.05, noise=0.05, tie=True)
    check = LosslessCheck("rule", True, "bfloat16", 7, 8, [tie], "")
    assert check.identical
    assert not replace(check, divergences=[replace(tie, tie=False)]).identical
    assert not replace(check, dtype="float32").identical, "float32 excuses nothing"


def test_on_gpus_the_host_is_no_room_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda": 40 << 30, "cpu": 512 << 30}
    monkeypatch.setattr(placing, "free_bytes", lambda device: free[device.type])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    model = drafttrain.load_target("tiny", dtype="float32", device="cpu").config
    assert model is not None
    gpu = torch.device("cuda", 0)
    assert placing.room_for(model, gpu) == 8 * int(0.7 * free["cuda"])
    inflated = replace(model, inflate="200M")
    assert placing.room_for(inflated, gpu) == int(0.7 * free["cuda"]), "it lies on one GPU"
    assert placing.room_for(model, torch.device("cpu")) == int(0.7 * free["cpu"])


def test_two_dtypes_are_not_compared_where_they_do_not_fit_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placing, "free_bytes", lambda device: ROOM)
    assert drafttrain.load_target("tiny", device="cpu").dtype == torch.bfloat16
    assert "decoding in bfloat16: float32 beside it would take 81.0 MiB" in capsys.readouterr().out
