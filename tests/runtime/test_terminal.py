"""What is printed is text: of its markup nothing is obeyed, nor of its control characters."""

import io
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
