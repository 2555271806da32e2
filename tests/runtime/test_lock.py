"""One command at a time: it is told who holds a place; the dead hold nothing."""

import errno
import fcntl
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from drafttrain.runtime.disk import DiskError
from drafttrain.runtime.lock import HeldError, alone, attend, beside, hold, holder_of, require_free


def silent(line: str) -> None:
    raise AssertionError(f"there is nothing to say, but: {line}")


def forked(do: Callable[[], None]) -> int:
    """Do something in a fork; its exit code is 0 if that raised nothing."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        do()
        code = 0
    except HeldError:
        code = 3
    finally:
        os._exit(code)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@contextmanager
def beside_another(holding: Callable[[], Any]) -> Iterator[int]:
    """Give the process of a fork that holds something, until it is killed with -9."""
    ready, tell = os.pipe()

    def stay() -> None:
        with holding():
            os.write(tell, b"x")
            time.sleep(60)

    child = forked(stay)
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            ended(child)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    ended(process)


def test_who_holds_a_place_is_said_in_one_line(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with beside_another(lambda: hold(place, "run.dir", "train", silent)) as other:
        with (
            pytest.raises(HeldError) as refused,
            hold(place, "run.dir", "train", silent, patience=0.2),
        ):
            pass
        with pytest.raises(HeldError, match=str(refused.value)[:60]):
            require_free(place, "run.dir", patience=0.0)
        assert holder_of(place) is not None
    said = str(refused.value)
    assert said.startswith(
        f"run.dir must name a place that no other command writes, got {place}, which is held by "
        f"train (process {other} on this machine, since 2"
    )
    assert said.endswith("UTC); wait for it to end, or name another place")
    assert "\n" not in said


def test_a_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    with hold(tmp_path / "a" / "b", "compare.dir", "compare", silent):
        assert (tmp_path / "a" / "b" / ".lock").is_file()
    assert not (tmp_path / "a" / "b").exists()
    with hold(tmp_path / "run", "run.dir", "train", silent):
        (tmp_path / "run" / "config.yaml").write_text("")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]
    export = tmp_path / "run" / "export"
    with hold(export, "export.dir", "export", silent, file=beside(export)):
        assert (tmp_path / "run" / ".export.lock").is_file()
        assert not export.exists()
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]
    require_free(tmp_path / "none", "run.dir")
    assert not (tmp_path / "none").exists()


def test_a_process_killed_with_9_holds_nothing_though_its_children_live_on(tmp_path: Path) -> None:
    numbers = tmp_path / "children"

    @contextmanager
    def with_children() -> Iterator[None]:
        with hold(tmp_path, "run.dir", "train", silent):
            program = subprocess.Popen(["sleep", "60"])
            fork = forked(lambda: time.sleep(60))
            numbers.write_text(f"{program.pid} {fork}")
            yield

    with beside_another(with_children) as other:
        children = [int(number) for number in numbers.read_text().split()]
        kill(other)
        for child in children:
            os.kill(child, 0)  # lives
        with hold(tmp_path, "run.dir", "train", silent, patience=0.0):
            pass
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_fork_that_leaves_the_block_lets_nothing_go(tmp_path: Path) -> None:
    with hold(tmp_path, "run.dir", "train", silent):
        stack = ExitStack()
        stack.enter_context(hold(tmp_path / "store", "store.dir", "capture", silent))
        assert ended(forked(stack.close)) == 0
        assert (tmp_path / "store" / ".lock").is_file()
        held = lambda: require_free(tmp_path / "store", "store.dir", patience=0.0)  # noqa: E731
        assert ended(forked(held)) == 3
        stack.close()


def test_of_many_that_want_a_place_one_at_a_time_has_it(tmp_path: Path) -> None:
    place, count = tmp_path / "place", tmp_path / "count"
    count.write_text("0")

    def add() -> None:
        for _ in range(20):
            with hold(place, "run.dir", "train", lambda line: None, patience=math.inf):
                number = int(count.read_text())
                time.sleep(0.001)
                count.write_text(str(number + 1))

    children = [forked(add) for _ in range(4)]
    assert [ended(child) for child in children] == [0] * 4
    assert count.read_text() == "80"


def test_rows_that_several_processes_add_to_one_file_are_all_there(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.write_text("")

    def add() -> None:
        for _ in range(50):
            with alone(rows):
                rows.write_text(rows.read_text() + "x")

    children = [forked(add) for _ in range(4)]
    assert [ended(child) for child in children] == [0] * 4
    assert rows.read_text() == "x" * 200
    assert [file.name for file in tmp_path.iterdir()] == ["rows"]


def test_who_waits_says_for_whom_and_goes_on_when_the_other_ends(tmp_path: Path) -> None:
    said = []
    with beside_another(lambda: hold(tmp_path, "data.cache_dir", "selfgen", silent)) as other:

        def say(line: str) -> None:
            said.append(line)
            kill(other)

        with hold(tmp_path, "data.cache_dir", "selfgen", say, patience=math.inf):
            pass
    assert len(said) == 1
    assert said[0].startswith(f"waiting for selfgen (process {other} on this machine, since ")
    assert said[0].endswith(f"which writes {tmp_path}")


def test_a_run_is_held_until_its_last_rank_has_ended(tmp_path: Path) -> None:
    with (
        beside_another(lambda: hold(tmp_path, "run.dir", "train", silent)) as first,
        beside_another(lambda: attend(tmp_path, 1)) as second,
    ):
        kill(first)
        with (
            pytest.raises(HeldError, match="held by the ranks of a run that is ending; wait"),
            hold(tmp_path, "run.dir", "train", silent, patience=0.2),
        ):
            pass
        kill(second)
        with hold(tmp_path, "run.dir", "train", silent, patience=0.0), attend(tmp_path, 1):
            assert (tmp_path / ".lock.rank1").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_a_lock_is_refused_and_what_it_names_stays(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "store"
    victim.write_text("precious")
    place.mkdir()
    for link in (os.symlink, os.link):
        link(victim, place / ".lock")
        with (
            pytest.raises(ValueError, match=r"^store\.dir=.*/store could not be written: "),
            hold(place, "store.dir", "capture", silent),
        ):
            pass
        (place / ".lock").unlink()
    assert victim.read_text() == "precious"


def test_what_a_stranger_wrote_into_a_lock_is_not_obeyed(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"command": "\\u001b[2J", "process": "1"}' + "[" * 9999)
    with open(tmp_path / ".lock", "rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        assert holder_of(tmp_path) == "another command"
    with hold(tmp_path, "run.dir", "train", silent):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with (
        pytest.raises(DiskError, match=rf"run\.dir=.* written: {os.strerror(number)}"),
        hold(tmp_path, "run.dir", "train", silent),
    ):
        pass
    require_free(tmp_path, "run.dir")
