"""A small server that speaks the Hub's upload protocol and keeps what it received.

create repo -> validate card -> preupload (regular or LFS, by size and name) -> LFS batch, PUT and
verify -> commit (ndjson). It refuses what the Hub refuses: a missing or unknown token, another
user's namespace, bytes that do not hash to what was announced, a commit of an object never sent.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKENS = {"hf_writer": "ada", "hf_other": "bob"}


@dataclass
class Repo:
    """A repository: its visibility, its files at the head, and how many commits led there."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    lfs: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """What the server holds; `requests` lists method and path of everything it was asked."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    storage_full: bool = False


@contextmanager
def serve() -> Iterator[Hub]:
    """Serve on a free port of this machine until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{method} {path}")
        body = self._body()
        if method == "PUT" and path.startswith("/storage/"):
            return self._put(path.rpartition("/")[2], body)  # a signed address: no token
        user = TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if user is None:
            return self._answer(401, {"error": "Invalid username or password."})
        for wanted, pattern, handler in (
            ("GET", r"/api/whoami-v2", self._whoami),
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", self._validate),
            ("GET", r"/api/models/([^/]+/[^/]+)", self._info),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/main", self._preupload),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/verify", self._verify),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/main", self._commit),
        ):
            match = re.fullmatch(pattern, path)
            if method == wanted and match:
                return handler(user, body, *match.groups())
        return self._answer(404, {"error": f"no such address: {method} {path}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: dict[str, Any], code: str | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(data)

    def _repo(self, user: str, name: str) -> Repo | None:
        """Return a repository that this user may write to, or answer why not."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not name.startswith(f"{user}/")):
            self._answer(404, {"error": "Repository not found"}, "RepoNotFound")
            return None
        return repo

    def _whoami(self, user: str, body: bytes) -> None:
        self._answer(200, {"type": "user", "name": user, "orgs": []})

    def _create(self, user: str, body: bytes) -> None:
        asked = json.loads(body)
        owner = asked.get("organization") or user
        name = f"{owner}/{asked['name']}"
        if owner != user:
            error = f"You don't have the rights to create a model under the namespace {owner!r}"
            return self._answer(403, {"error": error})
        if name in self.hub.repos:
            url = f"{self.hub.url}/{name}"
            return self._answer(409, {"error": "You already created this repo", "url": url})
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.repos[name] = Repo(private)
        return self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def _validate(self, user: str, body: bytes) -> None:
        match = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        try:
            data = yaml.safe_load(match.group(1)) if match else None
        except yaml.YAMLError as error:
            return self._answer(400, {"errors": [{"message": str(error)}], "warnings": []})
        if not isinstance(data, dict):
            return self._answer(200, {"errors": [], "warnings": [{"message": "empty metadata"}]})
        return self._answer(200, {"errors": [], "warnings": []})

    def _info(self, user: str, body: bytes, name: str) -> None:
        repo = self._repo(user, name)
        if repo is None:
            return
        content = {"id": name, "private": repo.private, "sha": f"{len(repo.commits):040x}"}
        self._answer(200, {**content, "tags": [], "downloads": 0, "likes": 0})

    def _preupload(self, user: str, body: bytes, name: str) -> None:
        repo = self._repo(user, name)
        if repo is None:
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    def _batch(self, user: str, body: bytes, name: str) -> None:
        if self._repo(user, name) is None:
            return
        objects = []
        for asked in json.loads(body)["objects"]:
            actions = {
                "upload": {"href": f"{self.hub.url}/storage/{asked['oid']}"},
                "verify": {"href": f"{self.hub.url}/{name}.git/info/lfs/objects/verify"},
            }
            known = asked["oid"] in self.hub.objects
            objects.append({**asked, **({} if known else {"actions": actions})})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _put(self, oid: str, body: bytes) -> None:
        if self.hub.storage_full:
            return self._answer(413, {"error": "storage limit reached"})
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer(400, {"error": "these bytes do not hash to that address"})
        self.hub.objects[oid] = body
        return self._answer(200, {})

    def _verify(self, user: str, body: bytes, name: str) -> None:
        asked = json.loads(body)
        stored = self.hub.objects.get(asked["oid"])
        known = stored is not None and len(stored) == asked["size"]
        self._answer(200 if known else 404, {})

    def _commit(self, user: str, body: bytes, name: str) -> None:
        repo = self._repo(user, name)
        if repo is None:
            return
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repo.commits.append(value["summary"])
            elif line["key"] == "file":
                assert value["encoding"] == "base64"
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self._answer(400, {"error": f"LFS object {value['oid']} is missing"})
                repo.files[value["path"]] = self.hub.objects[value["oid"]]
                repo.lfs.add(value["path"])
            else:
                return self._answer(400, {"error": f"unknown operation {line['key']}"})
        oid = f"{len(repo.commits):040x}"
        url = f"{self.hub.url}/{name}/commit/{oid}"
        return self._answer(200, {"success": True, "commitOid": oid, "commitUrl": url})
