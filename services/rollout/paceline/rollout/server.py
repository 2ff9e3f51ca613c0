"""A rollout server: its standing, and the order in which weights come in and the sampler opens and closes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import ProtocolError, VersionMismatchError
from paceline.core.members import RolloutState
from paceline.core.policy import PolicyTag
from paceline.rollout import states
from paceline.rollout.engines.base import Engine
from paceline.rollout.engines.vllm.weight_receiver import WeightReceiver
from paceline.rollout.sampler import Sampler
from paceline.rollout.states import Standing
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.receipt import PushReceipt

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a server works with once its engine is up."""

    engine: Engine
    receiver: WeightReceiver
    sampler: Sampler
    join_timeout_s: float
    push_timeout_s: float


class RolloutServer:
    """Does what the controller orders, one order at a time.

    Args:
        on_change: called after every change of the standing, say to send a heartbeat.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._standing = Standing()
        self._parts: Parts | None = None
        self._epoch: int | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def standing(self) -> Standing:
        """State, received version and policy."""
        return self._standing

    @property
    def in_flight(self) -> int:
        """Samples under way."""
        return self._parts.sampler.in_flight if self._parts is not None else 0

    def start(self, parts: Parts) -> None:
        """The engine is up: JOINING -> STALE."""
        self._move(states.EngineReady())
        self._parts = parts

    async def describe(self) -> list[RankLayout]:
        """What each rank of the engine needs of the weights."""
        async with self._one_at_a_time:
            return await self._ready().receiver.describe()

    async def join(self, epoch: int, spec: bytes, rank_offset: int) -> None:
        """Takes part in forming the weight group of a membership epoch; every other rank must do so meanwhile."""
        async with self._one_at_a_time:
            parts = self._ready()
            self._epoch = None
            await parts.receiver.join(spec, rank_offset, parts.join_timeout_s)
            self._epoch = epoch

    async def leave(self, epoch: int) -> None:
        """Lets go of an epoch's weight group; one that is over already is no error."""
        async with self._one_at_a_time:
            if self._epoch == epoch:
                self._epoch = None
                await self._ready().receiver.leave()

    async def receive(self, epoch: int, version: int) -> PushReceipt:
        """Closes the gate, ends what is under way, receives a version. -> SYNCING, or STALE where it fails.

        Raises:
            VersionMismatchError: this server is not in the group of `epoch`.
            DeadlineError, PeerLostError, WeightSyncError: the push broke off; join a new group.
        """
        async with self._one_at_a_time:
            parts = self._ready()
            if self._epoch != epoch:
                raise VersionMismatchError(
                    f"this server is in weight group {self._epoch}, the push is for group {epoch}: join that one first"
                )
            self._move(states.ReceiveBegan())
            try:
                await parts.sampler.close()
                receipt = await parts.receiver.receive(version, parts.push_timeout_s)
            except BaseException:
                # Also when the caller hangs up: some ranks may hold the new version and others the old one.
                self._epoch = None
                self._move(states.ReceiveFailed())
                raise
            self._move(states.ReceiveEnded(version))
            return receipt

    async def commit(self, policy: PolicyTag) -> None:
        """Makes the received version the policy and begins to take its prompts. SYNCING -> SERVING; may be repeated.

        Raises:
            VersionMismatchError: another version was received, or none.
        """
        async with self._one_at_a_time:
            parts, before = self._ready(), self._standing
            after = states.advance(before, states.Committed(policy))
            if after is before:
                return
            # The receive reset the prefix cache, and the gate has been closed since: nothing can be in it.
            self._move(states.Committed(policy))
            parts.sampler.open(policy)

    async def forget(self) -> None:
        """The controller does not know this server any more: its weights count for nothing until the next push."""
        async with self._one_at_a_time:
            if self._standing.state in (RolloutState.SYNCING, RolloutState.SERVING):
                self._move(states.Forgotten())
                await self._ready().sampler.close()

    def _ready(self) -> Parts:
        if self._parts is None:
            raise ProtocolError(
                "the engine of this server is still loading; ask again when its state is stale"
            )
        return self._parts

    def _move(self, event: states.Event) -> None:
        before, self._standing = self._standing, states.advance(self._standing, event)
        after = self._standing
        if after == before:
            return
        if after.state is not before.state:
            policy = f" {after.policy}" if after.policy else ""
            log.info("%s -> %s%s", before.state.value, after.state.value, policy)
        self._on_change()
