"""A server on this machine that answers as the Hugging Face Hub does to an upload, for tests of pushes."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote

from proximo.run.pushes import git_hash

TOKEN = "hf_tokenofatest"


class FakeHub(ThreadingHTTPServer):
    """What was pushed to it; `refuses`: the number of commits that it answers with an error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[tuple[str, set[str]]] = []
        """The message and the files of each."""
        self.refuses = 0
        self.answers = Event()
        """Commits are kept waiting while it is not set."""
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    """The part of the Hub's interface that an upload of small files uses."""

    server: FakeHub

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path = unquote(self.path).partition("?")[0]
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        name, _, action = path.removeprefix("/api/models/").partition("/main")[0].rpartition("/")
        return getattr(self, action.replace("-", "_"))(name, body)

    def do_GET(self) -> None:
        name = unquote(self.path).removeprefix("/api/models/").partition("/revision/")[0]
        self.answer(200, {"id": name, "sha": "0" * 40, "siblings": []})

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.server.repositories:
            return self.answer(
                409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}
            )
        self.server.repositories[name] = {}
        self.server.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
        return self.answer(200, {"url": f"{self.server.url}/{name}"})

    def paths_info(self, name: str, body: bytes) -> None:
        del body
        files = self.server.repositories[name]
        there = [{"type": "file", "path": p, "size": len(c), "oid": git_hash(c)} for p, c in files.items()]
        self.answer(200, [each for each in there if each["path"] == "README.md"])

    def preupload(self, name: str, body: bytes) -> None:
        del name
        asked = json.loads(body)["files"]
        files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]
        self.answer(200, {"files": files})

    def commit(self, name: str, body: bytes) -> None:
        self.server.answers.wait(1000)
        if self.server.refuses:
            self.server.refuses -= 1
            return self.answer(403, {"error": "Forbidden: the storage is full"})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {each["value"]["path"]: each["value"]["content"] for each in lines if each["key"] == "file"}
        (message,) = [each["value"]["summary"] for each in lines if each["key"] == "header"]
        self.server.repositories[name] |= {path: base64.b64decode(content) for path, content in files.items()}
        self.server.commits.append((message, set(files)))
        url = f"{self.server.url}/{name}/commit/{'1' * 40}"
        return self.answer(200, {"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """The server, while it answers."""
    hub = FakeHub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.answers.set()
        hub.shutdown()
        hub.server_close()
        thread.join(60)
