"""`chat` and `generate`: in a terminal of its own (pty), in a pipe, and what they refuse."""

import contextlib
import fcntl
import gzip
import io
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from rich.console import RenderableType
from rich.control import Control
from rich.text import Text

import drafttrain
from drafttrain.__main__ import main
from drafttrain.commands.generate import asked
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import ChatConfig
from drafttrain.core.types import Decoded, DecodeStats
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.decode.rows import Passes
from drafttrain.decode.stream import ACCEPTED, UNDRAFTED, Piece, Stream
from drafttrain.report.answers import DRAFTED, numbers_of, show
from drafttrain.runtime.terminal import Terminal

QUICK = ["drafter=ngram", "model=tiny", "hardware.threads=1", "hardware.dtype=float32"]
BOLD_GREEN = "\x1b[1;32m"


class Session:
    """A command in a terminal of 40 columns; what it wrote so far is in `seen`."""

    def __init__(self, folder: Path, *told: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave, self.seen, self.place = slave, "", 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drafttrain", "chat", *QUICK, *told],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=folder,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "", **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, text: str, seconds: float = 90) -> str:
        """Read until a text has come; return what came since the one that was waited for last."""
        start, deadline = self.place, time.monotonic() + seconds
        while (found := self.seen.find(text, start)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen[start:]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    raise AssertionError(f"no {text!r} in {self.seen[start:]!r}") from None
        self.place = found + len(text)
        return self.seen[start : self.place]

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        assert termios.tcgetattr(self.slave) == self.before, "the terminal is as it was"
        os.close(self.master)
        os.close(self.slave)
        return code


def plain(text: str) -> str:
    """A text without what moves the cursor or sets colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    begun: list[Session] = []

    def begin(*told: str, **environment: str) -> Session:
        begun.append(Session(tmp_path, *told, **environment))
        return begun[-1]

    yield begin
    for session in begun:
        session.process.kill()
        session.process.wait()


def test_a_conversation_in_a_terminal(begin: Callable[..., Session]) -> None:
    session = begin("chat.max_new_tokens=400", "eval.stop_strings=['\\n\\n\\n']")
    opening = session.until("> ")
    assert "drafted and accepted is" in plain(opening)
    session.type("Write this again: red, green, blue, red, green, blue\n")
    answer = session.until("x plain") + session.until("> ")
    assert re.search(r"\d+ tokens, [\d.]+ a second", plain(answer))
    assert BOLD_GREEN in answer
    session.type("/what\n")
    assert "/new begins" in plain(session.until("> "))
    session.type("/system Be brief.\n")
    assert "with this system" in plain(session.until("> "))
    session.type("漢" * 1300 + "\n")
    assert "leaves no room" in plain(session.until("> ")).replace("\r\n", " ")
    session.type("/exit\n")
    assert session.end() == 0
    assert session.seen.rfind("\x1b[?25h") >= session.seen.rfind("\x1b[?25l"), "a cursor is shown"


def test_ctrl_c_stops_an_answer_and_then_the_command(begin: Callable[..., Session]) -> None:
    told = ["model.inflate=100M", "chat.max_new_tokens=400", "hardware.dtype=bfloat16"]
    session = begin(*told, NO_COLOR="1")
    session.until("> ")
    session.type("Tell me a long story about a dog and a cat.\n")
    session.until("cat.\r\n")
    assert "a pass" not in session.until(" "), "an answer has begun"
    session.type("\x03")
    stopped = session.until("stopped")
    assert "Traceback" not in stopped
    session.until("> ")
    # Python's readline sees a signal that comes before it waits for keys only at the next key.
    for patience in (5, 5, 5, 60):
        session.type("\x03")
        with contextlib.suppress(AssertionError):
            session.until("interrupted", patience)
            break
    assert session.end() == 130
    assert "interrupted" in session.seen
    assert "\x1b[32m" not in session.seen
    assert BOLD_GREEN not in session.seen


def run(capsys: pytest.CaptureFixture[str], *told: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(told))
    out, err = capsys.readouterr()
    return code, out, err


def test_each_line_of_a_pipe_is_a_turn_and_only_answers_are_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = ["Hello", "And now?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAnd now?\n"))
    code, out, err = run(capsys, "chat", *QUICK, "chat.max_new_tokens=12", "chat.system=Be brief.")
    assert (code, err) == (0, "")
    target = drafttrain.load_target("tiny", device="cpu", dtype="float32")
    said, expected = [{"role": "system", "content": "Be brief."}], []
    for turn in turns:
        said.append({"role": "user", "content": turn})
        expected.append(drafttrain.generate(target, None, said, max_new_tokens=12).text)
        said.append({"role": "assistant", "content": expected[-1]})
    assert out == "".join(text + "\n" for text in expected)


def test_a_reader_that_leaves_ends_a_chat_without_a_word(tmp_path: Path) -> None:
    command = f"yes Hello | {sys.executable} -m drafttrain chat {' '.join(QUICK)} | head -c 20"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert len(done.stdout) == 20
    assert "Traceback" not in done.stderr
    assert "rror" not in done.stderr


def test_answers_to_a_file_are_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    file.write_text("Say red, red, red.\n\nWhat is 2 + 2?\n")
    told = [*QUICK, f"chat.file={file}", f"chat.out={out}", "chat.max_new_tokens=10"]
    code, printed, _ = run(capsys, "generate", *told)
    assert code == 0
    assert f"answers: {out}" in printed
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["id"] for record in records] == ["line 1", "line 3"]
    target = drafttrain.load_target("tiny", device="cpu", dtype="float32")
    for record in records:
        (answer,) = record["answers"]
        expected = drafttrain.generate(target, None, record["turns"][0], max_new_tokens=10)
        assert answer["text"] == expected.text
        assert answer["tokens"] == list(expected.tokens)
        assert sum(count for _, count in answer["pieces"]) == len(answer["tokens"])
    # A killed command goes on with what is missing.
    first, second = out.read_text().splitlines(keepends=True)
    for left in (first + second[:20], first, first[:20]):
        out.write_text(left)
        assert run(capsys, "generate", *told)[0] == 0
        assert out.read_text() == first + second
    code, _, error = run(capsys, "generate", *told, "eval.temperature=0.5")
    assert code == 2
    assert "chat.out=" in error
    assert out.read_text() == first + second


def test_equal_prompts_have_answers_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, warm = tmp_path / "prompts.txt", ["eval.temperature=1", "chat.max_new_tokens=12"]
    file.write_text("Say a word.\nSay a word.\n")
    alone = run(capsys, "generate", *QUICK, *warm, "chat.prompt=Say a word.")[1]
    out = tmp_path / "answers.jsonl"
    assert run(capsys, "generate", *QUICK, *warm, f"chat.file={file}", f"chat.out={out}")[0] == 0
    lines = out.read_text().splitlines()
    first, second = (json.loads(line)["answers"][0]["text"] for line in lines)
    assert first + "\n" == alone
    assert first != second


def test_one_prompt_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", *QUICK, "chat.prompt=Hello", "chat.max_new_tokens=8")
    target = drafttrain.load_target("tiny", device="cpu", dtype="float32")
    assert code == 0
    assert out == drafttrain.generate(target, None, "Hello", max_new_tokens=8).text + "\n"


def test_an_answer_is_cut_where_a_shorter_context_of_the_drafters_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was an error that ended a chat, whatever the target had room for."""
    short = tmp_path / "short"
    shutil.copytree(ROOT / "drafttrain/assets/tiny", short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    told = [*QUICK[1:], "drafter=two_model", f"drafter.path={short}", "chat.marks=false"]
    out = tmp_path / "answers.jsonl"
    asked = f"chat.prompt=Continue: {'word ' * 30}"
    code, _, error = run(capsys, "generate", *told, asked, f"chat.out={out}")
    assert code == 0, error
    (answer,) = json.loads(out.read_text())["answers"]
    assert answer["cut"]
    assert 0 < len(answer["tokens"]) < 32
    code, _, error = run(capsys, "generate", *told, f"chat.prompt={'word ' * 64}")
    assert code == 2
    assert "no room for an answer in the 64 positions of drafter=two_model; shorten it" in error
    # eval.max_new_tokens is a limit of measurements.
    code, _, error = run(capsys, "generate", *told, "chat.prompt=Hi", "eval.max_new_tokens=80")
    assert code == 0, error


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_prompts_are_read_from_every_format_of_records(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    line = '{"id": "a", "task": "math", "turns": ["2 + 2?", "And 3 + 3?"]}'
    content = (f"[{line}]" if ".jsonl" not in name else line).encode()
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    config = typed(compose("generate", [*QUICK, f"chat.file={file}"]), ChatConfig)
    assert asked(config) == [Prompt("a", "math", "math", ("2 + 2?", "And 3 + 3?"))]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (["generate"], "chat.prompt or chat.file must be given"),
        (["generate", "chat.prompt=a", "chat.file=b"], "chat.prompt must be null where chat.file"),
        (["generate", "chat.file=none.txt"], "chat.file=none.txt cannot be read"),
        (["generate", "chat.file=empty.txt"], "must hold a prompt in each line"),
        (["generate", "chat.file=raw.txt"], "cannot be read"),
        (["generate", "chat.file=bad.jsonl"], "chat.file=bad.jsonl must hold usable prompts"),
        (["generate", "chat.prompt= "], "chat.prompt must"),
        (["generate", "chat.file=long.txt"], "line 1: the text so far has"),
        (["generate", "chat.prompt=a", "eval.depth=auto"], "tuned.json"),
        (["chat", "eval.policy=adaptive"], "tuned.json"),
        (["generate", "chat.file=one.txt", "chat.out=other.jsonl"], "chat.out must be a new file"),
        (["generate", "chat.file=one.txt", "chat.out=notes.md"], "chat.out must be a new file"),
        (["generate", "chat.file=one.txt", "chat.out=one.txt"], "chat.out must be a new file"),
        (["generate", "chat.file=one.txt", "chat.out=."], "chat.out must be a file"),
        (["generate", "chat.prompt=a", "eval.engine=vllm"], "eval.engine must be drafttrain"),
        (["generate", "chat.prompt=a", "eval.batch_size=4"], "eval.batch_size must be 1"),
        (["chat", "chat.prompt=a"], "chat.prompt must be null: it is for `generate`"),
    ],
)
def test_what_cannot_be_is_one_line(
    told: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n\n")
    Path("one.txt").write_text("Hello\n")
    Path("raw.txt").write_bytes(b"\xff\xfe\x00")
    Path("bad.jsonl").write_text('{"id": "a"}\n')
    Path("long.txt").write_text("word " * 3000 + "\n")
    Path("other.jsonl").write_text('{"some": "thing"}\n')
    Path("notes.md").write_text("precious, in one line")
    code, _, error = run(capsys, *told[:1], *QUICK, *told[1:])
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert Path("notes.md").read_text() == "precious, in one line"
    assert Path("one.txt").read_text() == "Hello\n"


def test_a_target_without_a_chat_template_is_named(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in tiny_target_dir.iterdir():
        if "template" not in file.name:
            (base / file.name).write_bytes(file.read_bytes())
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    code, _, error = run(
        capsys, "chat", "drafter=ngram", f"model.path={base}", "hardware.dtype=float32"
    )
    assert code == 2
    assert "template" in error
    assert error.count("\n") == 1


def test_an_answer_at_a_terminal_is_marked_whole_and_safe() -> None:
    def passes() -> Passes:
        yield from ()
        return [Decoded((), DecodeStats())]

    class Written(Stream):
        def __iter__(self) -> Iterator[Piece]:
            yield Piece("aaaa ", (1,), UNDRAFTED)
            for text in ("bbbbb", " ", "cc d", "\u00a0!\n", "\u3000漢\x1b[2J"):
                yield Piece(text, (1,), ACCEPTED)

    console, kept = Terminal(width=10), list[Text]()
    console._force_terminal, console.file = True, io.StringIO()
    draw = console.print

    def keep(text: RenderableType | Control, **told: Any) -> None:
        if isinstance(text, Text):
            kept.append(text)
        draw(text, **told)

    stream = Written(passes(), None, 9)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(console, "print", keep)
        show(stream, console, marks=True, plain=10.0)
    *texts, status = kept
    assert [str(text.style) for text in texts] == ["", *[DRAFTED] * 5]
    assert status.plain == numbers_of(stream, 10.0)
    shown = plain(console.file.getvalue())
    assert "aaaa bbbbb cc d\u00a0!\n\u3000漢\\x1b[2J\n" in shown
