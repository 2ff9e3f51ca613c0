"""Scoring by a remote service: calls cut to size, retried, weighted; a score for every item."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import grpc

from paceline.core.errors import PacelineError, RewardError, RewardErrorKind
from paceline.core.reward_function import MAX_COMPONENT_CHARS, MAX_COMPONENTS, kind_of
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.remote.client import call_score
from paceline.reward.scorer import ScorerSettings
from paceline.reward.scores import Score, failed, split_error
from paceline.service import channels
from paceline.service.connection import DEFAULT_MAX_MESSAGE_BYTES
from paceline.service.credentials import Credentials

_log = logging.getLogger(__name__)

_REACH_TIMEOUT_S = 3.0  # how long the start waits for a service that cannot be reached
_MAX_CALLS = 64
_SPLIT = 16
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
# Of the largest message: UTF-8 and framing make an item larger than its number of characters.
_MESSAGE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """How a remote scorer is called.

    Args:
        name: the name of its component.
        address: host:port.
        weight: the factor of its rewards in the sum.
        timeout_s: deadline of one call.
        max_retries: further calls for an item after a timeout or an unreachable service.
        max_items_per_call: largest call.
        max_message_bytes: largest message; calls are cut to stay below it.
        credentials: the token for a service that asks for one, and the files for TLS.
    """

    name: str
    address: str
    weight: float = 1.0
    timeout_s: float = 10.0
    max_retries: int = 2
    max_items_per_call: int = 256
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    credentials: Credentials = field(default_factory=Credentials)


class RemoteScorer:
    """A `Scorer` that asks one remote service. Whatever the service answers, every item gets a score."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._peer = f"reward service {options.name} at {options.address}"
        self._channel: grpc.aio.Channel | None = None
        self._calls = asyncio.Semaphore(_MAX_CALLS)

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Self]:
        """One scorer for each configured service."""
        config = settings.config
        return [
            cls(
                RemoteOptions(
                    name=service.name,
                    address=service.address,
                    weight=service.weight,
                    timeout_s=config.timeout_s,
                    max_retries=config.max_retries,
                    max_items_per_call=service.max_items_per_call,
                    max_message_bytes=settings.max_message_bytes,
                    credentials=settings.credentials,
                )
            )
            for service in config.services
        ]

    @property
    def names(self) -> Sequence[str]:
        """The name of its component."""
        return [self._options.name]

    async def start(self) -> None:
        """Connects. A service that cannot be reached now is logged, and may come up later."""
        options = self._options
        self._channel = channels.connect(
            options.address,
            credentials=options.credentials,
            role="reward",
            max_message_bytes=options.max_message_bytes,
        )
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                await self._channel.channel_ready()
        except TimeoutError:
            _log.warning("%s cannot be reached (yet)", self._peer)

    async def close(self) -> None:
        """Closes the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """One score per item, in the order of the items, with the weight applied.

        Items whose call ran out of time are retried in smaller and smaller calls, so that a slow item does
        not make the others fail.

        Raises:
            RewardError: UNAVAILABLE, when the connection is closed or was not opened.
        """
        scores: dict[int, Score] = {}
        pending = list(enumerate(items))
        size = self._options.max_items_per_call
        for attempt in itertools.count():
            calls = [self._call(part, run_id, step) for part in self._cut(pending, size)]
            outcomes = [pair for part in await asyncio.gather(*calls) for pair in part]
            scores.update(outcomes)
            retried = [index for index, score in outcomes if score.may_be_retried]
            if not retried or attempt >= self._options.max_retries:
                break
            if any(scores[index].error_kind is RewardErrorKind.TIMEOUT for index in retried):
                size = max(1, size // _SPLIT)
            pending = [(index, items[index]) for index in sorted(retried)]
            pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
            _log.info("%s: %d items again in %.2f s", self._options.name, len(pending), pause_s)
            await asyncio.sleep(pause_s)
        return [scores[index] for index in range(len(items))]

    def _cut(self, pending: Sequence[tuple[int, ScoreItem]], size: int) -> list[list[tuple[int, ScoreItem]]]:
        """Cuts the items into calls of at most `size` items that stay well below the largest message."""
        room = int(self._options.max_message_bytes * _MESSAGE_SHARE)
        parts: list[list[tuple[int, ScoreItem]]] = []
        chars = room + 1
        for index, item in pending:
            item_chars = len(item.prompt) + len(item.response) + len(item.ground_truth)
            if chars + item_chars > room or len(parts[-1]) >= size:
                parts.append([])
                chars = 0
            parts[-1].append((index, item))
            chars += item_chars
        return parts

    async def _call(
        self, part: Sequence[tuple[int, ScoreItem]], run_id: str, step: int
    ) -> list[tuple[int, Score]]:
        """One call; when it fails, every item of it gets the error as its score."""
        if self._channel is None:
            raise RewardError(f"{self._peer}: the connection is not open", kind=RewardErrorKind.UNAVAILABLE)
        items = [item for _, item in part]
        timeout_s = self._options.timeout_s
        results: Sequence[ScoreResult | PacelineError]
        started = time.monotonic()
        async with self._calls:
            try:
                results = await call_score(
                    self._channel, items, run_id=run_id, step=step, timeout_s=timeout_s, peer=self._peer
                )
            except PacelineError as error:
                results = [error] * len(items)
        seconds = time.monotonic() - started
        return [
            (index, self._score(item, result, seconds))
            for (index, item), result in zip(part, results, strict=True)
        ]

    def _score(self, item: ScoreItem, result: ScoreResult | PacelineError, seconds: float) -> Score:
        try:
            reward, components = self._weighted(result)
        except PacelineError as error:
            message = f"{self._options.name}: {error}"
            return failed(item.trajectory_id, kind_of(error), message, seconds)
        return Score(trajectory_id=item.trajectory_id, reward=reward, components=components, seconds=seconds)

    def _weighted(self, result: ScoreResult | PacelineError) -> tuple[float, dict[str, float]]:
        if isinstance(result, PacelineError):
            raise result
        name, weight = self._options.name, self._options.weight
        if result.reward is None:
            kind, text = split_error(result.error or "")
            raise RewardError(text, kind=kind)
        reward = weight * result.reward
        if not math.isfinite(reward):
            text = f"{weight:g} times {result.reward:g} is {reward}"
            raise RewardError(text, kind=RewardErrorKind.NOT_FINITE)
        components = {
            name: result.reward,
            **{f"{name}/{key}": value for key, value in result.components.items()},
        }
        if len(components) > MAX_COMPONENTS or any(len(key) > MAX_COMPONENT_CHARS for key in components):
            raise RewardError(
                f"the answer has over {MAX_COMPONENTS} components, or names over {MAX_COMPONENT_CHARS} "
                "characters",
                kind=RewardErrorKind.WRONG_TYPE,
            )
        return reward, components
