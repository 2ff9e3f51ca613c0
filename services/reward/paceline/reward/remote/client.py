"""Scoring by a service that somebody else runs: the client side of `RewardService.Score`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from paceline.core.errors import (
    DeadlineError,
    InvalidMessageError,
    PacelineError,
    PeerLostError,
    RewardErrorKind,
)
from paceline.core.reward_function import MAX_COMPONENT_CHARS, MAX_COMPONENTS, kind_of, one_line
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.scoring import RETRIED_KINDS, Verdict, failed
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.service import channels
from paceline.service.transport import DEFAULT_MAX_MESSAGE_BYTES
from paceline.wire.protobuf import score_item_to_proto, score_result_from_proto

_log = logging.getLogger(__name__)

_MAX_CALLS = 64
_SPLIT = 16
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
_MESSAGE_SHARE = (
    0.5  # of the largest message: text in UTF-8 and framing make an item larger than its characters
)
_KINDS = {kind.value: kind for kind in RewardErrorKind}


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """How a remote scorer is called.

    Args:
        name: what its component is called.
        address: host:port.
        weight: its share in the sum.
        timeout_s: deadline of one call.
        max_retries: further calls for an item after a timeout or an unreachable service.
        max_items_per_call: largest call.
        max_message_bytes: largest message; calls are cut to stay below it.
        token: what every call carries, for a service that asks for one.
    """

    name: str
    address: str
    weight: float = 1.0
    timeout_s: float = 10.0
    max_retries: int = 2
    max_items_per_call: int = 256
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    token: str = ""


class RemoteScorer:
    """A client of one remote scorer. Whatever the service answers, every item gets one verdict."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._channel: grpc.aio.Channel | None = None
        self._calls = asyncio.Semaphore(_MAX_CALLS)

    async def start(self, *, timeout_s: float) -> bool:
        """Connects; says whether the service could be reached within `timeout_s`. One that is not up may come later."""
        options = self._options
        self._channel = channels.connect(
            options.address, token=options.token, max_message_bytes=options.max_message_bytes
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            _log.warning("reward service %s at %s cannot be reached (yet)", options.name, options.address)
            return False
        return True

    async def close(self) -> None:
        """Lets go of the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Verdict]:
        """One verdict for each item, in the items' order, its reward already weighted.

        Items whose call ran out of time are tried again in ever smaller calls, so that in the end one slow item does not
        take others with it.
        """
        verdicts: dict[int, Verdict] = {}
        pending = list(enumerate(items))
        size = self._options.max_items_per_call
        for attempt in itertools.count():
            calls = [self._call_safely(part, run_id, step) for part in self._cut(pending, size)]
            outcomes = [pair for part in await asyncio.gather(*calls) for pair in part]
            verdicts.update(outcomes)
            retried = {
                index for index, verdict in outcomes if verdict.error and verdict.error[0] in RETRIED_KINDS
            }
            if not retried or attempt >= self._options.max_retries:
                break
            if any(_kind(verdicts[index]) is RewardErrorKind.TIMEOUT for index in retried):
                size = max(1, size // _SPLIT)
            pending = [(index, items[index]) for index in sorted(retried)]
            pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
            _log.info("%s: %d items again in %.2f s", self._options.name, len(pending), pause_s)
            await asyncio.sleep(pause_s)
        return [verdicts[index] for index in range(len(items))]

    def _cut(self, pending: Sequence[tuple[int, ScoreItem]], size: int) -> list[list[tuple[int, ScoreItem]]]:
        """Calls of at most `size` items that stay well below the largest message."""
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

    async def _call_safely(
        self, part: Sequence[tuple[int, ScoreItem]], run_id: str, step: int
    ) -> list[tuple[int, Verdict]]:
        items = [item for _, item in part]
        started = time.monotonic()
        async with self._calls:
            try:
                results = await self._call(items, run_id, step)
            except PacelineError as error:
                seconds = time.monotonic() - started
                kind, message = _call_failed(error), f"{self._options.name}: {error}"
                return [(index, failed(item.trajectory_id, kind, message, seconds)) for index, item in part]
        seconds = time.monotonic() - started
        return [
            (index, self._verdict(item, result, seconds))
            for (index, item), result in zip(part, results, strict=True)
        ]

    async def _call(
        self, items: Sequence[ScoreItem], run_id: str, step: int
    ) -> list[reward_pb2.ScoreResult | None]:
        """The results in the items' order; None for all of them where their count or ids are wrong."""
        assert self._channel is not None, "start() comes first"
        request = reward_pb2.ScoreRequest(
            run_id=run_id, step=step, items=[score_item_to_proto(item) for item in items]
        )
        answer = await channels.call(
            reward_pb2_grpc.RewardServiceStub(self._channel).Score,
            request,
            timeout_s=self._options.timeout_s,
            phase="REWARD",
            peer=f"reward service {self._options.name} at {self._options.address}",
        )
        by_id = {result.trajectory_id: result for result in answer.results}
        wanted = [item.trajectory_id for item in items]
        if len(answer.results) != len(items) or by_id.keys() != set(wanted):
            return [None] * len(items)
        return [by_id[trajectory_id] for trajectory_id in wanted]

    def _verdict(self, item: ScoreItem, message: reward_pb2.ScoreResult | None, seconds: float) -> Verdict:
        name = self._options.name
        if message is None:
            text = f"{name} did not answer with one result for each item, each under its item's trajectory_id"
            return failed(item.trajectory_id, RewardErrorKind.WRONG_COUNT, text, seconds)
        try:
            result = score_result_from_proto(message)
        except InvalidMessageError as error:
            kind = RewardErrorKind.NOT_FINITE if error.reason == "not_finite" else RewardErrorKind.WRONG_TYPE
            return failed(item.trajectory_id, kind, f"{name}: {error}", seconds)
        return self._weighted(result, seconds)

    def _weighted(self, result: ScoreResult, seconds: float) -> Verdict:
        name = self._options.name
        if result.reward is None:
            kind, text = split_error(result.error or "")
            return failed(result.trajectory_id, kind, f"{name}: {text}", seconds)
        reward = self._options.weight * result.reward
        components = {
            name: result.reward,
            **{f"{name}/{key}": value for key, value in result.components.items()},
        }
        if not math.isfinite(reward):
            text = f"{name}: {self._options.weight:g} times {result.reward:g} is {reward}"
            return failed(result.trajectory_id, RewardErrorKind.NOT_FINITE, text, seconds)
        if len(components) > MAX_COMPONENTS or any(len(key) > MAX_COMPONENT_CHARS for key in components):
            text = f"{name} answered with over {MAX_COMPONENTS} components, or names over {MAX_COMPONENT_CHARS} characters"
            return failed(result.trajectory_id, RewardErrorKind.WRONG_TYPE, text, seconds)
        return Verdict(
            trajectory_id=result.trajectory_id, reward=reward, components=components, seconds=seconds
        )


def join_error(kind: RewardErrorKind, message: str) -> str:
    """An error as the one text that `ScoreResult.error` has room for; `split_error` reads it."""
    return f"{kind.value}: {message}"


def split_error(text: str) -> tuple[RewardErrorKind, str]:
    """The kind and the message of a remote error; one that names no kind was raised."""
    word, colon, message = text.partition(": ")
    if colon and word in _KINDS:
        return _KINDS[word], message
    return RewardErrorKind.RAISED, one_line(text)


def _kind(verdict: Verdict) -> RewardErrorKind | None:
    return verdict.error[0] if verdict.error else None


def _call_failed(error: PacelineError) -> RewardErrorKind:
    if isinstance(error, DeadlineError):
        return RewardErrorKind.TIMEOUT
    if isinstance(error, PeerLostError):
        return RewardErrorKind.UNAVAILABLE
    return kind_of(error)
