"""Whatever lies in a folder in place of a file, nothing hangs and nothing outside is touched.

In place of files and folders there are links to files, to folders, to nothing and to themselves,
links to a device that never ends, pipes, sockets, folders and files.
"""

import os
import shutil
import socket
from contextlib import chdir
from pathlib import Path

import pytest
from builders import model_config
from fences import FUZZ, Fence, fence
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_drafter import LAYOUTS, admit
from test_fuzz_drafter import target as target
from test_fuzz_store import capture_again
from test_fuzz_store import train as read_store
from test_fuzz_store import whole as whole
from test_fuzz_target import check

from drafttrain.core.tokenizer import token_ids
from drafttrain.target.model import Target
from drafttrain.target.pretrained.models import load_generation_config, load_tokenizer

__all__ = ["fence"]

pytestmark = pytest.mark.slow

OUTSIDE = ("victim.txt", "victims", "victim.json", "victim.safetensors")
KINDS = ("link", "link", "link", "device", "nothing", "itself", "pipe", "socket", "folder", "file")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "chat_templates", "vocab.json", "merges.txt"),
    *("tokenizer.model", "tekken.json", "generation_config.json", "processor_config.json"),
)


def misplace(data: st.DataObject, folder: Path, more: tuple[str, ...], links: bool = True) -> None:
    """Put something else in place of up to three files or folders below `folder`.

    more: names that may be there besides those that are. links: out of the folder too.
    """
    there = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))]
    for name in data.draw(st.lists(st.sampled_from([*there, *more]), min_size=1, max_size=3)):
        path = folder / name
        if any(
            parent.is_symlink() or not parent.is_dir()
            for parent in path.parents
            if parent.exists() or parent.is_symlink()
        ):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        kind = data.draw(st.sampled_from(KINDS[0 if links else 3 :]))
        up = "../" * len(path.relative_to(folder).parts)
        if kind == "link":
            path.symlink_to(up + data.draw(st.sampled_from(OUTSIDE)))
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as bound, chdir(path.parent):
                bound.bind(path.name)
        elif kind == "folder":
            (path / "inner").mkdir(parents=True)
        elif kind == "file":
            path.write_text("{}")
        else:
            to = {"device": "/dev/zero", "nothing": "absent", "itself": path.name}
            path.symlink_to(to[kind])


@FUZZ
@given(data=st.data())
def test_stores(fence: Fence, whole: Path, target: Target, data: st.DataObject) -> None:
    folder = fence.fresh()
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    misplace(data, folder, ("journal-0.jsonl", "shard-00007.safetensors", "capture.log"))
    fence.holds(lambda: read_store(folder))
    fence.holds(lambda: capture_again(folder, target))


@FUZZ
@given(data=st.data())
def test_models(fence: Fence, tiny_target_dir: Path, data: st.DataObject) -> None:
    folder = fence.fresh()
    shutil.copytree(tiny_target_dir, folder, dirs_exist_ok=True)
    more = (*TOKENIZER, "adapter_config.json", "model.safetensors.index.json", "a.gguf")
    misplace(data, folder, more, links=False)  # the Hub's cache is made of links out of it
    config = model_config(folder)
    fence.holds(lambda: check(folder))
    fence.holds(lambda: load_generation_config(config))
    fence.holds(lambda: token_ids(load_tokenizer(config), "Hi"))


@FUZZ
@given(data=st.data())
def test_drafters(fence: Fence, target: Target, data: st.DataObject) -> None:
    folder = data.draw(st.sampled_from(LAYOUTS)).write(fence.fresh())
    more = ("model.safetensors.index.json", "pytorch_model.bin", "config.yaml", "a.safetensors")
    misplace(data, folder, more, links=False)
    fence.holds(lambda: admit(folder, target))
