"""Asks a judge: one question per call, over OpenAI's protocol for chat completions."""

from __future__ import annotations

from typing import Any

from paceline.config.reward import JudgeConfig
from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.text import one_line
from paceline.reward.outside.openai_server import OpenAIServer, key_from, read_json, shown


class JudgeClient:
    """Asks a judge over its chat API.

    Raises:
        ConfigError: the variable with the key is not set.
    """

    def __init__(self, config: JudgeConfig) -> None:
        key = key_from(config.key_env, f"the judge {config.name!r}")
        self._config, self._server = config, OpenAIServer(config.address, key, timeout_s=config.timeout_s)

    async def ask(self, question: str) -> str:
        """Returns the judge's answer to a question.

        Raises:
            RewardError: TIMEOUT or UNAVAILABLE if another call may succeed, else RAISED or WRONG_TYPE.
        """
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
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
