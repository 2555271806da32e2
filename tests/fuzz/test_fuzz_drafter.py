"""Whatever a drafter's directory holds, it is admitted or refused by name, and costs no more."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from fences import FUZZ, Fence, damaged, edited, fence, safetensors
from hypothesis import given
from hypothesis import strategies as st
from published import (
    Published,
    dflash,
    dflash2,
    dspark,
    eagle,
    eagle3,
    faster_decoding,
    medusa,
    mtp,
    p_eagle,
)
from test_read import admitted

from drafttrain.target.model import Target, load_target

__all__ = ["fence"]

pytestmark = pytest.mark.slow


def layouts() -> list[Published]:
    torch.manual_seed(0)
    return [
        dflash(),
        dflash2(),
        dspark(),
        eagle3(),
        eagle3("speculators"),
        dflash("speculators"),
        dspark("speculators"),
        p_eagle("speculators"),
        eagle(),
        medusa("bias"),
        p_eagle(),
        mtp(),
        mtp("qwen", kind="qwen3"),
        faster_decoding(1, "model.safetensors"),
    ]


LAYOUTS = layouts()


@pytest.fixture(scope="session")
def target(tiny_target_dir: Path) -> Target:
    return load_target(model_config(tiny_target_dir), torch.float32, "cpu")


def admit(folder: Path, target: Target) -> None:
    admitted(folder, target, allow_pickle=False)


@FUZZ
@given(data=st.data())
def test_configurations_of_drafters(fence: Fence, target: Target, data: st.DataObject) -> None:
    published = data.draw(st.sampled_from(LAYOUTS))
    folder = published.write(fence.fresh())
    (folder / "config.json").write_bytes(data.draw(damaged(edited(published.config))))
    fence.holds(lambda: admit(folder, target))


@FUZZ
@given(data=st.data())
def test_headers_of_drafters(fence: Fence, target: Target, data: st.DataObject) -> None:
    published = data.draw(st.sampled_from(LAYOUTS))
    folder = published.write(fence.fresh())
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    file.write_bytes(data.draw(safetensors(damaged(edited(header)), content[8 + length :])))
    fence.holds(lambda: admit(folder, target))


@FUZZ
@given(data=st.data())
def test_indexes_of_drafters(fence: Fence, target: Target, data: st.DataObject) -> None:
    published = LAYOUTS[0]
    folder = published.write(fence.fresh())
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    plain: dict[str, Any] = {"metadata": {}, "weight_map": dict.fromkeys(published.tensors, shard)}
    index = folder / "model.safetensors.index.json"
    index.write_bytes(data.draw(damaged(edited(plain))))
    fence.holds(lambda: admit(folder, target))
