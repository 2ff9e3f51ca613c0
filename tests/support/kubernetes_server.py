"""A stand-in for Kubernetes' API server: keeps objects, and lets nobody change a Job's template.

For helm and kubectl. Nothing is run: a Job is complete as soon as it is there, and there are no pods. An
applied object takes the place of the former whole.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

_KINDS = {
    "/api/v1": ("ConfigMap", "Secret", "Service", "PersistentVolumeClaim", "Pod"),
    "/apis/apps/v1": ("Deployment", "StatefulSet"),
    "/apis/batch/v1": ("Job",),
    "/apis/networking.k8s.io/v1": ("NetworkPolicy",),
}


def _plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")


@dataclass(slots=True)
class KubernetesServer:
    """Attributes:
    url: its address.
    objects: by plural kind and name; tests change them as a cluster's controllers would.
    removed: what was deleted, in order.
    """

    url: str
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    removed: list[tuple[str, str]] = field(default_factory=list)

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Returns the objects of a kind by name."""
        return {name: each for (plural, name), each in self.objects.items() if plural == _plural(kind)}

    def answer(self, method: str, address: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Returns status and body of an answer."""
        path, _, query = address.partition("?")
        if described := _discovery(path):
            return 200, described
        _, _, rest = path.partition("/namespaces/")
        _, _, rest = rest.partition("/")
        plural, _, name = rest.partition("/")
        if name.endswith("/scale"):
            return self._scale(plural, name.removesuffix("/scale"), json.loads(body) if body else {})
        if method == "GET" and plural and not name:
            items = [each for (kind, _), each in self.objects.items() if kind == plural]
            listed = _label(query)
            items = [each for each in items if listed.items() <= each["metadata"].get("labels", {}).items()]
            kind, version = next(
                (kind, group.removeprefix("/apis/").removeprefix("/api/"))
                for group, kinds in _KINDS.items()
                for kind in kinds
                if _plural(kind) == plural
            )
            return 200, {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": items}
        if method in ("GET", "DELETE"):
            if (plural, name) not in self.objects:
                return _status(404, "NotFound", f'{plural} "{name}" not found')
            if method == "GET":
                return 200, self.objects[plural, name]
            del self.objects[plural, name]
            self.removed.append((plural, name))
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return self._write(plural, _secret(body) if body.startswith(b"k8s\0") else json.loads(body))

    def _write(self, plural: str, wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        key = plural, wanted["metadata"]["name"]
        former = self.objects.get(key)
        if plural == "jobs" and former and former["spec"]["template"] != wanted["spec"]["template"]:
            return _status(422, "Invalid", "spec.template: Invalid value: field is immutable")
        if plural == "jobs":
            wanted["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        wanted["metadata"] |= {"uid": key[1], "resourceVersion": "1"}
        self.objects[key] = wanted
        return 200 if former else 201, wanted

    def _scale(self, plural: str, name: str, wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        scaled = self.objects[plural, name]
        scaled["spec"]["replicas"] = wanted.get("spec", {}).get("replicas", scaled["spec"]["replicas"])
        spec = {"replicas": scaled["spec"]["replicas"]}
        return 200, {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name},
            "spec": spec,
        }


def _label(query: str) -> dict[str, str]:
    (selector,) = parse_qs(query).get("labelSelector", [""])
    return dict(term.split("=") for term in selector.split(",") if term)


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Returns the fields of a protobuf message that have a length, by number."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 0x80:
                return value, at

    fields: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        key, at = varint(at)
        value, at = varint(at)
        if key & 7 == 2:
            fields.setdefault(key >> 3, []).append(message[at : at + value])
            at += value
    return fields


def _secret(body: bytes) -> dict[str, Any]:
    """Returns the Secret in which Helm keeps a release, which it sends as protobuf."""
    (raw,) = _fields(body.removeprefix(b"k8s\0"))[2]
    secret = _fields(raw)
    metadata = _fields(secret[1][0])
    labels = [_fields(entry) for entry in metadata.get(11, ())]
    data = [_fields(entry) for entry in secret.get(2, ())]
    return {
        "kind": "Secret",
        "apiVersion": "v1",
        "metadata": {
            "name": metadata[1][0].decode(),
            "labels": {entry[1][0].decode(): entry[2][0].decode() for entry in labels},
        },
        "data": {entry[1][0].decode(): base64.b64encode(entry[2][0]).decode() for entry in data},
        "type": secret[3][0].decode(),
    }


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    said = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return code, said | {"message": message}


def _discovery(path: str) -> dict[str, Any] | None:
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for group in _KINDS:
            if group.startswith("/apis/"):
                _, _, name, version = group.split("/")
                version_of = {"groupVersion": f"{name}/{version}", "version": version}
                groups.append({"name": name, "versions": [version_of], "preferredVersion": version_of})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path not in _KINDS:
        return None
    verbs = ["get", "list", "create", "update", "patch", "delete"]
    resources = [
        {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
        for kind in _KINDS[path]
    ]
    if path == "/apis/apps/v1":
        scale = {"name": "deployments/scale", "group": "autoscaling", "version": "v1", "kind": "Scale"}
        resources.append(
            scale | {"singularName": "", "namespaced": True, "verbs": ["get", "patch", "update"]}
        )
    version = path.removeprefix("/apis/").removeprefix("/api/")
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


@contextmanager
def kubernetes_server() -> Iterator[KubernetesServer]:
    """Serves on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, said = server.answer(self.command, self.path, body)
            data = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = KubernetesServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
