"""A stand-in of the Hugging Face hub: repositories in memory, served over HTTP as huggingface_hub asks."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Files = Mapping[str, bytes]


class StandInHub:
    """Repositories by (kind, name, revision); `requests` are the paths asked for, in order.

    Who pushes has the token "writer". `created` says of each new model whether it is private.
    """

    def __init__(self) -> None:
        self._revisions: dict[tuple[str, str, str], str] = {}
        self._commits: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.gated: set[str] = set()
        self.created: dict[str, bool] = {}
        self.messages: list[str] = []
        self._large: dict[str, bytes] = {}
        self.endpoint = ""

    def put(self, name: str, files: Files, *, kind: str = "models", revision: str = "main") -> str:
        """Commits files to a branch; returns the commit."""
        commit = hashlib.sha1(json.dumps([name, revision, len(self._commits)]).encode()).hexdigest()
        self._commits[commit] = dict(files)
        self._revisions[kind, name, revision] = commit
        self._revisions[kind, name, commit] = commit
        return commit

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a request."""
        self.requests.append(path)
        parts = [unquote(part) for part in path.partition("?")[0].strip("/").split("/")]
        if parts[0] == "api" and len(parts) < 6:
            return 404, {}, b"{}"  # nothing about a repository at a revision
        if parts[0] == "api":
            kind, name, verb, revision = parts[1], "/".join(parts[2:4]), parts[4], parts[5]
            return self._about(kind, name, verb, revision)
        kind = "models"
        if parts[0] == "datasets":
            kind, parts = parts[0], parts[1:]
        return self._file(kind, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def receive(self, path: str, body: bytes, token: str) -> tuple[int, dict[str, Any]]:
        """Status and body of a request that stores something; `token` is that of the caller."""
        self.requests.append(path)
        if token != "Bearer writer":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.created[name] = asked.get("visibility") == "private"
            return 200, {"url": f"{self.endpoint}/{name}"}
        if path.startswith("/lfs/"):
            self._large[path.removeprefix("/lfs/")] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": [self._upload(o) for o in json.loads(body)["objects"]],
            }
        name, verb = "/".join(path.split("/")[3:5]), path.split("/")[5]
        if verb == "preupload":
            return 200, {"files": [_mode(file["path"]) for file in json.loads(body)["files"]]}
        return 200, self._commit(name, [json.loads(line) for line in body.splitlines()])

    def _upload(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        actions = {"upload": {"href": f"{self.endpoint}/lfs/{wanted['oid']}"}}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": actions}

    def _commit(self, name: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self._large[value["oid"]]
        commit = self.put(name, files)
        self.messages.append(next(line["value"]["summary"] for line in lines if line["key"] == "header"))
        return {"commitOid": commit, "commitUrl": f"{self.endpoint}/{name}/commit/{commit}"}

    def _about(self, kind: str, name: str, verb: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        commit = self._revisions.get((kind, name, revision))
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if commit is None:
            known = any(key[:2] == (kind, name) for key in self._revisions)
            return 404, {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}, b"{}"
        files = self._commits[commit]
        tree = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in files.items()
        ]
        if verb == "tree":
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        about = {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()

    def _file(self, kind: str, name: str, revision: str, path: str) -> tuple[int, dict[str, str], bytes]:
        commit = self._revisions.get((kind, name, revision), "")
        data = self._commits.get(commit, {}).get(path)
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data


def _mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(with_body=True)

    def do_HEAD(self) -> None:
        self._send(with_body=False)

    def do_POST(self) -> None:
        self._receive()

    def do_PUT(self) -> None:
        self._receive()

    def _receive(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        token = "Bearer writer" if path.startswith("/lfs/") else self.headers.get("Authorization", "")
        status, answer = self.hub.receive(path, body, token)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, *, with_body: bool) -> None:
        status, headers, body = self.hub.answer(self.path)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """A hub on a port of the loopback, for as long as the block lasts."""
    hub = StandInHub()

    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
