"""CI's rotation: a submission moves the part exactly once, and CI sees where it did not."""

import json
import subprocess
from pathlib import Path

import pytest
from paths import load_script

script = load_script("next_part")


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", name)


def move(root: Path) -> int:
    contents = script.moved(script.base_of(root), root)
    commit(root, script.FILE, json.dumps(contents))
    return contents["part"]


@pytest.fixture
def landed(tmp_path: Path) -> Path:
    """A repository whose branch was made at a commit that names part 10."""
    git(tmp_path, "init", "-q", "-b", "first")
    commit(tmp_path, script.FILE, '{"part": 10}')
    git(tmp_path, "switch", "-qc", "main")
    return tmp_path


def test_a_submission_moves_the_part_once_however_often_it_is_asked(landed: Path) -> None:
    commit(landed, "a.py", "1")
    assert move(landed) == 1
    assert script.check(landed) is None
    commit(landed, "a.py", "2")
    assert move(landed) == 1
    assert script.check(landed) is None


def test_a_change_after_the_part_was_moved_is_seen(landed: Path) -> None:
    commit(landed, "a.py", "1")
    move(landed)
    commit(landed, "a.py", "2")
    assert "was not moved since the last change" in (script.check(landed) or "")


def test_a_part_that_stayed_or_jumped_is_seen(landed: Path) -> None:
    commit(landed, "a.py", "1")
    base = script.base_of(landed)
    for part in (10, 3):
        contents = {"part": part, "base": base, "digest": script.digest(landed)}
        commit(landed, script.FILE, json.dumps(contents))
        assert "must name the part that follows" in (script.check(landed) or "")
