"""A small OpenAI-compatible endpoint that fails on request and remembers what it was asked."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "parrot"


@dataclass
class Endpoint:
    """What the server was asked, and how it is to fail."""

    url: str = ""
    key: str | None = None  # the key that it asks for
    models: list[str] = field(default_factory=lambda: [MODEL])
    asked: list[dict[str, Any]] = field(default_factory=list)
    # By the first user turn: the statuses that its first requests are answered with.
    failures: dict[str, list[int]] = field(default_factory=dict)
    # By the first user turn: a reply of other bytes than an endpoint's, once each.
    replies: dict[str, list[bytes]] = field(default_factory=dict)
    listing: bytes | None = None  # what /models answers instead
    listing_status: int = 200
    location: str | None = None  # where every request is sent on to
    listed: int = 0  # how often the models were asked for
    retry_after: str | None = "0.01"
    seconds: float = 0.0  # that an answer takes
    busiest: int = 0  # requests at a time
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serve() -> Iterator[Endpoint]:
    """Serve on a free port of this machine until the block ends."""
    endpoint = Endpoint()
    handler = type("Handler", (_Handler,), {"endpoint": endpoint})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer_to(body: dict[str, Any]) -> str:
    """What is answered depends on the turns, the seed and the temperature, and on nothing else."""
    seed = body["seed"] if body["temperature"] else None
    text = json.dumps([body["messages"], seed])
    return f"{body['messages'][-1]['content']}? {hashlib.sha256(text.encode()).hexdigest()[:8]}"


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay quiet: a client that gave up has closed what the answer is written to."""


class _Handler(BaseHTTPRequestHandler):
    endpoint: Endpoint

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""

    def _send(self, status: int, content: dict[str, Any] | bytes) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if data[:1] == b"<" else "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status in (429, 500, 503) and self.endpoint.retry_after is not None:
            self.send_header("Retry-After", self.endpoint.retry_after)
        self.end_headers()
        self.wfile.write(data)

    def _refuses(self) -> bool:
        key = self.endpoint.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._send(401, {"error": {"message": "no such key"}})
        return True

    def _sends_on(self) -> bool:
        if self.endpoint.location is None:
            return False
        self.send_response(307)
        self.send_header("Location", self.endpoint.location + self.path.removeprefix("/v1"))
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def do_GET(self) -> None:
        self.endpoint.listed += 1
        if self._sends_on():
            return
        if self.endpoint.listing is not None:
            self._send(self.endpoint.listing_status, self.endpoint.listing)
        elif not self._refuses():
            data = [{"id": name, "object": "model", "owned_by": "us"} for name in self._models()]
            self._send(200, {"object": "list", "data": data})

    def _models(self) -> list[str]:
        return self.endpoint.models

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refuses():
            return
        endpoint = self.endpoint
        first = next(turn["content"] for turn in body["messages"] if turn["role"] == "user")
        with endpoint.lock:
            endpoint.asked.append(body)
            endpoint.now += 1
            endpoint.busiest = max(endpoint.busiest, endpoint.now)
            failures = endpoint.failures.get(first, [])
            status = failures.pop(0) if failures else 200
            replies = endpoint.replies.get(first, [])
            reply = replies.pop(0) if replies else None
        time.sleep(endpoint.seconds)
        with endpoint.lock:
            endpoint.now -= 1
        if status != 200:
            self._send(status, {"error": {"message": f"not now: {status}"}})
            return
        if reply is not None:
            self._send(200, reply)
            return
        text = answer_to(body)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": len(text), "total_tokens": 1 + len(text)}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": MODEL}
        self._send(200, {**whole, "choices": [choice], "usage": usage})
