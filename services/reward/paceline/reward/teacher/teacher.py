"""Asks a served teacher about samples, for as long as it takes to come back after an interruption.

not compared -> compared -> asked, until a call does not reach it -> not compared
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from paceline.config.training.teacher import TeacherConfig
from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.samples.teacher_top_k import TeacherTopK
from paceline.core.samples.trajectory import Int32Array, Trajectory
from paceline.reward.outside.breaker import Breaker
from paceline.reward.scoring.scorer import to_nobody
from paceline.reward.scoring.scores import RETRIED_KINDS
from paceline.reward.teacher.client import TeacherClient
from paceline.reward.teacher.policy_tokens import PolicyTokens

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0


class Teacher:
    """Gets a teacher's likeliest tokens of samples.

    Args:
        tokens: what it is compared with before it is asked.
        notify: sends a message to all who follow the run.
    """

    def __init__(
        self, config: TeacherConfig, tokens: PolicyTokens, notify: Callable[[str], None] = to_nobody
    ) -> None:
        self._config, self._tokens = config, tokens
        self._peer = f"the teacher at {config.address}"
        self._client = TeacherClient(config)
        self._breaker = Breaker(self._peer, notify)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._comparing = asyncio.Lock()
        self._is_compared = False

    async def start(self) -> None:
        """Compares the teacher with the policy, if it answers; it may also come up later.

        Raises:
            ConfigError: it is no teacher for this policy.
        """
        try:
            await self._compare()
        except RewardError as error:
            if error.kind not in RETRIED_KINDS:
                raise ConfigError(f"{self._peer}: {error}") from error

    async def close(self) -> None:
        """Closes the connections to the teacher."""
        await self._client.close()

    async def top_k(self, trajectory: Trajectory) -> TeacherTopK:
        """Returns the likeliest tokens at all response tokens that the policy sampled.

        Raises:
            RewardError: TIMEOUT or UNAVAILABLE, if it does not answer for `retry_for_s`; another kind if it
                refuses, or is no teacher for this policy.
        """
        shape = (len(trajectory.response_token_ids), self._config.top_k)
        top_k = TeacherTopK(token_ids=np.zeros(shape, np.int32), log_probs=np.zeros(shape, np.float32))
        for token_ids, wanted, first in _sequences(trajectory):
            if wanted:
                part, places = await self._ask(token_ids, wanted), np.asarray(wanted) + first
                top_k.token_ids[places], top_k.log_probs[places] = part.token_ids, part.log_probs
        self._require_known(top_k)
        return top_k

    def _require_known(self, top_k: TeacherTopK) -> None:
        """Refuses tokens of a teacher whose vocabulary is larger than the policy's."""
        size, largest = self._tokens.vocab_size, int(top_k.token_ids.max())
        if size is not None and largest >= size:
            raise RewardError(
                f"{self._peer} has the token {largest} among its likeliest, and the policy has only {size} "
                "tokens; lower algorithm.teacher.top_k",
                kind=RewardErrorKind.WRONG_TYPE,
            )

    async def _ask(self, token_ids: Sequence[int], wanted: Sequence[int]) -> TeacherTopK:
        """Repeats calls that do not reach the teacher."""
        until, pause_s = time.monotonic() + self._config.retry_for_s, _FIRST_PAUSE_S
        while True:
            if not await self._breaker.admit(until):
                raise RewardError(self._breaker.explanation, kind=RewardErrorKind.UNAVAILABLE)
            try:
                async with self._slots:  # each call with a slot has a deadline
                    await self._compare()
                    top_k = await self._client.top_k(token_ids, wanted)
            except RewardError as error:
                if error.kind not in RETRIED_KINDS:
                    self._breaker.succeeded()
                    raise RewardError(f"{self._peer}: {error}", kind=error.kind) from error
                self._breaker.failed(str(error))
                self._is_compared = False
                if time.monotonic() + pause_s > until:
                    raise RewardError(f"{self._peer}: {error}", kind=error.kind) from error
            except BaseException:
                self._breaker.called_off()
                raise
            else:
                self._breaker.succeeded()
                return top_k
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _compare(self) -> None:
        async with self._comparing:
            if not self._is_compared:
                await self._client.compare(self._tokens)
                self._is_compared = True


def _sequences(trajectory: Trajectory) -> Iterator[tuple[list[int], list[int], int]]:
    """Yields each sequence, the places of its sampled tokens, and the place in the response of its start.

    The first sequence begins before the response, at a negative place, with the prompt.
    """
    prompt, response = trajectory.prompt_token_ids, trajectory.response_token_ids
    starts = [0, *trajectory.segment_starts, len(response)]
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        before: Int32Array = prompt if number == 0 else prompt[:0]
        sampled = np.flatnonzero(trajectory.response_mask[start:end]) + len(before)
        token_ids = np.concatenate([before, response[start:end]])
        yield token_ids.tolist(), sampled.tolist(), start - len(before)
