"""README.md keeps its word: its commands compose, its make targets and its paths exist."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
from paths import ROOT, load_script

import drafttrain
from drafttrain.__main__ import read
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import COMMANDS, TrainConfig
from drafttrain.config.sweep import sweep_of
from drafttrain.runtime.run_folder import write_config

TEXT = (ROOT / "README.md").read_text() if (ROOT / "README.md").is_file() else ""
CALL = "-m drafttrain "  # of python or of torchrun


def blocks(text: str) -> list[str]:
    """Return the lines of code blocks, fenced or indented, with continued lines joined."""
    fences = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    indented = re.findall(r"(?:^|\n\n)((?:    .*\n)+)", text)
    joined = "\n".join([*fences, *indented]).replace("\\\n", " ")
    return [line.strip().removeprefix("$ ") for line in joined.splitlines()]


def inline(text: str) -> list[str]:
    """Return what stands between backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def commands(text: str) -> list[str]:
    """Return every call of the command line that can be composed, without duplicates."""
    calls = []
    for line in [*blocks(text), *inline(text)]:
        _, call, rest = line.partition(CALL)
        rest = shlex.join(shlex.split(rest, comments=True))
        if call and rest.split(" ")[0] in COMMANDS and "..." not in rest:
            calls.append(rest)
    return list(dict.fromkeys(calls))


def paths(text: str) -> list[str]:
    """Return what looks like a path of the repository: links, and words with a slash or suffix."""
    linked = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    words = [word for word in inline(text) if re.fullmatch(r"[\w.-]+(/[\w.*-]+)*/?", word)]
    tops = {entry.name for entry in ROOT.iterdir()} - {"outputs"}
    ours = [word for word in words if word.split("/")[0] in tops]
    suffixed = [word for word in words if re.search(r"\.(py|yaml|md|toml|sh|ipynb)$", word)]
    files = [link for link in linked if link and "://" not in link]
    return list(dict.fromkeys([*files, *ours, *suffixed]))


def exists(path: str) -> bool:
    """Whether the path is in the repository, from its top or from the package."""
    made = ("outputs/", ".venv")  # by the commands, not by us
    return path.startswith(made) or any(
        list(folder.glob(path.rstrip("/"))) for folder in (ROOT, ROOT / "drafttrain")
    )


def test_readme_shows_every_command() -> None:
    assert {call.split()[0] for call in commands(TEXT)} == set(COMMANDS)


@pytest.mark.parametrize("call", commands(TEXT))
def test_command_in_readme_composes(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = read(shlex.split(call))
    assert request.command is not None
    for text in request.overrides:
        key, _, folder = text.partition("=")
        # As if the run had been made.
        if key == "run.init_from" or (key == "run.dir" and request.command != "train"):
            Path(folder).mkdir(parents=True)
            saved = typed(compose("train", [f"run.dir={folder}"]), TrainConfig)
            write_config(saved, Path(folder) / "config.yaml")
    if request.multirun:
        assert len(sweep_of(request.command, request.overrides).jobs) > 1  # each composes
    elif not request.help:
        typed(compose(request.command, request.overrides), COMMANDS[request.command])


@pytest.mark.parametrize("path", paths(TEXT))
def test_path_in_readme_exists(path: str) -> None:
    assert exists(path)


def test_make_target_in_readme_exists() -> None:
    known = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for line in [*blocks(TEXT), *inline(TEXT)]:
        if line.startswith("make "):
            assert line.split()[1] in known, line


def test_python_in_readme_calls_what_the_package_offers() -> None:
    """Each name and each argument; tests/commands/test_api.py runs them."""
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    called = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("drafttrain."):
            name = ast.unparse(node.func).partition(".")[2]
            arguments = {str(word.arg): word.value for word in node.keywords}
            inspect.signature(getattr(drafttrain, name)).bind(*node.args, **arguments)
            called.append(name)
    assert sorted(called) == sorted(drafttrain.__all__)


def test_the_table_in_readme_is_the_one_that_the_demo_prints() -> None:
    script = load_script("show_demo")
    header = "| " + " | ".join(script.COLUMNS) + " |"
    assert header in TEXT
    rows = TEXT[TEXT.index(header) :].split("\n\n")[0].splitlines()[2:]
    assert list(dict.fromkeys(row.split(" | ")[0][2:] for row in rows)) == [
        *script.TARGETS.values()
    ]


def test_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120


EXAMPLE = """
Run `python -m drafttrain train drafter=x` and read `drafttrain/decode/loop.py`,
[this](docs/a.md#b) or [that](https://x.y/z).
`gone.py` and `conf/gone/` are missed; `outputs/demo` is made.

```bash
$ python -m drafttrain evaluate \\
    run.dir=outputs/demo  # comment
python -m drafttrain train ...
```

An indented block:

    torchrun --nproc_per_node 2 -m drafttrain train deepspeed=zero2

"""


def test_commands_and_paths_are_found() -> None:
    assert commands(EXAMPLE) == [
        "evaluate run.dir=outputs/demo",
        "train deepspeed=zero2",
        "train drafter=x",
    ]
    found = paths(EXAMPLE)
    assert found == ["docs/a.md", "drafttrain/decode/loop.py", "conf/gone/", "gone.py"]
    assert [path for path in found if not exists(path)] == ["docs/a.md", "conf/gone/", "gone.py"]
