"""Unlucky environments: each is one plain line, and nothing goes where nobody asked for it."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from drafttrain.__main__ import main
from drafttrain.data import template
from drafttrain.drafters.shared.parallel import mask_token
from drafttrain.runtime.rank_process import SWEEP, settle
from drafttrain.runtime.run_folder import call
from drafttrain.target.model import Target


def test_a_working_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["train"]) == 1
    said = "error: the working directory was deleted: cd to one that exists\n"
    assert capsys.readouterr().err == said
    os.chdir(tmp_path)


@pytest.mark.parametrize("key", ["run.dir", "data.path"])
def test_the_home_of_a_user_that_does_not_exist_becomes_no_folder(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "data=jsonl", "data.path=x", f"{key}=~nosuchuser/x"]) == 2
    said = f"error: {key} must have the name of a user after ~, got ~nosuchuser/x; ./~nosuchuser/x"
    assert capsys.readouterr().err.startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_a_printed_command_names_a_folder_with_control_characters() -> None:
    names = ["run.dir=a\x1b[31m 'b'\\n\n\u00e9", "plain", "two words"]
    line = call(*names)
    assert line.isprintable()
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    assert words[3:-1] == names


def test_a_template_that_is_slow_each_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = template.Renderer()
    monkeypatch.setattr(template, "SECONDS_IN_ALL", 0.0)
    monkeypatch.setattr(template, "SECONDS_EACH", 0.0)
    request = {"template": "x", "date": "2026-01-01", "variables": {}}
    assert renderer.ask(request) == {"text": "x"}
    assert renderer.ask(request)["limit"].endswith(" s for 2 texts in all")
    renderer.close()


def test_a_job_ends_with_its_sweep() -> None:
    """The sweep of this one is gone before the job asks the kernel to end with it."""
    child = os.fork()
    if child == 0:
        os.environ[SWEEP] = "1" if os.getppid() != 1 else "2"
        settle()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15


def test_the_token_at_places_to_draft_ends_no_answer_if_another_is_free(target: Target) -> None:
    assert target.spec.unused_token_id is None  # each of its 97 ids is a token
    spec = replace(target.spec, pad_token_id=5, eos_token_ids=(5,), unused_token_id=96)
    assert mask_token(None, spec) == 96
    assert mask_token(None, replace(spec, eos_token_ids=(4,))) == 5
    assert mask_token(None, replace(spec, unused_token_id=None)) == 5
    assert mask_token(7, spec) == 7
    assert mask_token(None, replace(spec, pad_token_id=-1)) == 96  # some configs say none so
    beyond = replace(spec, pad_token_id=spec.vocab_size, unused_token_id=None)
    assert mask_token(None, beyond) == spec.vocab_size - 1
