"""Turns of learner and rollout servers on shared GPUs: who may use the memory, and the orders to the members.

    any --> ROLLOUT   every server is awake; the learner has given back memory that it only caches, if needed
    any --> LEARNER   every server is asleep
    any --> PUSH      servers have memory for weights, and no KV cache; the learner as in ROLLOUT

A turn is written to the journal before its first order. Each grant sends all orders, even if the turn is
repeated: a member that has done its part answers at once, and a restarted member has missed some. An engine
takes its memory when it starts; so the learner's turn begins only when no engine is starting, and no engine
starts during it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from paceline.controller.fleet.clients import LearnerClient, RolloutClient, while_alive
from paceline.controller.fleet.membership import Member
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.progress import Run
from paceline.core.errors import PacelineError
from paceline.core.members import (
    RECEIVABLE_STATES,
    EnginePart,
    LearnerState,
    MemberKind,
    RolloutState,
)
from paceline.service.observability.telemetry import span

log = logging.getLogger(__name__)

KINDS: Final = ("sleep", "free", "wake_weights", "wake_kv_cache")
"""The kinds of orders, as metrics name them."""


class Turn(enum.Enum):
    """Who may use the memory of the GPUs."""

    NOBODY = "nobody"
    ROLLOUT = "rollout"
    LEARNER = "learner"
    PUSH = "push"


class _Clock:
    """Seconds by kind of order; orders to several members at once count once."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.freed_bytes = 0

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, time.monotonic() - began)

    def add(self, kind: str, seconds: float) -> None:
        """Adds seconds to a kind of order; "" is the total."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    @property
    def metrics(self) -> dict[str, float]:
        """`timing_s/turns`, its share of each kind, and `perf/freed_gib`."""
        total, sleep, free, weights, cache = (self._seconds.get(kind, 0.0) for kind in ("", *KINDS))
        return {
            "timing_s/turns": total,
            "timing_s/turns/sleep": sleep,
            "timing_s/turns/free": free,
            "timing_s/turns/wake_weights": weights,
            "timing_s/turns/wake_kv_cache": cache,
            "perf/freed_gib": self.freed_bytes / 2**30,
        }


async def _both(first: Coroutine[Any, Any, Any], second: Coroutine[Any, Any, Any]) -> None:
    """Awaits both; if both fail, raises the error of the first."""
    for outcome in await asyncio.gather(first, second, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


_PARTS: Final = {
    Turn.ROLLOUT: (EnginePart.WEIGHTS, EnginePart.KV_CACHE),
    Turn.PUSH: (EnginePart.WEIGHTS,),
}


class Turns:
    """Grants turns, one at a time; without effect if engines do not sleep (`rollout.sleep`).

    Attributes:
        turn: whether learner, engines or nobody may use the GPUs now.
    """

    def __init__(
        self, run: Run, supervisor: Supervisor, learner: LearnerClient, rollout: RolloutClient
    ) -> None:
        self._run, self._supervisor = run, supervisor
        self._learner, self._rollout = learner, rollout
        self._are_taken = run.config.rollout.sleep == "always"
        self.turn = Turn.NOBODY
        self._was_learners = run.journal.standing.turn == Turn.LEARNER.value
        self._started: set[tuple[str, str]] = set()
        self._clock = _Clock()
        self._engine_bytes = 0

    def may_start(self, member: Member) -> bool:
        """Returns whether a member may start and thereby take memory; a permission is never withdrawn."""
        if not self._are_taken or member.kind is not MemberKind.ROLLOUT:
            return True
        name = member.member_id, member.incarnation
        if name not in self._started and self._is_learners:
            return False
        self._started.add(name)
        return True

    @property
    def _is_learners(self) -> bool:
        """Returns whether the learner may be training, possibly on an order of a controller that has died."""
        if self.turn is not Turn.NOBODY:
            return self.turn is Turn.LEARNER
        learners = self._supervisor.fleet.usable(MemberKind.LEARNER)
        return self._was_learners and all(m.state in (None, LearnerState.TRAINING) for m in learners)

    async def take(self, turn: Turn) -> None:
        """Grants a turn: returns when every member has done its part.

        A server that cannot do its part is expelled from the fleet.

        Raises:
            PeerLostError, DeadlineError: the learner did not answer, but is not lost.
        """
        if not self._are_taken:
            return
        began, before = time.monotonic(), self.turn
        # Before the first order: from now on `may_start` judges by the new turn.
        self.turn = turn
        if turn is not before:
            self._run.journal.record("turn", holder=turn.value, limit_s=self._limit_s(turn))
        with span("turn", attributes={"paceline.turn": turn.value}):
            if turn is Turn.LEARNER:
                await self._all_started()
                with self._clock.timed("sleep"):
                    await self._each(self._servers, self._sleep)
            elif turn is Turn.PUSH:
                # The remaining memory is freed while the weights wake.
                short = await self._free_learner((EnginePart.WEIGHTS,))
                await _both(self._wake(self._servers, _PARTS[turn]), self._free(short, ()))
            else:
                await self._free_learner(self._lacking)
                await self._wake(self._servers, _PARTS[turn])
        self._clock.add("", time.monotonic() - began)

    async def wake(self, members: Sequence[Member]) -> None:
        """Wakes servers that came back asleep, in the turn of the rollout servers."""
        if self._are_taken:
            await self._wake(members, _PARTS[Turn.ROLLOUT])

    def take_metrics(self) -> dict[str, float]:
        """Returns the seconds of all orders since the last call, in total and by kind, and freed memory."""
        clock, self._clock = self._clock, _Clock()
        return clock.metrics if self._are_taken else {}

    @property
    def _servers(self) -> list[Member]:
        members = self._supervisor.fleet.usable(MemberKind.ROLLOUT)
        return [member for member in members if member.state in RECEIVABLE_STATES]

    def _limit_s(self, turn: Turn) -> float:
        config = self._run.config
        return {
            Turn.ROLLOUT: config.collect_timeout_s,
            Turn.LEARNER: config.learner.command_timeout_s,
            Turn.PUSH: config.weights.push_timeout_s,
        }[turn]

    async def _all_started(self) -> None:
        """Returns when no server is starting its engine, or about to leave with it."""

        def is_busy(member: Member) -> bool:
            if member.state is RolloutState.DRAINING:
                return True
            starting = member.state in (None, RolloutState.JOINING)
            return starting and (member.member_id, member.incarnation) in self._started

        timeout_s = self._run.config.service.startup_timeout_s
        for member in await self._supervisor.still_busy(MemberKind.ROLLOUT, is_busy, timeout_s):
            await self._supervisor.expel(
                member, f"it holds up the learner's turn: not ready within {timeout_s:g} s"
            )

    @property
    def _lacking(self) -> Sequence[EnginePart]:
        """Returns the parts of engines for which waking servers may lack memory."""
        asleep = any(member.state is RolloutState.ASLEEP for member in self._servers)
        return tuple(EnginePart) if asleep else (EnginePart.KV_CACHE,)

    async def _free_learner(self, parts: Sequence[EnginePart]) -> list[Member]:
        """Makes room for these parts; returns learners that still hold too much memory for a complete engine.

        A learner that is gone or still loading caches nothing.
        """
        members = self._supervisor.fleet.usable(MemberKind.LEARNER)
        return await self._free([m for m in members if m.state not in (None, LearnerState.LOADING)], parts)

    async def _free(self, learners: Sequence[Member], parts: Sequence[EnginePart]) -> list[Member]:
        short = []
        for member in learners:
            try:
                with self._clock.timed("free"):
                    room = await self._learner.free(member, parts, self._engine_bytes)
            except PacelineError:
                if member.usable:
                    raise
            else:
                self._clock.freed_bytes += room.freed_bytes
                if not room.is_enough:
                    short.append(member)
        return short

    async def _sleep(self, member: Member) -> None:
        self._engine_bytes = max(self._engine_bytes, await self._rollout.sleep(member))

    async def _wake(self, members: Sequence[Member], parts: Sequence[EnginePart]) -> None:
        for part in parts:
            with self._clock.timed(f"wake_{part.value}"):
                await self._each(
                    [member for member in members if member.usable],
                    functools.partial(self._rollout.wake, part=part),
                )

    async def _each(
        self, members: Sequence[Member], order: Callable[[Member], Coroutine[Any, Any, None]]
    ) -> None:
        """Orders all members at once; expels those that fail."""
        calls = (while_alive(member, order(member), self._supervisor.gone) for member in members)
        for member, outcome in zip(
            members, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, PacelineError):
                await self._supervisor.expel(member, f"{type(outcome).__name__}: {outcome}")
            elif isinstance(outcome, BaseException):
                raise outcome
