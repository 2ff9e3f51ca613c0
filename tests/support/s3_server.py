"""A small S3: buckets in memory, the calls that s3fs makes for files of one part."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

import pytest

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class S3Server(ThreadingHTTPServer):
    """Attributes:

    objects: content by "bucket/key".
    calls: method and path of every request.
    refuse: a path of which every PUT is refused.
    """

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.refuse = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def gets(self, ending: str) -> int:
        return sum(method == "GET" and path.endswith(ending) for method, path in self.calls)


def aws_environment(url: str) -> dict[str, str]:
    """What s3fs needs to find a server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def use_s3_server(url: str, patch: pytest.MonkeyPatch) -> Any:
    """A file system on a server, which everything that is started from here finds through the environment."""
    import s3fs

    for name, value in aws_environment(url).items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return s3fs.S3FileSystem()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that s3fs finds through the environment."""
    server = S3Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            use_s3_server(server.url, patch)
            yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Server

    def log_message(self, *args: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.timeout = 30

    @property
    def _key(self) -> str:
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")

    @property
    def _query(self) -> dict[str, str]:
        query = urllib.parse.urlsplit(self.path).query
        return dict(urllib.parse.parse_qsl(query, keep_blank_values=True))

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self) -> None:
        self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>")

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return data
        content, rest = b"", data
        while rest:
            head, _, rest = rest.partition(b"\r\n")
            size = int(head.partition(b";")[0], 16)
            if not size:
                break
            content, rest = content + rest[:size], rest[size + 2 :]
        return content

    def _note(self) -> None:
        self.server.calls.append((self.command, self._key))

    def do_HEAD(self) -> None:
        self._note()
        data = self.server.objects.get(self._key)
        if data is None:
            self._missing()
        else:
            self._answer(200, b"", Content_Length=str(len(data)), **_tags(data))

    def do_GET(self) -> None:
        self._note()
        if "list-type" in self._query:
            self._list()
            return
        data = self.server.objects.get(self._key)
        if data is None:
            self._missing()
            return
        span = self.headers.get("Range")
        if span is None:
            self._answer(200, data, **_tags(data))
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(data), int(last) + 1 if last else len(data))
        content_range = f"bytes {start}-{stop - 1}/{len(data)}"
        self._answer(206, data[start:stop], Content_Range=content_range, **_tags(data))

    def do_PUT(self) -> None:
        self._note()
        data = self._body()
        source = self.headers.get("x-amz-copy-source")
        if self.server.refuse and self.server.refuse in self._key:
            self._answer(403, b"<Error><Code>AccessDenied</Code><Message>refused</Message></Error>")
            return
        if source:
            data = self.server.objects[urllib.parse.unquote(source).lstrip("/")]
        self.server.objects[self._key] = data
        body = f'<CopyObjectResult><ETag>"{_md5(data)}"</ETag></CopyObjectResult>'.encode() if source else b""
        self._answer(200, body, **_tags(data))

    def do_DELETE(self) -> None:
        self._note()
        self.server.objects.pop(self._key, None)
        self._answer(204)

    def do_POST(self) -> None:
        self._note()
        tree = ElementTree.fromstring(self._body())
        for key in tree.iter():
            if key.tag.rpartition("}")[2] == "Key":
                self.server.objects.pop(f"{self._key.rstrip('/')}/{key.text}", None)
        self._answer(200, f'<DeleteResult xmlns="{NAMESPACE}"></DeleteResult>'.encode())

    def _list(self) -> None:
        bucket, query = self._key.rstrip("/"), self._query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        contents, prefixes = [], set[str]()
        for path, data in sorted(self.server.objects.items()):
            key = path.removeprefix(f"{bucket}/")
            if not path.startswith(f"{bucket}/") or not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>&quot;{_md5(data)}&quot;</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        groups = "".join(
            f"<CommonPrefixes><Prefix>{escape(p)}</Prefix></CommonPrefixes>" for p in sorted(prefixes)
        )
        count = len(contents) + len(prefixes)
        self._answer(
            200,
            f'<ListBucketResult xmlns="{NAMESPACE}"><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>'
            f"<KeyCount>{count}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
            f"{''.join(contents)}{groups}</ListBucketResult>".encode(),
            Content_Type="application/xml",
        )


def _tags(data: bytes) -> dict[str, str]:
    stamp = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(0))
    return {"ETag": f'"{_md5(data)}"', "Last_Modified": stamp, "Accept_Ranges": "bytes"}


def _md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


if __name__ == "__main__":
    S3Server(sys.argv[1], int(sys.argv[2])).serve_forever(poll_interval=0.05)
