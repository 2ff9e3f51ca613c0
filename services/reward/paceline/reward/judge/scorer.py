"""A scorer that asks a language model behind an OpenAI-compatible address about each item."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self

from paceline.config.reward import JudgeConfig
from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.core.text import one_line
from paceline.reward.judge.question import GradePattern, JudgePrompt, read_prompt_file
from paceline.reward.outside.openai_server import OpenAIServer, key_from, read_json, shown
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import RETRIED_KINDS, Score, answered
from paceline.reward.scoring.shape import Shape

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0


class JudgeScorer:
    """A `Scorer` whose value is the grade in a judge's answer.

    A call that may succeed later is repeated, up to `attempts` calls in total.

    Raises:
        ConfigError: the prompt file, the pattern or the variable with the key is unusable.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config, self.names, self.shape = config, [config.name], Shape.configured(config)
        self._question = JudgePrompt(read_prompt_file(config.prompt_file))
        self._grade = GradePattern(config.pattern, dict(config.words))
        self._slots = asyncio.Semaphore(config.concurrency)
        self._interval_s = 60.0 / config.per_minute if config.per_minute else 0.0
        self._next_at = 0.0
        self._server: OpenAIServer | None = None
        self._wait = asyncio.sleep

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Self]:
        """Returns one scorer for each entry of `reward.judges`."""
        return [cls(judge) for judge in settings.config.judges]

    async def start(self) -> None:
        """Prepares the connection; the judge may come up later.

        Raises:
            ConfigError: the variable with the key is not set.
        """
        config = self._config
        key = key_from(config.key_env, f"the judge {config.name!r}")
        self._server = OpenAIServer(config.address, key, timeout_s=config.timeout_s)

    async def close(self) -> None:
        """Closes the connections to the judge."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items."""
        server = self._server
        if server is None:
            raise RewardError(f"{self._config.name}: not running", kind=RewardErrorKind.UNAVAILABLE)
        name, shape = self._config.name, self.shape
        answers = (answered(item, self._grade_of(server, item), name=name, shape=shape) for item in items)
        return list(await asyncio.gather(*answers))

    async def _grade_of(self, server: OpenAIServer, item: ScoreItem) -> ScoreResult:
        answer = await self._ask(server, self._question.about(item))
        return ScoreResult(trajectory_id=item.trajectory_id, reward=self._grade.of(answer))

    async def _ask(self, server: OpenAIServer, question: str) -> str:
        pause_s = _FIRST_PAUSE_S
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        for attempt in range(1, self._config.attempts + 1):
            try:
                async with self._slots:  # each call with a slot has a deadline
                    await self._wait_for_turn()
                    return _content(await server.call("chat/completions", body))
            except RewardError as error:
                if error.kind not in RETRIED_KINDS or attempt == self._config.attempts:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("attempts is at least 1")

    async def _wait_for_turn(self) -> None:
        """Spaces the calls evenly, with at most `per_minute` per minute."""
        now = time.monotonic()
        at = self._next_at = max(now, self._next_at)
        self._next_at += self._interval_s
        if at > now:
            await self._wait(at - now)


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
