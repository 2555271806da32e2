"""A drafter's directory of someone else's names its own files only, and costs what it needs."""

import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from published import Published, eagle, eagle3, edited, faster_decoding, medusa
from safetensors.torch import save_file
from test_read import admitted

from drafttrain.formats.read.folder import open_folder
from drafttrain.target.model import Target


@contextmanager
def within_memory(most: int) -> Iterator[None]:
    """Assert that no more than this was resident at any instant, what is mapped included."""
    if not sys.platform.startswith("linux"):
        yield
        return
    Path("/proc/self/clear_refs").write_text("5")  # the peak, begun anew
    before = _status("VmRSS")
    yield
    assert _status("VmHWM") - before < most


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) << 10


def refused(folder: Path, target: Target, said: str, allow_pickle: bool = False) -> None:
    with (
        within_memory(256 << 20),
        pytest.raises(ValueError, match=said) as caught,
    ):
        admitted(folder, target, allow_pickle=allow_pickle)
    assert str(caught.value).isprintable()


def index(folder: Path, name: str, shards: object) -> None:
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": shards}))


def test_no_pickle_hides_behind_safetensors_in_an_index(target: Target, tmp_path: Path) -> None:
    folder = eagle3().write(tmp_path / "drafter")
    whole = folder / "model.safetensors"
    whole.rename(folder / "model-00001-of-00002.safetensors")
    torch.save({"x": torch.zeros(1)}, folder / "model-00002-of-00002.bin")
    shards = {"fc.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.bin"}
    index(folder, "model.safetensors", shards)
    refused(folder, target, r"index\.json: its weight_map must name files that end in \.safeten")


@pytest.mark.parametrize("shard", ["../out.safetensors", "/", "a/b.safetensors", 7, "config.json"])
def test_an_index_names_files_beside_it(shard: object, target: Target, tmp_path: Path) -> None:
    folder = eagle3().write(tmp_path / "drafter")
    outside = tmp_path / "out.safetensors"
    (folder / "model.safetensors").rename(outside)
    index(folder, "model.safetensors", {"x": str(outside) if shard == "/" else shard})
    refused(folder, target, r"model\.safetensors\.index\.json: .*weight_map")


def test_a_header_that_promises_gigabytes_is_not_read(target: Target, tmp_path: Path) -> None:
    folder = eagle3().write(tmp_path / "drafter")
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", 4 << 30))
        os.truncate(stream.fileno(), 5 << 30)
    refused(folder, target, r"no safetensors file: its header cannot be read; copy")


