"""A scorer: runs the program in a response against the tests in its row's ground truth, confined."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from paceline.config.reward import CodeConfig
from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.code.tests import CodeTest, code_of, program_of, tests_of
from paceline.reward.scorer import ScorerSettings
from paceline.reward.scores import Score, score_of
from paceline.reward.shape import Shape
from paceline.reward.shaped import Shaped
from paceline.service.confinement.confined import (
    Command,
    ConfinedLimits,
    Ending,
    python,
    run_confined,
    why_not_confined,
)


class CodeScorer:
    """A `Scorer` whose value is 1 for a program that passes all tests, else 0; `NAME/passed` is the share."""

    def __init__(self, config: CodeConfig) -> None:
        self._config, self._shape = config, Shape.configured(config)
        self._limits = ConfinedLimits(
            seconds=config.test_timeout_s,
            memory_bytes=config.memory_mib << 20,
            max_processes=config.max_processes,
        )
        self._slots = asyncio.Semaphore(config.concurrency)
        self._is_open = False

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Shaped]:
        """One scorer for each entry of `reward.code`."""
        return [Shaped(cls(code), Shape.configured(code)) for code in settings.config.code]

    @property
    def names(self) -> Sequence[str]:
        """The name of its component."""
        return [self._config.name]

    async def start(self) -> None:
        """Looks whether programs can be confined here.

        Raises:
            ConfigError: they cannot; nothing is run without.
        """
        problem = await why_not_confined()
        if problem:
            raise ConfigError(f"reward.code {self._config.name!r}: {problem}")
        self._is_open = True

    async def close(self) -> None:
        """Takes no more items."""
        self._is_open = False

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """One score per item, in the order of the items.

        Raises:
            RewardError: UNAVAILABLE, when it was closed or not started.
        """
        if not self._is_open:
            raise RewardError(f"{self._config.name}: not running", kind=RewardErrorKind.UNAVAILABLE)
        return list(await asyncio.gather(*(self._score(item) for item in items)))

    async def _score(self, item: ScoreItem) -> Score:
        started = time.monotonic()
        result: ScoreResult | RewardError
        try:
            tests = tests_of(item.ground_truth)
            program = program_of(code_of(item.response), tests)
            passed = [await self._passes(program, test) for test in tests]
            result = ScoreResult(
                trajectory_id=item.trajectory_id,
                reward=float(all(passed)),
                components={"passed": sum(passed) / len(passed)},
            )
        except RewardError as error:
            result = error
        seconds = time.monotonic() - started
        return score_of(item, result, name=self._config.name, shape=self._shape, seconds=seconds)

    async def _passes(self, program: str, test: CodeTest) -> bool:
        words = self._config.command or (python(), "-I", "-B", "{file}")
        file = self._config.file
        command = Command(
            words=[word.replace("{file}", f"/tmp/{file}") for word in words],
            files={file: program},
            stdin=test.stdin.encode(errors="surrogatepass"),
            read_only=self._config.read_only,
            limits=self._limits,
        )
        async with self._slots:  # whoever has a slot has a deadline
            outcome = await run_confined(command)
        if outcome.ending is not Ending.EXITED or outcome.code != 0:
            return False
        return test.passes(outcome.stdout.decode(errors="replace"))
