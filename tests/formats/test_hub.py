"""Pushing an export: the real client against a server that speaks the Hub's protocol."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, Repo, serve

from drafttrain.formats.write.hub import plan_push

FILES = ("config.json", "model.safetensors", "README.md")
# The client reads its environment when it is imported, so every push has a process of its own.
PUSH = """
import json, sys
from pathlib import Path
from drafttrain.formats.write.hub import check_push, push
folder, files, repo, private, early = json.loads(sys.argv[1])
try:
    told = check_push(repo, private) if early else push(Path(folder), files, repo, private)
    print(json.dumps({"url": told}))
except ValueError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty Hub."""
    with serve() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export with weights that are more than one read, and a file that is not part of it."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}\n')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    (folder / "README.md").write_text("---\nlicense: other\n---\n\n# A drafter\n")
    (folder / "secrets.env").write_text("not for the Hub")
    return folder


def push_from_a_process(
    folder: Path, repo: str, endpoint: str, token: str | None = "hf_writer", **settings: object
) -> dict[str, str]:
    """Push with the real client; return its address or the text of its ValueError."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder.parent / "hf_home"),  # nobody's own token
        "HF_HUB_DISABLE_XET": "1",  # the server speaks the Hub's older LFS protocol
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    if token is not None:
        environment["HF_TOKEN"] = token
    if settings.get("offline"):
        environment["HF_HUB_OFFLINE"] = "1"
    arguments = json.dumps(
        [str(folder), FILES, repo, *(settings.get(key, False) for key in ("private", "early"))]
    )
    done = subprocess.run(
        [sys.executable, "-c", PUSH, arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_push_delivers_the_export_byte_for_byte_and_nothing_else(hub: Hub, folder: Path) -> None:
    assert push_from_a_process(folder, "ada/tiny-eagle3", hub.url, private=True) == {
        "url": f"{hub.url}/ada/tiny-eagle3"
    }
    repo = hub.repos["ada/tiny-eagle3"]
    assert repo.private
    assert repo.files == {name: (folder / name).read_bytes() for name in FILES}
    assert repo.lfs == {"model.safetensors"}
    assert repo.commits == ["Upload drafter with drafttrain"]
    assert "POST /api/validate-yaml" in hub.requests

    # Again, to the repository that is there now: the weights are known and not sent twice.
    (folder / "config.json").write_text("{}\n")
    hub.requests.clear()
    push_from_a_process(folder, "ada/tiny-eagle3", hub.url, private=True)
    assert repo.files["config.json"] == b"{}\n"
    assert not any(request.startswith("PUT") for request in hub.requests)


def test_a_public_repository_is_not_taken_for_a_private_one(hub: Hub, folder: Path) -> None:
    hub.repos["ada/open"] = Repo(private=False)
    error = push_from_a_process(folder, "ada/open", hub.url, private=True)["error"]
    assert "exists and is public, but export.private=true; nothing was uploaded" in error
    assert hub.repos["ada/open"].files == {}


def test_without_a_token_the_error_says_how_to_get_one(hub: Hub, folder: Path) -> None:
    error = push_from_a_process(folder, "ada/x", hub.url, token=None)["error"]
    assert error.startswith("export.push=ada/x needs a token, got none; make a token with write")
    assert "hf auth login" in error
    assert "HF_TOKEN" in error
    assert hub.requests == []


def test_a_refused_token_is_one_clear_message(hub: Hub, folder: Path) -> None:
    error = push_from_a_process(folder, "ada/x", hub.url, token="hf_expired")["error"]
    assert f"{hub.url} does not accept this token; make a token with write permission" in error


def test_a_namespace_of_somebody_else_is_named(hub: Hub, folder: Path) -> None:
    error = push_from_a_process(folder, "ada/x", hub.url, token="hf_other")["error"]
    assert "this token may not write to 'ada'; push to a user or organisation of your own" in error
    assert hub.repos == {}


def test_without_network_the_error_says_where_the_export_is(folder: Path) -> None:
    error = push_from_a_process(folder, "ada/x", "http://127.0.0.1:9")["error"]
    assert "http://127.0.0.1:9 cannot be reached" in error
    assert f"the export is complete in {folder}: push it again with export.overwrite" in error
    error = push_from_a_process(folder, "ada/x", "http://127.0.0.1:9", offline=True)["error"]
    assert "needs the network, but HF_HUB_OFFLINE is set; unset it" in error


def test_a_failed_upload_says_that_the_repository_may_be_incomplete(hub: Hub, folder: Path) -> None:
    hub.storage_full = True
    error = push_from_a_process(folder, "ada/x", hub.url)["error"]
    assert "Error while uploading 'model.safetensors'" in error
    assert "ada/x may be incomplete" in error
    assert "413" in error


def test_a_name_that_the_hub_forbids_is_refused_before_anything_is_sent(
    hub: Hub, folder: Path
) -> None:
    error = push_from_a_process(folder, "ada/x--y..", hub.url)["error"]
    assert error.startswith("export.push=ada/x--y.. must be a valid user/repo:")
    assert hub.requests == []


def test_what_a_push_needs_is_checked_before_anything_is_exported(hub: Hub, folder: Path) -> None:
    """The token was looked for after the export, which then stood in the way of the next try."""
    hub.repos["ada/open"] = Repo(private=False)
    for told, said in (
        ({"token": None}, "export.push=ada/x needs a token, got none; make a token with write"),
        ({"token": "hf_expired"}, "does not accept this token"),
        ({"token": "hf_other"}, "must name a repository of bob, whose token this is"),
    ):
        error = push_from_a_process(folder, "ada/x", hub.url, early=True, **told)["error"]  # type: ignore[arg-type]
        assert said in error
        assert "complete" not in error, "nothing was exported"
    error = push_from_a_process(folder, "ada/open", hub.url, early=True, private=True)["error"]
    assert "exists and is public, but export.private=true" in error
    error = push_from_a_process(folder, "ada/x", "http://127.0.0.1:9", early=True)["error"]
    assert error.endswith("push from a machine with network; nothing was exported yet")
    assert push_from_a_process(folder, "ada/new", hub.url, early=True) == {"url": None}
    assert list(hub.repos) == ["ada/open"], "nothing was created"


def test_a_dry_run_lists_what_would_be_uploaded(folder: Path) -> None:
    lines = plan_push(folder, FILES, "ada/x", private=True)
    assert lines[0] == f"dry run: would upload 3 files from {folder} to ada/x (private):"
    assert [line.split() for line in lines[1:]] == [
        ["config.json", "24", "bytes"],
        ["model.safetensors", "256,000", "bytes"],
        ["README.md", "36", "bytes"],
        ["in", "all", "256,060", "bytes;", "nothing", "was", "sent"],
    ]
