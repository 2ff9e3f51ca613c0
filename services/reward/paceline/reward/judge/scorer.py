"""A scorer that asks a language model behind an OpenAI-compatible address about each item."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from paceline.config.reward import JudgeConfig
from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.judge.client import JudgeClient
from paceline.reward.judge.question import GradePattern, JudgePrompt, read_prompt_file
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import RETRIED_KINDS, Score, answered
from paceline.reward.scoring.shape import Shape
from paceline.reward.scoring.shaped import Shaped

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0


class JudgeScorer:
    """A `Scorer` whose value is the grade in a judge's answer.

    A call that may succeed later is repeated, up to `attempts` calls in total.

    Raises:
        ConfigError: the prompt file, the pattern or the variable with the key is unusable.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config, self._shape = config, Shape.configured(config)
        self._question = JudgePrompt(read_prompt_file(config.prompt_file))
        self._grade = GradePattern(config.pattern, dict(config.words))
        self._slots = asyncio.Semaphore(config.concurrency)
        self._interval_s = 60.0 / config.per_minute if config.per_minute else 0.0
        self._next_at = 0.0
        self._client: JudgeClient | None = None
        self._wait = asyncio.sleep

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Shaped]:
        """Returns one scorer for each entry of `reward.judges`."""
        return [Shaped(cls(judge), Shape.configured(judge)) for judge in settings.config.judges]

    @property
    def names(self) -> Sequence[str]:
        """Returns the name of its component."""
        return [self._config.name]

    async def start(self) -> None:
        """Prepares the connection; the judge may come up later."""
        self._client = JudgeClient(self._config)

    async def close(self) -> None:
        """Closes the connections to the judge."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items."""
        client = self._client
        if client is None:
            raise RewardError(f"{self._config.name}: not running", kind=RewardErrorKind.UNAVAILABLE)
        name, shape = self._config.name, self._shape
        answers = (answered(item, self._grade_of(client, item), name=name, shape=shape) for item in items)
        return list(await asyncio.gather(*answers))

    async def _grade_of(self, client: JudgeClient, item: ScoreItem) -> ScoreResult:
        answer = await self._ask(client, self._question.about(item))
        return ScoreResult(trajectory_id=item.trajectory_id, reward=self._grade.of(answer))

    async def _ask(self, client: JudgeClient, question: str) -> str:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, self._config.attempts + 1):
            try:
                async with self._slots:  # each call with a slot has a deadline
                    await self._wait_for_turn()
                    return await client.ask(question)
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
