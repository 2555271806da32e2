"""A target's directory of someone else's names its own files only, and costs what it needs."""

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from safetensors.torch import load_file, save_file

from drafttrain.target.model import load_target
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.models import load_model_config
from drafttrain.target.served import load_ends


@pytest.fixture
def folder(tiny_target_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    shutil.copy(tiny_target_dir / "model.safetensors", tmp_path / "outside.safetensors")
    return tmp_path / "target"


def load(folder: Path) -> Any:
    return load_target(model_config(folder), torch.float32, "cpu").model


def change(file: Path, **changes: Any) -> None:
    plain = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**plain, **changes}))


def index(folder: Path, shard: object) -> None:
    """Name `shard` for every tensor, in place of the weights."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = load_file(folder / "model-00001-of-00001.safetensors")
    plain = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(plain))


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/", "sub/../x.safetensors", "config.json", "a.bin", 7, None],
)
def test_an_index_names_safetensors_beside_it(shard: object, folder: Path) -> None:
    index(folder, str(folder.parent / "outside.safetensors") if shard == "/" else shard)
    with pytest.raises(
        ValueError, match=r"model\.safetensors\.index\.json: .*weight_map"
    ) as caught:
        load(folder)
    assert str(caught.value).isprintable()


def test_an_index_of_links_into_a_cache_is_followed(folder: Path) -> None:
    """The control, and the layout of the Hub's cache: files are links to blobs elsewhere."""
    index(folder, "model-00001-of-00001.safetensors")
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(blobs / str(number))
    assert load(folder).config.vocab_size == 97
    assert files.fingerprint(folder)


def test_one_file_is_taken_before_shards_as_transformers_takes_it(folder: Path) -> None:
    """What is checked and hashed must be what is loaded."""
    index(folder, "model-00001-of-00001.safetensors")
    shutil.copy(folder / "model-00001-of-00001.safetensors", folder / "model.safetensors")
    assert [file.name for file in files.weight_files(folder)] == ["model.safetensors"]


def with_adapter(folder: Path) -> None:
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    change(folder / "adapter_config.json", base_model_name_or_path=str(other), peft_type="LORA")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter of a model elsewhere": (with_adapter, r"holds an adapter beside a model"),
    "other weights": (
        lambda folder: change(folder / "config.json", transformers_weights="x.safetensors"),
        r"transformers_weights"),
    "code of the Hub": (
        lambda folder: change(folder / "config.json", attn_implementation="someone/kernel"),
        r"must not name code of the Hub, got attn_implementation=someone/kernel"),
    "a list for a configuration": (
        lambda folder: (folder / "config.json").write_text("[1]"), r"config\.json must hold an "),
    "a deep configuration": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000), r"config\.json must be"),
    "a list for a kind": (
        lambda folder: change(folder / "config.json", model_type=[]), r"model_type must be a text"),
    "an object for a dtype": (
        lambda folder: change(folder / "config.json", dtype={"a": "float32"}), r"model can be"),
    "more layers than tensors": (
        lambda folder: change(folder / "config.json", num_hidden_layers=1000),
        r"declares 1,000 layers; the files hold 39 tensors"),
    "a deep tokenizer's configuration": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"a":' * 100_000),
        r"tokenizer_config\.json must be"),
    "a deep generation's configuration": (
        lambda folder: (folder / "generation_config.json").write_text("[" * 100_000),
        r"generation_config\.json must be"),
    "a generation's configuration of other arguments": (
        lambda folder: (folder / "generation_config.json").write_text('{"self": 1}'),
        r"^model\.path=.*generation_config\.json cannot be used"),
    "a tokenizer of nothing": (
        lambda folder: (folder / "tokenizer.json").write_text("[]"), r"tokenizer cannot be loaded"),
    "a deep index": (
        lambda folder: ((folder / "model.safetensors").unlink(), (
            folder / "model.safetensors.index.json").write_text("[" * 100_000)),
        r"index\.json must be valid JSON|index\.json: Invalid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_directory_must_not_say_is_one_line(name: str, folder: Path) -> None:
    do, said = WRONG[name]
    do(folder)
    with pytest.raises(ValueError, match=said) as caught:
        load(folder)
    assert str(caught.value).isprintable()


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path, capfd: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight is \[31\] instead of \[32\] \(1\)"):
        load(folder)
    assert capfd.readouterr() == ("", "")


def test_what_is_missing_is_named_beside_what_is_there_instead(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.nrom.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"missing: model\.embed_tokens\.weight.*unknown: model\.nro"
    ):
        load(folder)


def test_no_more_is_allocated_than_the_files_can_fill(folder: Path) -> None:
    """Declared: 150 GB of embeddings; on the disk: 97 rows."""
    change(folder / "config.json", vocab_size=2_000_000, hidden_size=8192)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"must fit config\.json; of another shape"):
            load(folder)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [4 << 30, 2**63])
def test_a_header_that_promises_gigabytes_is_not_read(length: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", length))
        os.truncate(stream.fileno(), 5 << 30)  # sparse: it takes no room
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"no safetensors file: its header cannot be read"):
            load(folder)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_a_small_shard_beside_large_ones_has_a_fingerprint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(folder, "model-00001-of-00001.safetensors")
    save_file({"x": torch.ones(3)}, folder / "model-00002-of-00002.safetensors")
    plain = json.loads((folder / "model.safetensors.index.json").read_text())
    plain["weight_map"]["x"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(plain))
    monkeypatch.setattr(files, "HASHED_WHOLE_BYTES", 1000)
    before = files.fingerprint(folder)
    save_file({"x": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    assert files.fingerprint(folder) != before


def test_the_ends_alone_are_loaded_under_the_same_terms(folder: Path) -> None:
    change(folder / "config.json", transformers_weights="x.safetensors")
    config = model_config(folder)
    with pytest.raises(ValueError, match="transformers_weights"):
        load_ends(config, load_model_config(config), torch.float32, "cpu")
