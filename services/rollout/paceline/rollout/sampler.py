"""The actor that draws samples: prompt groups of one policy version in, trajectories out.

    prompts:vN -> (decode, check) -> engine -> (blobs + headers, one append a group) -> trajectories -> ack

It is open for one policy at a time, or closed. A group that is not finished when it closes is not acknowledged: it goes to another
server, or belongs to a step that is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.broker import names
from paceline.broker.backpressure import append_when_room
from paceline.broker.base import Broker, Entry, Outgoing
from paceline.broker.mailbox import Mailbox
from paceline.config.run import RunConfig
from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import DeadlineError, InvalidMessageError, NumericsError, PeerLostError
from paceline.core.policy import PolicyTag
from paceline.core.trajectory import FinishReason, PromptGroup, Trajectory, TrajectoryHeader
from paceline.rollout.engines.base import Engine, Sample, SampleRequest
from paceline.service import telemetry
from paceline.wire import decode_prompt_group, encode_trajectory, encode_trajectory_header

log = logging.getLogger(__name__)

Spawn = Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]

_TAKE = 8
"""Groups taken at once: few, so that servers that share a mailbox share the work too."""

_BLOCK_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerLimits:
    """How much is under way at once, and for how long.

    Args:
        num_samples: as many as the engine decodes at once: nothing more is begun while so many have not ended, for what waited in one
            server's engine could have been decoded by another; nor while so many wait for room in the mailbox.
        num_groups: most groups, whatever their size.
        group_size: samples per group, until the first groups say otherwise.
        group_timeout_s: longest that one group may take in the engine.
        lease_s, max_stream_length, append_timeout_s: of the mailboxes.
    """

    num_samples: int
    num_groups: int
    group_size: int
    group_timeout_s: float
    lease_s: float
    max_stream_length: int
    append_timeout_s: float

    @classmethod
    def of(cls, config: RunConfig) -> SamplerLimits:
        """What the configuration says."""
        rollout = config.rollout
        return cls(
            num_samples=rollout.max_num_seqs,
            num_groups=rollout.max_groups_in_flight or 2**31,
            group_size=rollout.n,
            group_timeout_s=rollout.request_timeout_s,
            lease_s=config.broker.lease_s,
            max_stream_length=config.broker.max_stream_length,
            append_timeout_s=config.barrier.stall_timeout_s,
        )


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
        clock: Clock | None = None,
    ) -> None:
        self._engine, self._broker, self._limits = engine, broker, limits
        self._run_id, self._server_id, self._consumer = run_id, server_id, consumer
        self._spawn, self._clock = spawn, clock or SystemClock()
        self._serials = itertools.count()
        self._session: asyncio.Task[None] | None = None
        self._finishing = asyncio.Event()
        self._room = asyncio.Event()
        self._num_samples = self._num_drawn = self._num_groups = 0
        self._group_size = limits.group_size

    @property
    def in_flight(self) -> int:
        """Samples that have not ended, or have not been handed on."""
        return self._num_samples + self._num_drawn

    def open(self, policy: PolicyTag) -> None:
        """Begins to take groups of exactly this policy. It must be closed."""
        if self._session is not None:
            raise RuntimeError("the sampler is open: close it first")
        self._finishing.clear()
        self._session = self._spawn(f"sample {policy}", self._serve(policy))

    async def close(self, *, finish: bool = False) -> None:
        """Takes no more groups and returns when the engine has nothing left of ours.

        Args:
            finish: bring to an end what is under way; otherwise it is aborted, and its groups stay unacknowledged.
        """
        session, self._session = self._session, None
        if session is None:
            return
        if finish:
            self._finishing.set()
        else:
            if self._num_groups:
                log.info("aborting %d groups that are under way", self._num_groups)
            session.cancel()
        # The engine answers or dies, each group has a deadline: this ends.
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
        self._num_samples = self._num_drawn = self._num_groups = 0
        self._room.set()
        try:
            async with box, asyncio.TaskGroup() as groups:
                while not self._finishing.is_set():
                    for entry in await self._next(box):
                        group = self._admit(entry, policy)
                        if group is not None:
                            self._begun(group)
                            work = self._work(box, entry, group)
                            groups.create_task(work, name=f"prompt {group.prompt_id}")
        except BaseExceptionGroup as failed:
            # One cause is enough: the rest was cancelled for it.
            raise failed.exceptions[0] from None
        finally:
            self._num_samples = self._num_drawn = self._num_groups = 0

    async def _next(self, box: Mailbox) -> Sequence[Entry]:
        """What to begin with next: waits for room, then for groups; [] where there was none or it is time to finish."""
        finishing = asyncio.ensure_future(self._finishing.wait())
        taking = asyncio.ensure_future(self._take(box))
        try:
            await asyncio.wait([finishing, taking], return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else []
        finally:
            finishing.cancel()
            if taking.cancel():
                await asyncio.wait([taking])

    async def _take(self, box: Mailbox) -> Sequence[Entry]:
        limits = self._limits
        while (
            max(self._num_samples, self._num_drawn) >= limits.num_samples
            or self._num_groups >= limits.num_groups
        ):
            self._room.clear()
            await self._room.wait()
        fitting = math.ceil((limits.num_samples - self._num_samples) / self._group_size)
        return await box.take(min(fitting, limits.num_groups - self._num_groups, _TAKE))

    def _begun(self, group: PromptGroup) -> None:
        self._num_groups += 1
        self._num_samples += group.num_samples
        self._group_size = group.num_samples

    def _ended(self, *, samples: int = 0, groups: int = 0) -> None:
        self._num_samples -= samples
        self._num_groups -= groups
        self._room.set()

    def _admit(self, entry: Entry, policy: PolicyTag) -> PromptGroup | None:
        """The group of an entry; None where it is refused: it then stays with this server, unacknowledged, until it closes."""
        try:
            group = decode_prompt_group(entry.payload, vocab_size=self._engine.vocab_size)
        except InvalidMessageError as error:
            _refuse(entry, error.reason, str(error))
            return None
        if group.run_id != self._run_id:
            _refuse(
                entry, "wrong_run", f"the group is of run {group.run_id}, this server of run {self._run_id}"
            )
            return None
        if group.policy != policy:
            _refuse(
                entry,
                "wrong_policy",
                f"prompt {group.prompt_id} wants {group.policy}, this server holds {policy}",
            )
            return None
        return group

    async def _work(self, box: Mailbox, entry: Entry, group: PromptGroup) -> None:
        attributes: dict[str, str | int] = {
            "paceline.step": group.step,
            "paceline.prompt_id": group.prompt_id,
            "paceline.num_samples": group.num_samples,
            "paceline.policy": str(group.policy),
        }
        unfinished, drawn = group.num_samples, 0

        def ended() -> None:
            nonlocal unfinished
            unfinished -= 1
            self._ended(samples=1)

        try:
            with telemetry.span("rollout.generate", traceparent=entry.traceparent, attributes=attributes):
                started = self._clock.monotonic()
                samples = await self._draw(group, ended)
                drawn = len(samples)
                self._num_drawn += drawn
                messages = self._messages(group, samples, self._clock.monotonic() - started)
                await append_when_room(
                    self._broker,
                    messages,
                    max_length=self._limits.max_stream_length,
                    timeout_s=self._limits.append_timeout_s,
                )
            await box.done([entry])
        except InvalidMessageError as error:
            _refuse(entry, error.reason, str(error))
        finally:
            self._num_drawn -= drawn
            self._ended(samples=unfinished, groups=1)

    async def _draw(self, group: PromptGroup, ended: Callable[[], None]) -> list[Sample]:
        salt, prompt = str(group.policy), group.prompt_token_ids.tolist()
        serial = next(self._serials)
        requests = [
            SampleRequest(
                # The serial, because a group may come twice while its first delivery is still under way.
                request_id=f"{group.trajectory_id(index)}#{serial}",
                prompt_token_ids=prompt,
                sampling=group.sampling,
                seed=seed,
                cache_salt=salt,
            )
            for index, seed in enumerate(group.seeds)
        ]
        try:
            async with asyncio.timeout(self._limits.group_timeout_s):
                samples = await self._engine.generate(requests, ended)
        except TimeoutError as error:
            raise DeadlineError(
                phase=f"GENERATE prompt {group.prompt_id}",
                peer="engine",
                seconds=self._limits.group_timeout_s,
                hint="the engine hangs, or rollout.request_timeout_s is too short for the response length",
            ) from error
        _check(group, samples)
        return samples

    def _messages(self, group: PromptGroup, samples: Sequence[Sample], seconds: float) -> list[Outgoing]:
        stream, traceparent = names.trajectories(self._run_id), telemetry.current_traceparent()
        messages = []
        for index, (sample, seed) in enumerate(zip(samples, group.seeds, strict=True)):
            trajectory = self._trajectory(group, index, sample, seed, seconds)
            header = self._header(group, trajectory)
            messages.append(
                Outgoing(
                    stream=stream,
                    payload=encode_trajectory_header(header),
                    traceparent=traceparent,
                    blobs={header.blob_key: encode_trajectory(trajectory)},
                )
            )
        return messages

    def _trajectory(
        self, group: PromptGroup, index: int, sample: Sample, seed: int, seconds: float
    ) -> Trajectory:
        return Trajectory(
            run_id=group.run_id,
            trajectory_id=group.trajectory_id(index),
            policy=group.policy,
            prompt_token_ids=group.prompt_token_ids,
            response_token_ids=sample.token_ids,
            response_log_probs=sample.log_probs,
            response_mask=np.ones(len(sample.token_ids), dtype=np.uint8),
            finish_reason=sample.finish_reason,
            sampling=group.sampling,
            seed=seed,
            server_id=self._server_id,
            seconds=seconds,
        )

    def _header(self, group: PromptGroup, trajectory: Trajectory) -> TrajectoryHeader:
        return TrajectoryHeader(
            run_id=group.run_id,
            trajectory_id=trajectory.trajectory_id,
            policy=group.policy,
            blob_key=names.blob(group.run_id, str(trajectory.trajectory_id), self._server_id),
            num_prompt_tokens=len(group.prompt_token_ids),
            num_response_tokens=len(trajectory.response_token_ids),
            finish_reason=trajectory.finish_reason,
            server_id=self._server_id,
            seconds=trajectory.seconds,
            context=group.context,
        )


def _check(group: PromptGroup, samples: Sequence[Sample]) -> None:
    """Nothing leaves this server that the barrier would have to refuse."""
    for sample in samples:
        if sample.finish_reason is FinishReason.ABORT:
            raise PeerLostError(
                f"the engine gave up prompt {group.prompt_id} by itself; its log says why", peer="engine"
            )
        if not np.isfinite(sample.log_probs).all() or len(sample.log_probs) != len(sample.token_ids):
            raise NumericsError(
                f"prompt {group.prompt_id}: log-probabilities of {len(sample.token_ids)} tokens are not all finite numbers; "
                f"the weights {group.policy} are unusable"
            )


def _refuse(entry: Entry, reason: str, detail: str) -> None:
    log.error("refused: reason=%s stream=%s entry=%s: %s", reason, entry.stream, entry.entry_id, detail)
