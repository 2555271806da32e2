"""Whatever a target's directory says of its files and settings, it is read or refused in a line."""

import json
import shutil
from pathlib import Path

import pytest
from builders import model_config
from fences import FUZZ, Fence, damaged, edited, fence, safetensors
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.fit import require_fit
from drafttrain.target.pretrained.models import find, load_model_config

__all__ = ["fence"]

pytestmark = pytest.mark.slow

SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json")


def copied(tiny_target_dir: Path, fence: Fence) -> Path:
    folder = fence.fresh()
    shutil.copytree(tiny_target_dir, folder, dirs_exist_ok=True)
    return folder


def check(folder: Path) -> None:
    """What is asked of a directory before Transformers loads a weight of it."""
    config = model_config(folder)
    find(config, weights=True)
    weights = files.weight_files(folder)
    require_fit(config.origin, weights, load_model_config(config), code=False)
    files.fingerprint(folder)


@FUZZ
@given(data=st.data())
def test_configurations(fence: Fence, tiny_target_dir: Path, data: st.DataObject) -> None:
    folder = copied(tiny_target_dir, fence)
    file = folder / data.draw(st.sampled_from((*SETTINGS[:1], *SETTINGS)))
    plain = json.loads(file.read_text()) if file.exists() else {"a": [1]}
    file.write_bytes(data.draw(damaged(edited(plain))))
    fence.holds(lambda: check(folder))


@FUZZ
@given(data=st.data())
def test_headers(fence: Fence, tiny_target_dir: Path, data: st.DataObject) -> None:
    folder = copied(tiny_target_dir, fence)
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    changed = data.draw(safetensors(damaged(edited(header)), content[8 + length :]))
    (folder / "model.safetensors").write_bytes(changed)
    fence.holds(lambda: check(folder))


@FUZZ
@given(data=st.data())
def test_indexes(fence: Fence, tiny_target_dir: Path, data: st.DataObject) -> None:
    folder = copied(tiny_target_dir, fence)
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    names = files.tensors_in(folder / shard, "here")
    plain = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    index = folder / "model.safetensors.index.json"
    index.write_bytes(data.draw(damaged(edited(plain))))
    fence.holds(lambda: check(folder))
