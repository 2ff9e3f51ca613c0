"""The connection to a judge: one question per call, over OpenAI's protocol for chat completions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.text import one_line

# Statuses after which a later call may succeed: the server is too busy, or starting.
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_ANSWER_BYTES = 4 * 2**20
_SHOWN_CHARS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeOptions:
    """How a judge is asked.

    Args:
        address: URL that ends with the version, for example http://127.0.0.1:8000/v1.
        model: name of the model on its server.
        key: sent as a bearer token; "" for none.
        max_tokens, temperature: sampling options of its answer.
        timeout_s: longest duration of a call.
    """

    address: str
    model: str
    key: str = field(default="", repr=False)
    max_tokens: int = 256
    temperature: float = 0.0
    timeout_s: float = 60.0


class JudgeClient:
    """Asks a judge over its chat API."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        self._http = httpx.AsyncClient(timeout=options.timeout_s, headers=headers, follow_redirects=False)

    async def ask(self, question: str) -> str:
        """Returns the judge's answer to a question.

        Raises:
            RewardError: TIMEOUT or UNAVAILABLE if another call may succeed, else RAISED or WRONG_TYPE.
        """
        options = self._options
        body = {
            "model": options.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        }
        url = f"{options.address.rstrip('/')}/chat/completions"
        try:
            # httpx's timeouts apply to each read, but an answer may arrive byte by byte.
            async with (
                asyncio.timeout(options.timeout_s),
                self._http.stream("POST", url, json=body) as answer,
            ):
                text = await _read(answer)
        except (TimeoutError, httpx.TimeoutException):
            raise RewardError(
                f"no answer within {options.timeout_s:g} s", kind=RewardErrorKind.TIMEOUT
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            words = one_line(f"{type(error).__name__}: {error}")
            raise RewardError(words, kind=RewardErrorKind.UNAVAILABLE) from error
        if answer.status_code != 200:
            passes = answer.status_code in _PASSING
            raise RewardError(
                one_line(f"status {answer.status_code}: {text[:_SHOWN_CHARS]}"),
                kind=RewardErrorKind.UNAVAILABLE if passes else RewardErrorKind.RAISED,
            )
        return _content(text)

    async def close(self) -> None:
        """Closes the connections to the judge."""
        await self._http.aclose()


async def _read(answer: httpx.Response) -> str:
    parts, size = [], 0
    async for part in answer.aiter_bytes():
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise RewardError(
                f"the answer has over {_MAX_ANSWER_BYTES >> 20} MiB", kind=RewardErrorKind.WRONG_TYPE
            )
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


def _content(text: str) -> str:
    try:
        tree: Any = json.loads(text)
        content = tree["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise RewardError(
            one_line(f"the answer is no chat completion: {text[:_SHOWN_CHARS]}"),
            kind=RewardErrorKind.WRONG_TYPE,
        )
    return content
