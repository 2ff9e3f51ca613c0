"""Manages an environment's open episodes: fencing by attempts, stored answers, leases.

    open(attempt) -> step(turn 1) -> step(turn 2) ... -> close
        |  a higher attempt of the same trajectory frees the lower one, whose calls are refused from then on
        `  no call for lease_s: freed

A session ends with its lease even if the rollout server never closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import ProtocolError
from paceline.core.samples.chat import Message, ToolSpec
from paceline.sdk.environment import Environment, Observation, Outcome, specs_for

_log = logging.getLogger(__name__)

_RELEASE_S = 10.0
_MAX_LEASE_S = 24 * 3600.0
_MAX_ENDED = 10_000

Key = tuple[str, str]
"""Run id and trajectory id."""


@dataclass(slots=True, eq=False)
class HostedEpisode:
    """One attempt at an episode, with the stored answers."""

    environment: Environment
    attempt: int
    lease_s: float
    touched: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    opened: tuple[Observation, list[ToolSpec]] | None = None
    turn: int = 0
    observed: Observation | None = None
    outcome: Outcome | None = None
    running: asyncio.Task[str] | None = None
    is_freed: bool = False


class Sessions:
    """All episodes of a server.

    Args:
        make: makes an environment for an episode.
        max_episodes: most episodes open at a time.
        clock: measures the leases.
    """

    def __init__(
        self, make: Callable[[], Environment], max_episodes: int, clock: Clock | None = None
    ) -> None:
        self._make, self.max_episodes, self._clock = make, max_episodes, clock or SystemClock()
        self._open: dict[Key, HostedEpisode] = {}
        self._ended: dict[Key, tuple[int, Outcome | None]] = {}

    @property
    def num_open(self) -> int:
        """Number of episodes that hold an instance."""
        return len(self._open)

    async def open(
        self,
        key: Key,
        attempt: int,
        task: Mapping[str, Any],
        *,
        task_seed: int,
        episode_seed: int,
        lease_s: float,
    ) -> tuple[Observation, list[ToolSpec]]:
        """Opens an episode, or returns the first answer again.

        Raises:
            ProtocolError: a higher attempt was opened, this one was closed, or too many episodes are open.
        """
        session = self._open.get(key)
        if session is not None and session.attempt < attempt:
            await self._free(key, session)
            session = None
        if session is None:
            session = self._begin(key, attempt, lease_s)
        self._check_attempt(key, session, attempt)
        async with self._using(key, session):
            if session.opened is None:
                said = await session.environment.open(task, task_seed=task_seed, episode_seed=episode_seed)
                session.opened = said, specs_for(session.environment, said.tools)
            return session.opened

    async def step(self, key: Key, attempt: int, turn: int, action: Message) -> Observation:
        """Answers a turn; a repeated turn gets the same answer.

        Raises:
            ProtocolError: the episode is not open in this attempt, or the turn is not the next one.
        """
        session = self._of(key, attempt)
        async with self._using(key, session):
            if turn == session.turn and session.observed is not None:
                return session.observed
            if turn != session.turn + 1 or session.opened is None:
                raise ProtocolError(
                    f"turn {turn} of {key[1]} is not the next one: {session.turn} turns were answered"
                )
            session.observed = await session.environment.step(action)
            session.turn = turn
            return session.observed

    async def run(self, key: Key, attempt: int, *, base_url: str, token: str, model: str) -> str:
        """Lets the environment drive the episode; returns its stop reason. A lost caller ends the episode.

        Raises:
            ProtocolError: the episode is not open in this attempt, or was already run in it.
        """
        session = self._of(key, attempt)
        async with self._using(key, session):
            if session.running is not None or session.opened is None:
                raise ProtocolError(f"attempt {attempt} of {key[1]} has been run, or is not opened")
            session.running = asyncio.create_task(
                session.environment.run(base_url=base_url, token=token, model=model), name=f"run {key[1]}"
            )
            try:
                return str(await session.running or "")
            except asyncio.CancelledError:
                await self._free(key, session)
                raise

    async def close(self, key: Key, attempt: int, stop_reason: str, *, graded: bool) -> Outcome | None:
        """Grades an episode if `graded`, and frees it; a repeated call gets the same answer.

        Raises:
            ProtocolError: the episode is neither open in this attempt nor closed in it.
        """
        ended, outcome = self._ended.get(key, (0, None))
        if ended == attempt and (outcome is not None or not graded):
            return outcome
        session = self._of(key, attempt)
        async with self._using(key, session):
            if graded and session.outcome is None:
                session.outcome = await session.environment.close(stop_reason)
            await self._free(key, session)
            return session.outcome

    async def expire(self) -> int:
        """Frees the episodes whose lease has expired; returns their number."""
        now = self._clock.monotonic()
        late = [
            (key, session)
            for key, session in self._open.items()
            if not session.lock.locked() and now - session.touched > session.lease_s
        ]
        for key, session in late:
            _log.warning(
                "episode %s attempt %d: no call for %g s, freed", key[1], session.attempt, session.lease_s
            )
            await self._free(key, session)
        return len(late)

    async def close_all(self) -> None:
        """Frees the environments of all sessions."""
        for key, session in list(self._open.items()):
            await self._free(key, session)

    def _begin(self, key: Key, attempt: int, lease_s: float) -> HostedEpisode:
        ended = self._ended.get(key, (0, None))[0]
        if attempt <= ended:
            raise ProtocolError(f"attempt {attempt} of {key[1]} is over: attempt {ended} was closed")
        if self.num_open >= self.max_episodes:
            raise ProtocolError(f"{self.num_open} episodes are open, as many as there may be (max_episodes)")
        session = HostedEpisode(
            environment=self._make(),
            attempt=attempt,
            lease_s=min(max(lease_s, 1.0), _MAX_LEASE_S),
            touched=self._clock.monotonic(),
        )
        self._open[key] = session
        return session

    def _of(self, key: Key, attempt: int) -> HostedEpisode:
        session = self._open.get(key)
        if session is None:
            raise ProtocolError(
                f"episode {key[1]} is not open: its lease ran out, or this server has restarted"
            )
        self._check_attempt(key, session, attempt)
        return session

    def _check_attempt(self, key: Key, session: HostedEpisode, attempt: int) -> None:
        if session.attempt != attempt:
            raise ProtocolError(
                f"attempt {attempt} of {key[1]} is over: attempt {session.attempt} has been opened"
            )

    @contextlib.asynccontextmanager
    async def _using(self, key: Key, session: HostedEpisode) -> AsyncIterator[None]:
        """Admits one call at a time; the lease restarts after the call."""
        async with session.lock:
            if self._open.get(key) is not session:
                raise ProtocolError(f"attempt {session.attempt} of {key[1]} is over")
            try:
                yield
            finally:
                session.touched = self._clock.monotonic()

    async def _free(self, key: Key, session: HostedEpisode) -> None:
        """Ends a session that has not ended yet."""
        if session.is_freed:
            return
        session.is_freed = True
        if self._open.get(key) is session:
            del self._open[key]
        self._ended.pop(key, None)
        self._ended[key] = session.attempt, session.outcome
        while len(self._ended) > _MAX_ENDED:
            self._ended.pop(next(iter(self._ended)))
        try:
            async with asyncio.timeout(_RELEASE_S):
                if session.running is not None and session.running.cancel():
                    await asyncio.wait([session.running])
                await session.environment.release()
        except Exception as error:  # noqa: BLE001  user code; the session is gone in any case
            _log.warning("episode %s: release raised %s: %s", key[1], type(error).__name__, error)
