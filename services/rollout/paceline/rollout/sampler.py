"""Draws samples: takes prompt groups of one policy version from their mailbox, puts trajectories into theirs.

    prompts:vN -> decode, check -> engine -> check -> blobs and headers, one append per group -> trajectories
    -> ack

A sampler is open for one policy at a time, or closed. A group that is not finished when the sampler closes is
not
acknowledged: another server gets it, or its step is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from paceline.broker import names
from paceline.broker.backpressure import append_when_room
from paceline.broker.base import Broker, Entry
from paceline.broker.mailbox import Mailbox
from paceline.core.errors import DeadlineError, InvalidMessageError
from paceline.core.policy import PolicyTag
from paceline.core.trajectory import PromptGroup
from paceline.rollout.capacity import Capacity, SamplerLimits
from paceline.rollout.engines.base import Engine, Sample
from paceline.rollout.trajectories import check_samples, sample_requests, trajectory_messages
from paceline.service import telemetry
from paceline.wire import decode_prompt_group

log = logging.getLogger(__name__)

Spawn = Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]

_BLOCK_S = 1.0


class Sampler:
    """Owns the mailbox of prompts and what is under way in the engine.

    Args:
        server_id: this server's name in trajectories.
        consumer: this process's name in the consumer group; another one after a restart.
        spawn: starts a task whose failure ends the service.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        broker: Broker,
        run_id: str,
        server_id: str,
        consumer: str,
        limits: SamplerLimits,
        spawn: Spawn,
    ) -> None:
        self._engine, self._broker, self._limits = engine, broker, limits
        self._run_id, self._server_id, self._consumer = run_id, server_id, consumer
        self._spawn, self._serials = spawn, itertools.count()
        self._session: asyncio.Task[None] | None = None
        self._draining = False
        self._capacity = Capacity(limits)

    @property
    def in_flight(self) -> int:
        """Samples that the engine draws or that wait for their delivery."""
        return self._capacity.num_samples

    def open(self, policy: PolicyTag) -> None:
        """Begins to take groups of exactly this policy. The sampler must be closed."""
        if self._session is not None:
            raise RuntimeError("the sampler is open: close it first")
        self._session = self._spawn(f"sample {policy}", self._serve(policy))

    async def drain(self) -> None:
        """Takes no more groups, for good, and returns when those under way are delivered."""
        self._draining = True
        if self._session is not None:
            # Ends: a mailbox that is empty is asked for a second, and each group has a deadline.
            await asyncio.wait([self._session])

    async def close(self) -> None:
        """Takes no more groups, aborts those under way, and returns when the engine has none of them left."""
        session, self._session = self._session, None
        if session is None:
            return
        if self._capacity.num_groups:
            log.info("aborting %d groups that are under way", self._capacity.num_groups)
        session.cancel()
        # Ends: the engine answers or dies, and each group has a deadline.
        await asyncio.wait([session])

    async def _serve(self, policy: PolicyTag) -> None:
        stream = names.prompts(self._run_id, policy.version)
        box = Mailbox(
            self._broker,
            stream,
            names.ROLLOUT_GROUP,
            self._consumer,
            lease_s=self._limits.lease_s,
            block_s=_BLOCK_S,
        )
        try:
            async with box, asyncio.TaskGroup() as tasks:
                while not self._draining:
                    num_groups = await self._capacity.wait_for_room()
                    for entry in await box.take(num_groups):
                        group = self._admit(entry, policy)
                        if group is not None:
                            self._capacity.group_began(group)
                            work = self._work(box, entry, group)
                            tasks.create_task(work, name=f"prompt {group.prompt_id}")
        except BaseExceptionGroup as failures:
            # One cause is enough: the rest was cancelled for it.
            raise failures.exceptions[0] from None
        finally:
            # A task that was cancelled before its first step has counted nothing down.
            self._capacity.clear()

    def _admit(self, entry: Entry, policy: PolicyTag) -> PromptGroup | None:
        """The group of an entry, or None if it is refused: it then stays unacknowledged."""
        try:
            group = decode_prompt_group(entry.payload, vocab_size=self._engine.vocab_size)
        except InvalidMessageError as error:
            _refuse(entry, error.reason, str(error))
            return None
        if group.run_id != self._run_id:
            detail = f"the group is of run {group.run_id}, this server of run {self._run_id}"
            _refuse(entry, "wrong_run", detail)
            return None
        if group.policy != policy:
            detail = f"prompt {group.prompt_id} wants {group.policy}, this server holds {policy}"
            _refuse(entry, "wrong_policy", detail)
            return None
        return group

    async def _work(self, box: Mailbox, entry: Entry, group: PromptGroup) -> None:
        attributes: dict[str, str | int] = {
            "paceline.step": group.step,
            "paceline.prompt_id": group.prompt_id,
            "paceline.num_samples": group.num_samples,
            "paceline.policy": str(group.policy),
        }
        undrawn, delivering = group.num_samples, 0

        def sample_ended() -> None:
            nonlocal undrawn
            undrawn -= 1
            self._capacity.samples_ended(1)

        try:
            with telemetry.span("rollout.generate", traceparent=entry.traceparent, attributes=attributes):
                started = time.monotonic()
                samples = await self._draw(group, sample_ended)
                delivering = len(samples)
                self._capacity.delivery_began(delivering)
                seconds = time.monotonic() - started
                await append_when_room(
                    self._broker,
                    trajectory_messages(group, samples, server_id=self._server_id, seconds=seconds),
                    max_length=self._limits.max_stream_length,
                    timeout_s=self._limits.append_timeout_s,
                )
            await box.done([entry])
        except InvalidMessageError as error:
            _refuse(entry, error.reason, str(error))
        finally:
            self._capacity.group_ended(undrawn=undrawn, delivering=delivering)

    async def _draw(self, group: PromptGroup, sample_ended: Callable[[], None]) -> list[Sample]:
        try:
            async with asyncio.timeout(self._limits.group_timeout_s):
                samples = await self._engine.generate(
                    sample_requests(group, next(self._serials)), sample_ended
                )
        except TimeoutError as error:
            raise DeadlineError(
                phase=f"GENERATE prompt {group.prompt_id}",
                peer="engine",
                seconds=self._limits.group_timeout_s,
                hint="the engine hangs, or rollout.request_timeout_s is too short for the response length",
            ) from error
        check_samples(group, samples)
        return samples


def _refuse(entry: Entry, reason: str, detail: str) -> None:
    log.error("refused: reason=%s stream=%s entry=%s: %s", reason, entry.stream, entry.entry_id, detail)
