"""Learner and rollout servers take turns where they share GPUs: who may use the memory, and the orders.

    any --> ROLLOUT   every server is awake; the learner has given back the memory that it only caches
    any --> LEARNER   every server is asleep
    any --> PUSH      servers have memory for weights, and no KV cache; the learner as in ROLLOUT

A turn is in the journal before its first order. Orders may be repeated, and are at each grant: a member that
has done its part answers at once, and one that came back has missed some. An engine takes its memory when it
starts. So in the learner's turn no server starts its engine, and the turn begins when those that do are up.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
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
from paceline.service.telemetry import span

log = logging.getLogger(__name__)


class Turn(enum.Enum):
    """Who may use the memory of the GPUs."""

    NOBODY = "nobody"
    ROLLOUT = "rollout"
    LEARNER = "learner"
    PUSH = "push"


_PARTS: Final = {
    Turn.ROLLOUT: (EnginePart.WEIGHTS, EnginePart.KV_CACHE),
    Turn.PUSH: (EnginePart.WEIGHTS,),
}


class Turns:
    """Grants turns, one at a time; without effect where engines do not sleep (`rollout.sleep`)."""

    def __init__(
        self, run: Run, supervisor: Supervisor, learner: LearnerClient, rollout: RolloutClient
    ) -> None:
        self._run, self._supervisor = run, supervisor
        self._learner, self._rollout = learner, rollout
        self._are_taken = run.config.rollout.sleep == "always"
        self._turn = Turn.NOBODY
        self._was_learners = run.journal.standing.turn == Turn.LEARNER.value
        self._started: set[tuple[str, str]] = set()
        self._seconds = 0.0

    @property
    def turn(self) -> Turn:
        """The current one."""
        return self._turn

    def may_start(self, member: Member) -> bool:
        """Whether a member may take the memory that it needs from its start on; once said, it stays so."""
        if not self._are_taken or member.kind is not MemberKind.ROLLOUT:
            return True
        name = member.member_id, member.incarnation
        if name not in self._started and self._is_learners:
            return False
        self._started.add(name)
        return True

    @property
    def _is_learners(self) -> bool:
        """Whether the learner may be training, also on the order of a controller that has died."""
        if self._turn is not Turn.NOBODY:
            return self._turn is Turn.LEARNER
        learners = self._supervisor.fleet.usable(MemberKind.LEARNER)
        return self._was_learners and all(m.state in (None, LearnerState.TRAINING) for m in learners)

    async def take(self, turn: Turn) -> None:
        """Grants a turn: returns when every member has done its part.

        A server that cannot is expelled from the fleet.

        Raises:
            PeerLostError, DeadlineError: the learner did not answer, but is not lost.
        """
        if not self._are_taken:
            return
        began, before = time.monotonic(), self._turn
        # Before the first order: from now on `may_start` judges by the new turn.
        self._turn = turn
        if turn is not before:
            self._run.journal.record("turn", holder=turn.value, limit_s=self._limit_s(turn))
        with span("turn", attributes={"paceline.turn": turn.value}):
            if turn is Turn.LEARNER:
                await self._all_started()
                await self._each(self._servers, self._rollout.sleep)
            else:
                await self._free_learner()
                await self._wake(self._servers, _PARTS[turn])
        self._seconds += time.monotonic() - began

    async def wake(self, members: Sequence[Member]) -> None:
        """Wakes servers that came back asleep, in the turn of the rollout servers."""
        if self._are_taken:
            await self._wake(members, _PARTS[Turn.ROLLOUT])

    def take_metrics(self) -> dict[str, float]:
        """Seconds of all orders since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return {"timing_s/turns": seconds} if self._are_taken else {}

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

    async def _free_learner(self) -> None:
        """A learner that is gone or still loading caches nothing."""
        members = self._supervisor.fleet.usable(MemberKind.LEARNER)
        ready = [m for m in members if m.state not in (None, LearnerState.LOADING)]
        for member in ready:
            try:
                await self._learner.free(member)
            except PacelineError:
                if member.usable:
                    raise

    async def _wake(self, members: Sequence[Member], parts: Sequence[EnginePart]) -> None:
        async def wake(member: Member) -> None:
            for part in parts:
                await self._rollout.wake(member, part)

        await self._each(members, wake)

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
