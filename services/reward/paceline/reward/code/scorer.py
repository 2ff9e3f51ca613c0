"""A scorer that runs the program in a response, confined, against the tests in the row's ground truth."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from paceline.config.reward import CodeConfig
from paceline.core.errors import ConfigError, EnvironmentLackError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.code.tests import CodeTest, code_of, program_of, tests_of
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import Score, answered
from paceline.reward.scoring.shape import Shape
from paceline.service.confinement.confined import (
    Command,
    CommandResult,
    ConfinedLimits,
    Ending,
    python,
    run_confined,
    why_not_confined,
)
from paceline.service.threads import in_thread


class CodeScorer:
    """Scores 1 for a program that passes all tests, else 0; `NAME/passed` is the share of passed tests."""

    def __init__(self, config: CodeConfig) -> None:
        self._config, self.names, self.shape = config, [config.name], Shape.configured(config)
        self._limits = ConfinedLimits(
            seconds=config.test_timeout_s,
            memory_bytes=config.memory_mib << 20,
            max_processes=config.max_processes,
        )
        self._slots = asyncio.Semaphore(config.concurrency)
        self._is_open = False

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Self]:
        """Returns one scorer for each entry of `reward.code`."""
        return [cls(code) for code in settings.config.code]

    async def start(self) -> None:
        """Checks whether programs can be confined here.

        Raises:
            ConfigError: programs cannot be confined; they never run without.
        """
        problem = await why_not_confined()
        if not problem:
            outcome = await run_confined(self._command("", ""))
            if outcome.ending is Ending.NOT_STARTED:
                problem = self._not_started(outcome)
        if problem:
            raise ConfigError(f"reward.code {self._config.name!r}: {problem}")
        self._is_open = True

    async def close(self) -> None:
        """Takes no more items to score."""
        self._is_open = False

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items."""
        if not self._is_open:
            raise RewardError(f"{self._config.name}: not running", kind=RewardErrorKind.UNAVAILABLE)
        name, shape = self._config.name, self.shape
        answers = (answered(item, self._result(item), name=name, shape=shape) for item in items)
        return list(await asyncio.gather(*answers))

    async def _result(self, item: ScoreItem) -> ScoreResult:
        # In a thread, because ground truth, response and output may be large.
        tests = await in_thread(tests_of, item.ground_truth)
        program = program_of(await in_thread(code_of, item.response), tests)
        passed = [await self._passes(program, test) for test in tests]
        return ScoreResult(
            trajectory_id=item.trajectory_id,
            reward=float(all(passed)),
            components={"passed": sum(passed) / len(passed)},
        )

    async def _passes(self, program: str, test: CodeTest) -> bool:
        async with self._slots:  # each program with a slot has a deadline
            outcome = await self._outcome(program, test.stdin)
        if outcome.ending is not Ending.EXITED or outcome.code != 0:
            return False
        return await in_thread(test.passes, outcome.stdout.decode(errors="replace"))

    async def _outcome(self, program: str, stdin: str) -> CommandResult:
        try:
            outcome = await run_confined(self._command(program, stdin))
        except EnvironmentLackError as error:
            # Confinement worked at the start, so another attempt may succeed.
            raise RewardError(str(error), kind=RewardErrorKind.UNAVAILABLE) from error
        if outcome.ending is Ending.NOT_STARTED:
            raise RewardError(self._not_started(outcome), kind=RewardErrorKind.RAISED)
        return outcome

    def _command(self, program: str, stdin: str) -> Command:
        words = self._config.command or (python(), "-I", "-B", "{file}")
        file = self._config.file
        return Command(
            words=[word.replace("{file}", f"/tmp/{file}") for word in words],
            files={file: program},
            stdin=stdin.encode(errors="surrogatepass"),
            read_only=self._config.read_only,
            limits=self._limits,
        )

    def _not_started(self, outcome: CommandResult) -> str:
        words, reason = " ".join(self._command("", "").words), outcome.stderr.decode(errors="replace")
        return (
            f"the command {words} cannot be started ({reason}): name a program by its absolute path, in the "
            "system's folders or in one of read_only"
        )
