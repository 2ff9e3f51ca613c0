"""A rollout server: its state, and the order in which weights arrive and the sampler closes and opens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import IllegalTransitionError, ProtocolError, VersionMismatchError
from paceline.core.members import EnginePart, RolloutState
from paceline.core.policy import PolicyTag
from paceline.rollout import states
from paceline.rollout.engines.base import Engine
from paceline.rollout.sampler import Sampler
from paceline.rollout.states import RolloutStatus
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of a server, once its engine is up."""

    engine: Engine
    sampler: Sampler
    join_timeout_s: float
    push_timeout_s: float


class RolloutServer:
    """Carries out the controller's orders, one at a time.

    Args:
        on_change: called after every change of the state, for example to send a heartbeat.

    Attributes:
        standing: state, received version and policy.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.standing = RolloutStatus()
        self._parts: Parts | None = None
        self._epoch: int | None = None
        self._order_lock = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Returns the number of samples under way; 0 without an engine."""
        return self._parts.sampler.in_flight if self._parts is not None else 0

    def start(self, parts: Parts) -> None:
        """Takes the parts once the engine is up. JOINING -> STALE."""
        self._move(states.EngineReady())
        self._parts = parts

    async def describe(self) -> tuple[RankLayout, ...]:
        """Returns which part of which checkpoint tensor each rank of the engine needs.

        A controller dissolves its group before it forms another. If this server is still in a group, the
        controller of that group has died, so the server leaves it.
        """
        async with self._order_lock:
            engine = self._ready().engine
            if self._epoch is not None:
                self._epoch = None
                await engine.leave()
            return await engine.describe()

    async def join(self, epoch: int, spec: WeightGroupSpec, rank_offset: int) -> None:
        """Joins the weight group of a membership epoch; every other rank must join at the same time."""
        async with self._order_lock:
            parts = self._ready()
            if EnginePart.WEIGHTS in self.standing.asleep:
                raise IllegalTransitionError("a server that is asleep joins no weight group; wake it first")
            self._epoch = None
            await parts.engine.join(spec, rank_offset, parts.join_timeout_s)
            self._epoch = epoch

    async def leave(self, epoch: int) -> None:
        """Leaves an epoch's weight group; no error if this server is not in it."""
        async with self._order_lock:
            if self._epoch == epoch:
                self._epoch = None
                if self.standing.state is not RolloutState.DRAINING:
                    # A draining server's engine is about to end, and the group with it.
                    await self._ready().engine.leave()

    async def receive(self, epoch: int, version: int) -> PushReceipt:
        """Pauses or closes the sampler and receives a version. -> SYNCING, or STALE if it fails.

        Raises:
            VersionMismatchError: this server is not in the group of `epoch`.
            DeadlineError, PeerLostError, WeightSyncError: the receive failed; join a new group.
        """
        async with self._order_lock:
            parts = self._ready()
            if self._epoch != epoch:
                raise VersionMismatchError(
                    f"this server is in weight group {self._epoch}, but the push is for group {epoch}: "
                    "join that group first"
                )
            self._move(states.ReceiveBegan())
            try:
                await parts.sampler.make_way(version)
                receipt = await parts.engine.receive(version, parts.push_timeout_s)
            except BaseException:
                # Even if the caller hung up, some ranks may have the new version and others the old one.
                self._epoch = None
                self._move(states.ReceiveFailed())
                raise
            self._move(states.ReceiveEnded(version))
            return receipt

    async def sleep(self) -> int:
        """Closes the sampler, frees the engine's memory and returns its bytes. -> ASLEEP; may be repeated."""
        async with self._order_lock:
            parts = self._ready()
            self._move(states.Slept())
            await parts.sampler.close()
            return await parts.engine.sleep()

    async def wake(self, part: EnginePart) -> None:
        """Takes a part of the engine's memory again, the weights first. ASLEEP -> STALE; may be repeated."""
        async with self._order_lock:
            parts = self._ready()
            after = states.advance(self.standing, states.Woken(part))
            if after is not self.standing:
                await parts.engine.wake(part)
                self._move(states.Woken(part))

    async def commit(self, policy: PolicyTag) -> None:
        """Makes the received version the policy and opens the sampler. SYNCING -> SERVING; may be repeated.

        Raises:
            VersionMismatchError: another version was received, or none.
        """
        async with self._order_lock:
            parts, before = self._ready(), self.standing
            after = states.advance(before, states.Committed(policy))
            if after is before:
                return
            # With a closed sampler, the receive reset the prefix cache, which has been empty since.
            if parts.sampler.is_paused:
                await parts.sampler.resume(policy)
            else:
                parts.sampler.open(policy)
            self._move(states.Committed(policy))

    async def forget(self) -> None:
        """Makes the server stale until the next push, because the controller lost its registration."""
        async with self._order_lock:
            if self.standing.state in (RolloutState.SYNCING, RolloutState.SERVING):
                self._move(states.Forgotten())
            if self._parts is not None:
                await self._parts.sampler.close()

    async def drain(self) -> None:
        """Takes no more prompts; returns when the groups under way are delivered. -> DRAINING, for good."""
        async with self._order_lock:
            self._move(states.Drained())
        if self._parts is not None:
            await self._parts.sampler.drain()

    def _ready(self) -> Parts:
        if self._parts is None:
            raise ProtocolError(
                "the engine of this server is still loading; ask again when its state is stale"
            )
        return self._parts

    def _move(self, event: states.Event) -> None:
        before, self.standing = self.standing, states.advance(self.standing, event)
        after = self.standing
        if after == before:
            return
        if after.state is not before.state:
            policy = f" {after.policy}" if after.policy else ""
            log.info("%s -> %s%s", before.state.value, after.state.value, policy)
        self._on_change()
