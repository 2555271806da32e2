"""What is no model as Transformers reads it is named: a LoRA adapter, a torn GGUF file."""

import json
import shutil
from pathlib import Path

import pytest
from builders import model_config

from drafttrain.__main__ import main
from drafttrain.target.pretrained.models import load_model_config


def lora(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"base_model_name_or_path": "ada/base-8b", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    return folder


def gguf(file: Path) -> Path:
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    return file


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("kind", ["lora", "lora beside", "file", "file of any name", "folder"])
def test_it_is_named_by_plan_as_by_train(
    command: str,
    kind: str,
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, said = tmp_path / "model", "must begin with the header of a GGUF file"
    if kind == "lora":
        lora(path)
        said = "holds an adapter alone, such as LoRA's (adapter_config.json), for ada/base-8b"
    elif kind == "lora beside":
        shutil.copytree(tiny_target_dir, path)
        lora(path)
        said = "holds an adapter beside a model (adapter_config.json), for ada/base-8b"
    elif kind == "file":
        path = gguf(tmp_path / "model-q4.gguf")
    elif kind == "file of any name":
        gguf(path)
    else:
        path.mkdir()
        gguf(path / "model-q4.gguf")
    place = "plan.dir" if command == "plan" else "run.dir"
    assert main([command, f"model.path={path}", f"{place}={tmp_path / 'out'}"]) != 0
    got = capsys.readouterr()
    assert f"model.path={path}" in got.err + got.out
    assert said in got.err + got.out
    assert "Errno" not in got.err + got.out


def test_a_model_beside_gguf_files_is_read(tiny_target_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_target_dir, tmp_path / "model")
    gguf(tmp_path / "model" / "q4.gguf")
    assert load_model_config(model_config(tmp_path / "model")).model_type