@pytest.mark.parametrize("name", ["fc.weight", "unheard.of", "d2t"])
def test_what_does_not_fit_is_refused_before_it_is_read(
    name: str, target: Target, tmp_path: Path
) -> None:
    """A tensor of 4 GiB that takes no room on the disk."""
    published = eagle3()
    folder = published.write(tmp_path / "drafter")
    small = {k: t for k, t in published.tensors.items() if k != name}
    save_file({k: t.contiguous() for k, t in small.items()}, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = len(content) - 8 - length
    kind, size = ("I64", 1 << 29) if name == "d2t" else ("F32", 1 << 30)
    header[name] = {"dtype": kind, "shape": [size], "data_offsets": [end, end + (4 << 30)]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text + content[8 + length :])
        os.truncate(stream.fileno(), 8 + len(text) + end + (4 << 30))
    said = r"d2t must be 40 integers" if name == "d2t" else name.replace(".", r"\.")
    refused(folder, target, said)


VALUES: dict[str, tuple[Callable[[], Published], str]] = {
    "a vocabulary of 8 TB": (
        lambda: edited(eagle3(), draft_vocab_size=10**12),
        r"draft_vocab_size must be at most 97, got 1000000000000"),
    "a target's vocabulary of 8 TB": (
        lambda: edited(eagle3(), vocab_size=10**12), r"vocab_size must be at most 4,000,000"),
    "a width of 8 TB": (
        lambda: edited(eagle(), hidden_size=10**12), r"hidden_size must be at most 1,048,576"),
    "heads that are none": (
        lambda: edited(eagle(), num_key_value_heads="2"),
        r"num_key_value_heads must be an integer of at least 1, got '2'"),
    "true for a number": (
        lambda: edited(eagle(), head_dim=True), r"head_dim must be an integer of at least 1"),
    "negative heads": (
        lambda: edited(eagle(), num_key_value_heads=-2), r"num_key_value_heads must be an integer"),
    "a text for a flag": (
        lambda: edited(eagle3(), norm_before_residual="false"),
        r"norm_before_residual must be true or false, got 'false'"),
    "no number": (
        lambda: edited(eagle3(), rms_norm_eps=float("nan")),
        r"rms_norm_eps must be a finite number above 0, got nan"),
    "endless rotation": (
        lambda: edited(eagle3(), rope_theta=float("inf")), r"rope_theta must be a finite number"),
    "a text for a scaling": (
        lambda: edited(eagle3(), rope_scaling="linear"), r"rope_scaling must be an object"),
    "a scaling by nothing": (
        lambda: edited(eagle3(), rope_scaling={"rope_type": "linear", "factor": 0}),
        r"rope_scaling must hold factor for rope_type linear, got 0"),
    "a list for a type": (
        lambda: edited(eagle3(), model_type=["llama"]), r"model_type must be one of"),
    "many layers": (
        lambda: edited(eagle3(), eagle_aux_hidden_state_layer_ids=list(range(10_000))),
        r"layer_ids must be layers of tiny_test's, got"),
    "heads by the million": (
        lambda: edited(medusa("bias"), num_heads=10**6), r"num_heads must be at most 128"),
    "a text for a scale": (
        lambda: edited(medusa("bias"), logit_scale="x"), r"logit_scale must be a finite number"),
    "a fraction of heads": (
        lambda: edited(faster_decoding(1, "model.safetensors"), medusa_num_heads=1.5),
        r"num_heads must be an integer"),
    "control characters": (
        lambda: edited(eagle(), hidden_act="\x1b[31m\n"), r"hidden_act must be silu, got \\x1b"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_the_configuration_is_refused_by_name(
    name: str, target: Target, tmp_path: Path
) -> None:
    make, said = VALUES[name]
    refused(make().write(tmp_path / "drafter"), target, said)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["list", "object"])
def test_a_deep_configuration_is_one_line(text: str, target: Target, tmp_path: Path) -> None:
    folder = eagle3().write(tmp_path / "drafter")
    (folder / "config.json").write_text(text)
    refused(folder, target, r"config\.json must be valid JSON")


def test_a_header_of_many_small_maps_is_outlined_in_time(tmp_path: Path) -> None:
    """Ten times as many names take about ten times as long."""
    seconds = []
    for count in (4_000, 40_000):
        entries = {
            f"t{i}": {"dtype": "I8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)
        }
        header = json.dumps(entries).encode()
        content = struct.pack("<Q", len(header)) + header + bytes(count)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(content)
        folder = open_folder(tmp_path, False).outline()
        started = time.process_time()
        assert len(folder.tensors()) == count
        seconds.append(time.process_time() - started)
    assert seconds[1] < 40 * seconds[0]


def test_a_pickle_of_strides_is_measured_by_its_shape(target: Target, tmp_path: Path) -> None:
    """A tensor of four bytes whose strides make it 4 TB: allowed pickles are checked alike."""
    folder = eagle3(file="pytorch_model.bin").write(tmp_path / "drafter")
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    tensors["fc.weight"] = torch.zeros(1).as_strided((10**6, 10**6), (0, 0))
    torch.save(tensors, folder / "pytorch_model.bin")
    refused(folder, target, r"fc\.weight \[1000000, 1000000\] instead of", allow_pickle=True)


def test_what_is_only_told_may_be_anything(target: Target, tmp_path: Path) -> None:
    published = edited(eagle3("speculators"), speculators_config={"verifier": ["x"]})
    assert (
        admitted(published.write(tmp_path / "drafter"), target).recognised.layout.kind
        == "speculators_eagle3"
    )


def test_a_cache_of_links_is_read(target: Target, tmp_path: Path) -> None:
    """The control: the Hub's cache is links to blobs elsewhere."""
    folder = eagle3().write(tmp_path / "drafter")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))
    assert "fc.weight" in open_folder(folder, False).names
    admitted(folder, target, allow_pickle=False)
