"""A small HTTP server on loopback: it answers GET below a secret path, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
from urllib.parse import quote, unquote

from paceline.cli.report.script import SCRIPT
from paceline.cli.ui.runs import ServedRuns, index
from paceline.core.errors import EnvironmentLackError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"

_REQUEST_S = 10.0
_HEADS = {200: "OK", 302: "Found", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; "
    f"script-src 'sha256-{_SCRIPT_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Connection": "close",
}

Answer = tuple[int, str, str]


class PageServer:
    """Serves runs at http://127.0.0.1:PORT/TOKEN/; who does not know the token gets 404.

    Args:
        runs: what is served.
        token: of the address; whoever has it may read the runs.
    """

    def __init__(self, runs: ServedRuns, token: str) -> None:
        self._runs, self._token = runs, token

    async def start(self, port: int) -> asyncio.Server:
        """Listens; port 0 takes a free one.

        Raises:
            EnvironmentLackError: the port is taken.
        """
        try:
            return await asyncio.start_server(self._serve, HOST, port)
        except OSError as error:
            raise EnvironmentLackError(
                f"cannot listen on {HOST}:{port} ({error.strerror}); give another --port, or 0 for a free one"
            ) from error

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, target, *_ = head.split(maxsplit=2)
                writer.write(_response(*await self._answer(method, target)))
                await writer.drain()
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a request was not answered", exc_info=True)
        finally:
            writer.close()

    async def _answer(self, method: str, target: str) -> Answer:
        token, _, path = target.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return 404, "text/plain", "no such page; the address that `paceline ui` printed has a secret part"
        if method != "GET":
            return 405, "text/plain", "read only"
        name, _, rest = unquote(path).partition("/")
        runs = await asyncio.to_thread(self._runs.by_name)
        run = runs.get(name)
        if not name:
            if len(runs) == 1:
                return 302, f"/{token}/{quote(next(iter(runs)))}/", ""
            return 200, "text/html", await asyncio.to_thread(index, runs)
        if run is not None and rest == "now":
            news = await run.news()
            return 200, "application/json", json.dumps({"html": news.html, "stamp": news.stamp})
        if run is not None and not rest:
            return 200, "text/html", await asyncio.to_thread(run.page)
        return 404, "text/plain", "no such run"


def _response(status: int, kind: str, text: str) -> bytes:
    body = text.encode()
    fields = {"Location": kind} if status == 302 else {"Content-Type": f"{kind}; charset=utf-8"}
    fields |= {"Content-Length": str(len(body)), **_HEADERS}
    lines = [f"HTTP/1.1 {status} {_HEADS[status]}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
