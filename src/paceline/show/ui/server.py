"""The web application of `paceline ui`: answers GET below a secret path with the page and its data."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any

from paceline.show.report.page import page, script, to_json
from paceline.show.ui.runs import ServedRuns

log = logging.getLogger(__name__)

Answer = tuple[HTTPStatus, str, str]

_HTML, _JSON, _TEXT = "text/html", "application/json", "text/plain"
_WHERE = "no such page; the address that `paceline ui` printed has a secret part"


class PageApp:
    """A WSGI application that serves runs at /TOKEN/; requests without the token get 404.

    Args:
        token: token of the address; whoever has it may read the runs.
    """

    def __init__(self, runs: ServedRuns, token: str) -> None:
        self._runs, self._token = runs, token

    def __call__(self, environ: Mapping[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        """Answers a request of WSGI; a fault of this program is logged, and answered without its text."""
        path = str(environ.get("PATH_INFO", "")).encode("latin-1").decode("utf-8", "replace")
        try:
            status, kind, text = self._answer(str(environ["REQUEST_METHOD"]), path)
        except Exception:
            log.exception("%s was not answered", path.rpartition("/data/")[2])
            status, kind, text = HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, "see the output of `paceline ui`"
        body = text.encode()
        fields = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **_headers()}
        start(f"{status.value} {status.phrase}", list(fields.items()))
        return [body]

    def _answer(self, method: str, path: str) -> Answer:
        token, _, rest = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return HTTPStatus.NOT_FOUND, _TEXT, _WHERE
        if method != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, "read only"
        if not rest:
            return HTTPStatus.OK, _HTML, page(self._runs.folder.name)
        value = self._data(rest.split("/"))
        if value is None:
            return HTTPStatus.NOT_FOUND, _TEXT, "no such run, or no such part of it"
        return HTTPStatus.OK, _JSON, to_json(value)

    def _data(self, parts: list[str]) -> Any:
        match parts:
            case ["data", "runs"]:
                return [run.head() for run in self._runs.by_name().values()]
            case ["data", name, *path]:
                run = self._runs.by_name().get(name)
                return run.get(path) if run else None
            case _:
                return None


@cache
def _headers() -> Mapping[str, str]:
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return {
        "Cache-Control": "no-store",
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
