"""A GGUF file as a target: what Transformers makes of it, and the errors for damaged ones."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from builders import model_config
from gguf_files import tiny_model, write_gguf
from transformers import AutoModelForCausalLM

from drafttrain.__main__ import main
from drafttrain.target.pretrained import gguf, models

gguf_package = pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.Q8_0.gguf", tiny_model(), "Q8_0")


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


def test_unquantised_weights_are_those_of_the_model(tmp_path: Path) -> None:
    model = tiny_model()
    config = model_config(write_gguf(tmp_path / "tiny.gguf", model))
    loaded = models.load_model(config, models.load_model_config(config), torch.float32, "cpu")
    theirs = dict(model.named_parameters())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, theirs[name]), name


def test_a_directory_with_the_file_is_the_same_target(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(file, tmp_path / "model")
    places = [file, tmp_path / "model"]
    made = {models.fingerprint(model_config(at), torch.float32, "cpu") for at in places}
    (fingerprint,) = made
    assert fingerprint.split("-")[1].startswith("gguf")


def test_it_is_written_once_and_anew_for_other_content(file: Path, cache: Path) -> None:
    first = models.find(model_config(file), weights=False)
    assert first is not None
    assert not (first / "model.safetensors").exists()  # no weight is needed for a plan
    whole = models.find(model_config(file), weights=True)
    assert whole == first
    written = (whole / "model.safetensors").stat().st_mtime_ns
    assert models.find(model_config(file), weights=True) == first
    assert (whole / "model.safetensors").stat().st_mtime_ns == written
    write_gguf(file, tiny_model(seed=1), "Q8_0")
    assert models.find(model_config(file), weights=True) != first


def test_the_tokenizer_and_its_template_come_from_the_file(file: Path) -> None:
    tokenizer = models.load_tokenizer(model_config(file))
    assert tokenizer.eos_token == "<|end|>"
    turn = [{"role": "user", "content": "a"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>a<|end|><|assistant|>"


def test_a_tokenizer_beside_the_file_comes_first(
    file: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "beside"
    folder.mkdir()
    shutil.copy(file, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target_dir / name, folder)
    theirs = models.load_tokenizer(model_config(tiny_target_dir))
    assert models.load_tokenizer(model_config(folder)).get_vocab() == theirs.get_vocab()


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", f"model.path={path}", f"plan.dir={path.parent / 'plan'}"]) != 0
    got = capsys.readouterr()
    lines = [line for line in (got.err + got.out).splitlines() if line.startswith("error")]
    assert len(lines) == 1, got
    assert f"model.path={path}" in lines[0]
    return lines[0]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.999])
def test_a_half_downloaded_file_is_named(
    share: float, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert "download it again" in refusal(file, capsys)


def test_a_file_without_a_tokenizer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(), tokenizer=False)
    assert "a model and a tokenizer" in refusal(file, capsys)


def test_an_architecture_that_transformers_does_not_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(), architecture="rwkv6")
    assert "rwkv6" in refusal(file, capsys)


def test_a_part_of_several_files_and_several_files_are_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "tiny-00001-of-00002.gguf"
    shutil.copy(file, part)
    assert "--merge" in refusal(part, capsys)
    (tmp_path / "both").mkdir()
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(file, tmp_path / "both" / name)
    assert "a.gguf, b.gguf" in refusal(tmp_path / "both", capsys)


def test_a_header_with_absurd_counts_ends_at_once(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(file.read_bytes())
    content[8:24] = b"\xff" * 16
    file.write_bytes(content)
    assert "header" in refusal(file, capsys)


def test_without_the_package_the_extra_is_named(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else find(name, *a)
    )
    assert "drafttrain[gguf]" in refusal(file, capsys)


def test_the_script_writes_what_is_loaded(file: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    try:
        import dequantize
    finally:
        sys.path.pop(0)
    out = tmp_path / "written"
    argv, sys.argv = sys.argv, ["dequantize.py", str(file), str(out)]
    try:
        assert dequantize.main() == 0
        assert dequantize.main() == 2  # it exists now
    finally:
        sys.argv = argv
    loaded = models.find(model_config(file), weights=True)
    assert loaded is not None
    assert torch.equal(logits_of(out), logits_of(loaded))
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
