"""Whatever a store's manifest, journal or tensors say, it is read or refused, and no more."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from fences import FUZZ, Fence, damaged, edited, fence, safetensors
from hypothesis import given
from hypothesis import strategies as st
from test_capture import ALONE, EVERYTHING, RECORD, settings
from test_training import random_samples

from drafttrain.data.batches import collate
from drafttrain.runtime.disk import digest_of
from drafttrain.runtime.signals import StopRequest
from drafttrain.target.model import Target, load_target
from drafttrain.target.store.capture import capture, prepare
from drafttrain.target.store.features import StoredTarget

__all__ = ["fence"]

pytestmark = pytest.mark.slow

SAMPLES = random_samples()[:6]  # of some three shards


@pytest.fixture(scope="session")
def target(tiny_target_dir: Path) -> Target:
    return load_target(model_config(tiny_target_dir), torch.float32, "cpu")


@pytest.fixture(scope="session")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    config = settings(folder)
    say: Any = list[str]().append
    capture(
        target, SAMPLES, EVERYTHING, config, template="of a template", record=RECORD, micro_batch=4,
        ranks=ALONE, stop=StopRequest(), say=say,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def plain(whole: Path) -> dict[str, Any]:
    return json.loads((whole / "manifest.json").read_text())


def sign(manifest: dict[str, Any]) -> None:
    manifest["fingerprint"] = digest_of(manifest["settings"])[:32]


def copied(whole: Path, fence: Fence) -> Path:
    folder = fence.fresh()
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    return folder


def train(folder: Path) -> None:
    store = StoredTarget(folder, torch.float32, torch.device("cpu"), False)
    store.read(collate(store.samples), (1, 2))


def capture_again(folder: Path, target: Target) -> None:
    rows = [len(sample.tokens) for sample in SAMPLES]
    say: Any = list[str]().append
    prepare(
        folder, target, SAMPLES, rows, EVERYTHING, settings(folder), "of a template", RECORD, say
    )


@FUZZ
@given(data=st.data())
def test_manifests(fence: Fence, whole: Path, plain: dict[str, Any], data: st.DataObject) -> None:
    folder = copied(whole, fence)
    content = data.draw(damaged(edited(plain, sign=sign)))
    (folder / "manifest.json").write_bytes(content)
    fence.holds(lambda: train(folder))


@FUZZ
@given(data=st.data())
def test_manifests_and_journals_of_a_capture_that_goes_on(
    fence: Fence, whole: Path, plain: dict[str, Any], target: Target, data: st.DataObject
) -> None:
    folder = copied(whole, fence)
    shards = plain["shards"]
    cut = plain | {"complete": False, "shards": shards[:2]}
    (folder / "manifest.json").write_bytes(data.draw(edited(cut, most=1, sign=sign)))
    lines = st.lists(st.sampled_from(shards).flatmap(edited), max_size=3).map(b"\n".join)
    (folder / "journal-0.jsonl").write_bytes(data.draw(damaged(lines)) + b"\n")
    fence.holds(lambda: capture_again(folder, target))


@FUZZ
@given(data=st.data())
def test_safetensors_of_a_store(
    fence: Fence, whole: Path, plain: dict[str, Any], data: st.DataObject
) -> None:
    """Any of its files with another header, and a manifest that vouches for it."""
    folder = copied(whole, fence)
    manifest = json.loads(json.dumps(plain))
    records = {
        "conversations.safetensors": manifest["conversations"],
        "readout.safetensors": manifest["readout"]["file"],
        "shard-00000.safetensors": manifest["shards"][0],
    }
    name = data.draw(st.sampled_from(sorted(records)))
    file = folder / name
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    changed = data.draw(safetensors(edited(header), content[8 + length :]))
    file.write_bytes(changed)
    records[name] |= {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    fence.holds(lambda: train(folder))
