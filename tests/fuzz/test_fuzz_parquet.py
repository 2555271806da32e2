"""Whatever a parquet file holds, or is damaged in, its rows are read or skipped by name."""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import fences
import pyarrow
import pyarrow.parquet
import pytest
from fences import FUZZ, Fence, damaged, fence
from hypothesis import given
from hypothesis import strategies as st
from test_conversations import jsonl

from drafttrain.data import files
from drafttrain.data.conversations import read

__all__ = ["fence"]

pytestmark = pytest.mark.slow

TURN = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
TURNS = st.sampled_from(([*TURN], [*TURN, *TURN], [], [{"role": 3, "content": None}]))
VALUES = st.one_of(
    *(TURNS, st.none(), st.booleans(), st.text(max_size=9), st.binary(max_size=9)),
    *(st.integers(-(2**63), 2**63 - 1), st.floats(), st.datetimes(), st.dates(), st.times()),
    *(st.decimals(-99, 99, places=2), st.timedeltas(), st.lists(st.integers(0, 9), max_size=3)),
)
NAMES = st.sampled_from(
    ("messages", "conversations", "prompt", "completion", "text", "input", "id", "", "a.b", "é\n")
)


@st.composite
def columns(draw: st.DrawFn, rows: int) -> Any:
    """Draw a column of one type, or None where Arrow knows no type for its values."""
    value = draw(VALUES)
    values = [
        value if draw(st.booleans()) else draw(st.none() | st.just(value)) for _ in range(rows)
    ]
    if draw(st.integers(0, 9)) == 0:  # one text, named as often as the file has rows
        text = pyarrow.array(["a" * 100_000])
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), text)
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
        return None


@st.composite
def parquet(draw: st.DrawFn) -> bytes:
    """Draw a parquet file; half of them damaged: anywhere, in the footer, or in its length."""
    rows = draw(st.sampled_from((0, 1, 3, 40)))
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    drawn = {name: draw(columns(rows)) for name in names}
    table = pyarrow.table({name: found for name, found in drawn.items() if found is not None})
    out = BytesIO()
    compression = draw(st.sampled_from(("none", "snappy", "zstd", "gzip")))
    try:
        pyarrow.parquet.write_table(table, out, compression=compression, row_group_size=7)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, ValueError):
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), out)
    content = out.getvalue()
    kind = draw(st.sampled_from(("anywhere", "footer", "length")))
    if kind == "anywhere":
        return draw(damaged(st.just(content)))
    size = int.from_bytes(content[-8:-4], "little")
    begin, footer = content[: -8 - size], content[-8 - size : -8]
    if kind == "footer":
        footer = draw(damaged(st.just(footer)))
        return begin + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    length = draw(st.sampled_from((0, 1, size - 1, size + 1, 2**31, 2**32 - 1)))
    return begin + footer + length.to_bytes(4, "little") + b"PAR1"


class Forked:
    """A fork in place of the reader's process: it runs the same file, and imports nothing anew."""

    returncode: int | None = None

    def __init__(self, command: list[str], **_: Any) -> None:
        (out, to), (err, to_err) = os.pipe(), os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(command[-2:], to, to_err)
        os.close(to)
        os.close(to_err)
        self.stdout, self.stderr = os.fdopen(out, "rb"), os.fdopen(err, "rb")

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run(command: list[str], out: int, err: int) -> None:
    """Be the process of a command, which ends here."""
    code: Any = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(code)


@contextmanager
def forks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.subprocess, "Popen", Forked)
        patch.setattr("fences.STARTS", tuple({*fences.STARTS} - {"os.fork"}))
        patch.setattr(files, "SMALL", 1 << 20)
        yield


@FUZZ
@given(content=parquet(), template=st.sampled_from(("chat", "none")))
def test_parquet(fence: Fence, content: bytes, template: str) -> None:
    file = fence.fresh() / "a.parquet"
    file.write_bytes(content)
    with forks():
        fence.holds(lambda: read(jsonl(str(file), template=template)))
