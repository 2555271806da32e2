"""The fence sees what it must forbid: each control here has to fail."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fences import VICTIM, Fence, OverTheFenceError, edited, fence
from hypothesis import find

__all__ = ["fence"]

pytestmark = pytest.mark.slow


def outside(folder: Path) -> Path:
    return folder.parent / VICTIM


def link_and_read(folder: Path) -> str:
    (folder / "link").symlink_to(outside(folder))
    return (folder / "link").read_text()


def remove_by_descriptor(folder: Path) -> None:
    os.unlink(VICTIM, dir_fd=os.open(folder.parent, os.O_RDONLY))


def refuse_in_two_lines(folder: Path) -> None:
    raise ValueError("first\nsecond")


def spin(folder: Path) -> None:
    started = time.process_time()
    while time.process_time() - started < 5.1:
        pass


BREACHES: dict[str, Callable[[Path], object]] = {
    "reads": lambda folder: outside(folder).read_text(),
    "reads a link": link_and_read,
    "writes": lambda folder: outside(folder).write_text("x"),
    "writes beside": lambda folder: (folder.parent / "new").write_text("x"),
    "writes elsewhere": lambda folder: Path("/tmp/over-the-fence").write_text("x"),
    "removes": lambda folder: outside(folder).unlink(),
    "removes by descriptor": remove_by_descriptor,
    "renames": lambda folder: outside(folder).rename(folder / "x"),
    "runs": lambda folder: subprocess.run(["true"]),
    "shell": lambda folder: os.system("true"),
    "memory": lambda folder: bytearray(2 * 10**9),
    "unforeseen": lambda folder: {}["x"],
    "two lines": refuse_in_two_lines,
    "slow": spin,
}


@pytest.mark.parametrize("name", BREACHES)
def test_no_breach_goes_unseen(fence: Fence, name: str) -> None:
    folder = fence.fresh()
    with pytest.raises((OverTheFenceError, AssertionError, MemoryError, KeyError)):
        fence.holds(lambda: BREACHES[name](folder))
    assert outside(folder).read_text() == "what nobody may touch\n"


def test_what_is_read_past_python_is_seen_too(fence: Fence) -> None:
    from safetensors import safe_open

    folder = fence.fresh()

    def work() -> None:
        with safe_open(folder.parent / "victim.safetensors", "pt") as opened:
            opened.get_tensor("x")

    with pytest.raises(AssertionError):
        fence.holds(work)


def test_a_foreseen_refusal_is_returned(fence: Fence) -> None:
    folder = fence.fresh()

    def work() -> None:
        (folder / "own").write_text("x")
        raise ValueError("it must be so, got otherwise")

    assert "got otherwise" in str(fence.holds(work))


def test_an_edited_value_is_signed_anew() -> None:
    def sign(plain: dict[str, Any]) -> None:
        plain["signed"] = f"signed: {plain['value']!r}"

    def is_so(content: bytes) -> bool:
        with suppress(ValueError, RecursionError, LookupError, TypeError):
            plain = json.loads(content)
            return bool(plain["value"] != 4 and plain["signed"] == f"signed: {plain['value']!r}")
        return False

    find(edited({"value": 4, "signed": "signed: 4"}, sign=sign), is_so)  # else NoSuchExample
