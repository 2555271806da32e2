"""Targets from the Hub: what is downloaded, what serves offline, and what is said when it fails."""

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from builders import model_config
from huggingface_hub import constants

from drafttrain.target.pretrained import hub
from drafttrain.target.pretrained.models import fingerprint, load_model, load_model_config

REPO = "meta-llama/Llama-3.3-70B-Instruct"
FROM_HUB = dataclasses.replace(model_config(Path("/unused")), path=None, repo=REPO)
COMMIT = "0" * 39 + "1"


@pytest.fixture
def folder(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target, to be served."""
    return Path(shutil.copytree(tiny_target_dir, tmp_path / "served"))


class HubHandler(BaseHTTPRequestHandler):
    """As much of the Hub's protocol as a download needs."""

    folder: Path
    refusal: str | None  # what the Hub's X-Error-Code says of every file
    fetched: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        names = [str(f.relative_to(self.folder)) for f in self.folder.rglob("*") if f.is_file()]
        if "revision/none" in path:
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        elif self.refusal == "RepoNotFound":
            self.answer(404, b"{}", X_Error_Code=self.refusal)
        elif "/tree/" in path:
            rows = [
                {"type": "file", "path": n, "size": (self.folder / n).stat().st_size, "oid": n}
                for n in names
            ]
            self.answer(200, json.dumps(rows).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/"):
            info = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        elif self.refusal:
            self.answer(403, b"{}", X_Error_Code=self.refusal)
        else:
            name = path.partition("/resolve/")[2].partition("/")[2]
            if self.command == "GET":
                self.fetched.append(name)
            body = (self.folder / name).read_bytes()
            self.answer(200, body, ETag=f'"{hash(name)}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Point the real client at an endpoint, with an empty cache."""

    def at(endpoint: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        huggingface_hub.close_session()

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    hub.download.cache_clear()
    yield at
    hub.download.cache_clear()
    huggingface_hub.close_session()


@pytest.fixture
def handler(online: Callable[[str], None], folder: Path) -> Iterator[type[HubHandler]]:
    serving = type("Serving", (HubHandler,), {"folder": folder, "refusal": None, "fetched": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), serving)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    online(f"http://127.0.0.1:{server.server_port}")
    yield serving
    server.shutdown()
    server.server_close()
    thread.join()


UNREACHABLE = (
    "model=llama70b: cannot reach the Hugging Face Hub for meta-llama/Llama-3.3-70B-Instruct;"
    " point model.path at a local directory that holds the model, for example"
    " model.path=/models/Llama-3.3-70B-Instruct"
)


@pytest.mark.parametrize("offline", [True, False])
def test_an_unreachable_hub_is_one_clear_error_within_seconds(
    online: Callable[[str], None], offline: bool
) -> None:
    if not offline:
        online("http://127.0.0.1:9")  # where nobody listens
    start = time.monotonic()
    with pytest.raises(ValueError, match="cannot reach the Hugging Face Hub") as error:
        load_model_config(dataclasses.replace(FROM_HUB, name="llama70b"))
    assert str(error.value).startswith(UNREACHABLE)
    assert len(str(error.value).splitlines()) == 1
    assert time.monotonic() - start < 5


def test_a_download_brings_weights_only_when_they_are_needed(
    handler: type[HubHandler], folder: Path
) -> None:
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"the weights again")
    (folder / "pytorch_model.bin").write_bytes(b"and again")
    (folder / "consolidated.safetensors").write_bytes(b"and again")
    (folder / "modeling_mine.py").write_text("raise AssertionError")
    loaded = load_model_config(FROM_HUB)
    assert loaded.vocab_size == 97
    assert "config.json" in handler.fetched
    assert "tokenizer.json" in handler.fetched
    assert "model.safetensors" not in handler.fetched
    model = load_model(FROM_HUB, loaded, torch.float32, "cpu")
    assert model.lm_head.weight.shape == (97, 32)
    assert set(handler.fetched) == {path.name for path in folder.glob("*")} - {
        *("original", "pytorch_model.bin", "consolidated.safetensors", "modeling_mine.py")
    }
    assert fingerprint(FROM_HUB, torch.float32, "cpu") == fingerprint(
        model_config(folder), torch.float32, "cpu"
    )


def test_pickled_weights_are_downloaded_only_when_allowed(
    handler: type[HubHandler], folder: Path
) -> None:
    local = model_config(folder)
    weights = load_model(local, load_model_config(local), torch.float32, "cpu")
    torch.save(weights.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.repo=\S+ holds its weights only as pickle"):
        load_model_config(FROM_HUB)
    assert "pytorch_model.bin" not in handler.fetched
    allowed = dataclasses.replace(FROM_HUB, allow_pickle=True)
    model = load_model(allowed, load_model_config(allowed), torch.float32, "cpu")
    assert torch.equal(model.lm_head.weight, weights.lm_head.weight)


def test_a_repository_is_named_owner_slash_name(online: Callable[[str], None]) -> None:
    with pytest.raises(ValueError, match=r"model.repo must be like owner/name, or null, got a/b/c"):
        load_model_config(dataclasses.replace(FROM_HUB, repo="a/b/c"))


def test_what_was_downloaded_serves_without_the_hub(
    handler: type[HubHandler], online: Callable[[str], None]
) -> None:
    load_model(FROM_HUB, load_model_config(FROM_HUB), torch.float32, "cpu")
    hub.download.cache_clear()
    online("http://127.0.0.1:9")
    model = load_model(FROM_HUB, load_model_config(FROM_HUB), torch.float32, "cpu")
    assert model.lm_head.weight.shape == (97, 32)


@pytest.mark.parametrize(
    ("refusal", "revision", "message"),
    [
        ("GatedRepo", None, f"{REPO} is gated: accept its licence at .* or set HF_TOKEN; or point"),
        ("RepoNotFound", None, f"the Hugging Face Hub has no {REPO} that you may read; check mod"),
        (None, "none", f"model.revision must be a branch, tag or commit of {REPO}, got 'none'"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_sentence(
    handler: type[HubHandler], refusal: str | None, revision: str | None, message: str
) -> None:
    handler.refusal = refusal
    with pytest.raises(ValueError, match=message) as error:
        load_model_config(dataclasses.replace(FROM_HUB, revision=revision))
    assert len(str(error.value).splitlines()) == 1
