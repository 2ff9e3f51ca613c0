"""Calls an OpenAI-compatible server, such as a judge or a teacher; its faults are reward errors."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.text import one_line

# Statuses after which a later call may succeed: the server is too busy, or starting.
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_ANSWER_BYTES = 4 * 2**20
_SHOWN_CHARS = 300


class OpenAIServer:
    """Calls a server; every call has a deadline, and every answer a largest size.

    Args:
        address: URL that ends with the version, for example http://127.0.0.1:8000/v1.
        key: sent as a bearer token; "" for none.
    """

    def __init__(self, address: str, key: str, *, timeout_s: float) -> None:
        self._address, self._timeout_s = address.rstrip("/"), timeout_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(timeout=timeout_s, headers=headers, follow_redirects=False)

    async def call(
        self, path: str, body: dict[str, Any] | None = None, *, max_bytes: int = _MAX_ANSWER_BYTES
    ) -> bytes:
        """Posts a body, or gets a page without one; returns the answer's bytes.

        Args:
            path: follows the address; one with .. is resolved.
            body: sent as JSON.
            max_bytes: largest answer.

        Raises:
            RewardError: TIMEOUT or UNAVAILABLE if another call may succeed, else RAISED or WRONG_TYPE.
        """
        timeout_s, method = self._timeout_s, "GET" if body is None else "POST"
        try:
            url = httpx.URL(f"{self._address}/").join(path)
            # httpx's timeouts apply to each read, but an answer may arrive byte by byte.
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, url, json=body) as answer,
            ):
                content = await _read(answer, max_bytes)
        except (TimeoutError, httpx.TimeoutException):
            raise RewardError(f"no answer within {timeout_s:g} s", kind=RewardErrorKind.TIMEOUT) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            words = one_line(f"{type(error).__name__}: {error}")
            raise RewardError(words, kind=RewardErrorKind.UNAVAILABLE) from error
        if answer.status_code != 200:
            passes = answer.status_code in _PASSING
            raise RewardError(
                one_line(f"status {answer.status_code}: {shown(content)}"),
                kind=RewardErrorKind.UNAVAILABLE if passes else RewardErrorKind.RAISED,
            )
        return content

    async def close(self) -> None:
        """Closes the connections to the server."""
        await self._http.aclose()


def key_from(key_env: str | None, who: str) -> str:
    """Returns the API key in an environment variable; "" if none is named.

    Raises:
        ConfigError: the variable is not set.
    """
    key = os.environ.get(key_env, "") if key_env is not None else ""
    if key_env is not None and not key:
        raise ConfigError(
            f"{who} takes its key from {key_env}, which is not set in the reward service's environment: set "
            "it there, or leave key_env out"
        )
    return key


async def _read(answer: httpx.Response, max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in answer.aiter_bytes():
        size += len(part)
        if size > max_bytes:
            raise RewardError(f"the answer has over {max_bytes >> 20} MiB", kind=RewardErrorKind.WRONG_TYPE)
        parts.append(part)
    return b"".join(parts)


def read_json(content: bytes) -> Any:
    """Returns the JSON of an answer; None if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def shown(content: bytes) -> str:
    """Returns the beginning of an answer, for messages."""
    return content.decode(errors="replace")[:_SHOWN_CHARS]
