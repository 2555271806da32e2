"""Whatever the bytes of a GGUF file are, it is read or refused in one line, and in time."""

import shutil
import time

import pytest
from fences import FUZZ
from gguf_files import tiny_model, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.runtime.disk import MachineError
from drafttrain.target.pretrained import gguf

pytestmark = pytest.mark.slow
pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model()).read_bytes()


@FUZZ
@given(data=st.data())
def test_changed_bytes(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    changed = bytearray(content)
    header = content.index(b"tokenizer.chat_template") + 400
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, header))
        new = data.draw(st.binary(min_size=1, max_size=8))
        changed[at : at + len(new)] = new
    if data.draw(st.booleans()):
        changed = changed[: data.draw(st.integers(0, len(changed)))]
    file = folder / "fuzzed.gguf"
    file.write_bytes(changed)
    started = time.monotonic()
    refused = ""
    try:
        gguf.write_directory(
            file, folder / "out", "model.path=fuzzed.gguf", weights=data.draw(st.booleans())
        )
    except MachineError:
        raise
    except ValueError as error:
        refused = str(error)
    finally:
        shutil.rmtree(folder)
    assert not refused or "fuzzed.gguf" in refused
    assert time.monotonic() - started < 60
