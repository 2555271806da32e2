"""What is printed is text: of its markup nothing is obeyed, nor of its control characters."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from drafttrain.runtime import terminal
from drafttrain.runtime.terminal import progress

OTHERS = "[/x] [red]role[/red] :smile: \x1b[31m\x07 ends\x9b"
SHOWN = "[/x] [red]role[/red] :smile: \\x1b[31m ends\\x9b"


def test_what_others_wrote_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.console.print(OTHERS)
    assert capsys.readouterr().out == f"{SHOWN}\n"


def test_nor_is_it_obeyed_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=OTHERS)
    table.add_column(OTHERS)
    table.add_row(OTHERS)
    table.add_row(Text(OTHERS))
    terminal.console.print(table)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\x9b" not in said
    assert said.count("[red]role[/red] :smile:") == 4


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nor_beside_a_progress_bar(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_terminal:
        screen = io.StringIO()
        console = terminal.Terminal(width=300)
        console.file, console._force_terminal = screen, True
        monkeypatch.setattr(terminal, "console", console)
    with progress(OTHERS, 2) as tick:
        tick(2, OTHERS)
    said = screen.getvalue() if is_terminal else capsys.readouterr().out
    assert "[/x] [red]role[/red] :smile: \\x1b[31m" in said
    assert "\x07" not in said


def test_every_console_is_of_that_kind() -> None:
    package = Path(terminal.__file__).parent
    made = [file.name for file in package.rglob("*.py") if "Console(" in file.read_text()]
    assert made == []


def test_colours_that_are_asked_for_move_no_bar_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(terminal, "console", terminal.Terminal())
    with progress("train", 2) as tick:
        tick(2)
    assert capsys.readouterr().out == "train 2/2 0:00 left 0:00\n"
    terminal.console.print(Text("red", style="red"))
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m\n"


class Clock:
    """The time, which passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_the_time_left_forgets_slow_first_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    told = []
    with progress("train", 100) as tick:
        for seconds in (60.0, *[10.0] * 20):  # it compiles first
            clock.now += seconds
            tick()
            told.append(capsys.readouterr().out)
    assert told[0] == "train 1/100 1:00 left -:--\n"
    assert told[1] == "train 2/100 1:10 left 16:20\n"
    assert told[-1] == "train 21/100 4:20 left 13:10\n"


def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal that takes what is printed."""
    monkeypatch.setenv("TERM", "xterm")
    console = terminal.Terminal(width=300)
    console.file, console._force_terminal, console.is_interactive = io.StringIO(), True, True
    monkeypatch.setattr(terminal, "console", console)
    return console.file


def test_a_bar_shows_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = screen(monkeypatch), Clock(monkeypatch)
    with progress("train", 10) as tick:
        for seconds in (60.0, 2.0, 2.0):
            clock.now += seconds
            tick()
        tick(0, "validating 3/16")
    assert re.search(r"3/10.* left .*0:14.*validating 3/16", shown.getvalue())


def test_what_has_no_units_says_now_and_then_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.05)
    with terminal.working("loading [red]\x1b"):
        pass
    assert capsys.readouterr().out == ""
    with terminal.working("loading [red]\x1b"), terminal.working("a part of it"):
        time.sleep(0.3)
    assert set(capsys.readouterr().out.splitlines()) == {"loading [red]\\x1b 0:00"}
    time.sleep(0.2)
    assert capsys.readouterr().out == ""
    shown = screen(monkeypatch)
    with terminal.working("loading [red]"), terminal.working("a part of it"):
        pass
    assert "a part of it" not in shown.getvalue()
    assert "loading [red] 0:00:00" in shown.getvalue()
    shown.seek(0)
    shown.truncate()
    monkeypatch.setenv("RANK", "1")
    with terminal.working("loading"):
        pass
    assert shown.getvalue() == ""


class Tee:
    """What log libraries put in the place of stdout: it can write, and no more."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


@pytest.mark.parametrize("colors", ["", "1"])
def test_stdout_may_be_an_object_that_only_writes_or_a_closed_file(
    colors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", colors)
    closed, tee = io.StringIO(), Tee()
    closed.close()
    for stdout in (closed, tee):
        monkeypatch.setattr("sys.stdout", stdout)
        assert not terminal.Terminal().is_terminal
    terminal.Terminal().print("hello")
    assert tee.text == "hello\n"
