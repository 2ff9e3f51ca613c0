"""Asks a judge: one question per call, over OpenAI's protocol for chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.text import one_line
from paceline.reward.outside.openai_server import OpenAIServer, OpenAIServerOptions, read_json, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeOptions:
    """How a judge is asked."""

    server: OpenAIServerOptions
    model: str
    max_tokens: int = 256
    temperature: float = 0.0


class JudgeClient:
    """Asks a judge over its chat API."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options, self._server = options, OpenAIServer(options.server)

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
        return _content(await self._server.call("chat/completions", body))

    async def close(self) -> None:
        """Closes the connections to the judge."""
        await self._server.close()


def _content(answer: bytes) -> str:
    try:
        tree: Any = read_json(answer)
        content = tree["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise RewardError(
            one_line(f"the answer is no chat completion: {shown(answer)}"),
            kind=RewardErrorKind.WRONG_TYPE,
        )
    return content
