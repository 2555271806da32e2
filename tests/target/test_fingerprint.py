"""The identity of a target: its weights and configuration, however they are written down."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from safetensors.torch import load_file, save_file

from drafttrain.core.types import changed_part
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.models import fingerprint, fingerprint_of


@pytest.fixture(params=["whole", "sampled"])
def folder(
    request: pytest.FixtureRequest,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A copy of a target, hashed whole, or by samples as models above 1 GiB are."""
    if request.param == "sampled":
        monkeypatch.setattr(files, "HASHED_WHOLE_BYTES", 0)
        monkeypatch.setattr(files, "WINDOW_BYTES", 16)
    shutil.copytree(tiny_target_dir, tmp_path / "copy")
    return tmp_path / "copy"


def mark(folder: Path) -> str:
    return fingerprint(model_config(folder), torch.float32, "cpu")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    plain = json.loads((folder / "config.json").read_text())
    change(plain)
    (folder / "config.json").write_text(json.dumps(plain))


def shard(folder: Path, *, reverse: bool) -> None:
    """Split the weights over two files, of any names and in any order."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors, reverse=reverse)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    places = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def double(plain: dict[str, Any]) -> None:
    """Write the base of the rotary positions in both places."""
    rope = plain.get("rope_parameters") or {"rope_type": "default"}
    theta = plain.pop("rope_theta", rope.get("rope_theta"))
    plain.update(rope_theta=theta, rope_parameters={**rope, "rope_theta": theta})


SAME: dict[str, Callable[[dict[str, Any]], object]] = {
    "padding token": lambda plain: plain.update(pad_token_id=3),
    "a list of end tokens": lambda plain: plain.update(eos_token_id=[1, 2]),
    "dtype": lambda plain: plain.update(torch_dtype="bfloat16"),
    "a key that nobody knows": lambda plain: plain.update(unsloth_version="2026.1"),
    "the version": lambda plain: plain.update(transformers_version="4.40.0"),
    "caching": lambda plain: plain.update(use_cache=False),
    "architectures": lambda plain: plain.pop("architectures", None),
    "rope_theta twice": double,
    "a default written out": lambda plain: plain.update(pretraining_tp=1),
}


@pytest.mark.parametrize("what", SAME)
def test_what_a_configuration_says_besides_the_model_does_not_count(
    what: str, folder: Path
) -> None:
    before = mark(folder)
    edit(folder, SAME[what])
    assert mark(folder) == before == fingerprint_of(folder)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_split_over_files_does_not_count(reverse: bool, folder: Path) -> None:
    before = mark(folder)
    shard(folder, reverse=reverse)
    assert mark(folder) == before


def test_another_configuration_is_named(folder: Path) -> None:
    before = mark(folder)
    edit(folder, lambda plain: plain.update(rms_norm_eps=0.5))
    assert changed_part(before, mark(folder)).startswith("the configuration differs: fingerprint ")


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    one, two = [name for name in tensors if "up_proj" in name or "gate_proj" in name][:2]
    tensors[one], tensors[two] = tensors[two], tensors[one]


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "first": lambda tensors: first(tensors).add_(1),
    "last": lambda tensors: list(tensors.values())[-1].mul_(2),
    "dtype": lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}),
    "two tensors exchanged": renamed,
    "one more": lambda tensors: tensors.update(more=torch.zeros(1)),
}


def first(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(tensors.values())).view(-1)[:1]


@pytest.mark.parametrize("what", CHANGES)
def test_other_weights_are_named(what: str, folder: Path) -> None:
    before, file = mark(folder), folder / "model.safetensors"
    tensors = load_file(file)
    CHANGES[what](tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    assert changed_part(before, mark(folder)).startswith("the weights differ: fingerprint ")


def test_records_of_before_are_refused_with_that_cause(folder: Path) -> None:
    said = changed_part("ab" * 16, mark(folder))
    assert "cannot be compared: one of them was made by an older version of drafttrain" in said


def test_a_key_at_its_default_may_be_missing(folder: Path) -> None:
    before = mark(folder)
    edit(folder, lambda plain: plain.update(attention_bias=False))
    written = mark(folder)
    edit(folder, lambda plain: plain.pop("attention_bias"))
    assert before == written == mark(folder)
