"""Draws samples: takes prompt groups of one policy version from `prompts`, and puts trajectories out.

    prompts:vN -> decode, check -> engine -> check -> blobs, headers, acknowledgement at once -> trajectories
                        |            `-- failed: given back for another attempt
                        `-- refused, or given up after too many attempts -> scored

A sampler is open for one policy at a time, or closed. When it closes, it gives unfinished groups back with
their tokens: another server goes on with them, or their step is over. With `rollout.in_flight` it does not
close for a push: it pauses, and unfinished samples go on with the new weights. A validation server takes its
prompts from `val_prompts:vN`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.broker import names
from paceline.broker.base import Broker, Entry, Outgoing
from paceline.broker.mailbox import Mailbox
from paceline.core.errors import PeerLostError
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import PromptGroup, SamplingSpec
from paceline.rollout.capacity import Capacity, SamplerLimits
from paceline.rollout.engines.base import Engine, SampleRequest
from paceline.rollout.episodes.group import Episodes
from paceline.rollout.episodes.loop import Slot
from paceline.rollout.episodes.recorder import Draw
from paceline.rollout.failures import Admission, FailureStreak, GroupFailure, failure_of
from paceline.rollout.images import Images
from paceline.rollout.progress import HandedOverError, ResumableDraws
from paceline.rollout.trajectories import check_samples, sample_requests, trajectory_messages
from paceline.service.observability import telemetry
from paceline.wire import encode_group_refusal

log = logging.getLogger(__name__)

Spawn = Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]

_BLOCK_S = 1.0


class Sampler:
    """Owns the mailbox of prompts and the engine's work under way.

    Args:
        incarnation: differs after each restart of the server.
        spawn: starts a task whose failure ends the service.
        episodes: draws episodes of several turns; None if the run has none.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        broker: Broker,
        run_id: str,
        server_id: str,
        incarnation: str,
        limits: SamplerLimits,
        spawn: Spawn,
        episodes: Episodes | None = None,
    ) -> None:
        self._engine, self._broker, self._limits = engine, broker, limits
        self._run_id, self._server_id, self._incarnation = run_id, server_id, incarnation
        self._spawn, self._serials, self._episodes = spawn, itertools.count(), episodes
        self._images = Images(broker, run_id)
        self._session: asyncio.Task[None] | None = None
        self._policies: dict[int, PolicyTag] = {}
        self._policy: PolicyTag | None = None
        self._going = asyncio.Event()
        self._going.set()
        self._draining = asyncio.Event()
        is_full = bool if episodes is None else lambda: episodes.is_full
        self._capacity, self._streak = Capacity(limits, is_full), FailureStreak()
        self._progress = ResumableDraws(engine, self._mixed_policies, every_s=limits.save_progress_s)

    @property
    def in_flight(self) -> int:
        """Returns the number of samples that are drawn or wait for their delivery."""
        return self._capacity.num_samples

    def open(self, policy: PolicyTag) -> None:
        """Begins to take groups of exactly this policy. The sampler must be closed."""
        if self._session is not None:
            raise RuntimeError("the sampler is open: close it first")
        self._begin_policy(policy)
        self._session = self._spawn(f"sample {policy}", self._serve(policy))

    def _begin_policy(self, policy: PolicyTag) -> None:
        oldest = policy.version - self._limits.max_staleness
        self._policies = {v: known for v, known in self._policies.items() if v >= oldest}
        self._policies[policy.version] = self._policy = policy

    def _mixed_policies(self) -> dict[int, PolicyTag]:
        return self._policies if self._limits.mixes_versions else {}

    @property
    def is_paused(self) -> bool:
        """Whether samples under way wait for new weights."""
        return not self._going.is_set()

    async def make_way(self, version: int) -> None:
        """Pauses for a push of `version`, or closes: no token is drawn until `resume` or `open`."""
        is_newer = self._policy is not None and version >= self._policy.version
        is_open = self._session is not None and not self._session.done()
        if self._limits.mixes_versions and is_open and is_newer:
            self._going.clear()
            await self._engine.pause(recompute=self._limits.in_flight == "recompute")
        else:
            await self.close()

    async def resume(self, policy: PolicyTag) -> None:
        """Goes on with the weights of `policy`, after `make_way` has paused."""
        self._begin_policy(policy)
        await self._engine.resume()
        self._going.set()

    async def drain(self) -> None:
        """Takes no more groups, for good; returns when those under way are handed over or delivered.

        Groups that no other server can continue are delivered: episodes, prompts with images, and all samples
        of an engine that cannot begin with given tokens.
        """
        self._draining.set()
        if self.is_paused:
            await self.close()
        elif self._session is not None:
            await self._progress.hand_over()
            # This ends: the take from an empty mailbox lasts a second, and each group has a deadline.
            await asyncio.wait([self._session])

    async def close(self) -> None:
        """Takes no more groups; saves the tokens of those under way; returns once the engine aborted them."""
        session, self._session = self._session, None
        if session is None:
            return
        if self._capacity.num_groups:
            log.info("aborting %d groups that are under way", self._capacity.num_groups)
            await self._progress.save()
        session.cancel()
        # This ends: the engine answers or dies, and each group has a deadline.
        await asyncio.wait([session])
        self._policies.clear()
        if self.is_paused:
            await self._engine.resume()
            self._going.set()

    def _admission(self) -> Admission:
        assert self._policy is not None, "a session begins with a policy"
        return Admission(
            run_id=self._run_id,
            policy=self._policy,
            server_id=self._server_id,
            vocab_size=self._engine.vocab_size,
            max_deliveries=self._limits.max_deliveries,
            max_staleness=self._limits.max_staleness,
        )

    async def _serve(self, policy: PolicyTag) -> None:
        if self._limits.validates:
            prompts = names.val_prompts(self._run_id, policy.version)
        else:
            prompts = names.prompts(self._run_id, None if self._limits.mixes_versions else policy.version)
        box = Mailbox(
            self._broker,
            prompts,
            names.ROLLOUT_GROUP,
            f"{self._server_id}/{self._incarnation}",
            lease_s=self._limits.lease_s,
            block_s=_BLOCK_S,
        )
        try:
            async with box, asyncio.TaskGroup() as tasks:
                saving = tasks.create_task(self._progress.save_regularly(self._going), name="progress")
                await self._take_groups(box)
                saving.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            # A task that was cancelled before its first step has not given its capacity back.
            self._capacity.clear()

    async def _take_groups(self, box: Mailbox) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                while not self._draining.is_set():
                    await self._going.wait()
                    await self._capacity.wait_for_room()
                    # One group at a time: servers share the work evenly, and a group that is drawn alone
                    # holds up no other.
                    entries = await box.take(1) if not self._draining.is_set() else []
                    if self._draining.is_set():
                        await box.give_back(entries)
                        break
                    for entry in entries:
                        admission = self._admission()
                        if admission.awaits_push(entry):
                            log.warning("the next prompts are for newer weights than this server has")
                            await box.give_back([entry])
                            return
                        await self._begin(_Delivery(box, admission, entry), tasks)
        except BaseExceptionGroup as failures:
            # The first failure is the cause: it cancelled the other tasks.
            raise failures.exceptions[0] from None

    async def _begin(self, delivery: _Delivery, tasks: asyncio.TaskGroup) -> None:
        entry, group = delivery.entry, delivery.admission.read(delivery.entry)
        if isinstance(group, PromptGroup):
            alone = delivery.admission.is_suspect(entry)
            if alone:
                log.warning("prompt %d, attempt %d: drawn alone", group.prompt_id, entry.deliveries)
                await self._capacity.wait_until_idle()
            self._capacity.group_began(group)
            work = tasks.create_task(self._work(delivery, group), name=f"prompt {group.prompt_id}")
            if alone:
                await asyncio.wait([work])
        elif group is None:
            await delivery.box.done([entry])
        else:
            tasks.create_task(self._settle(delivery, group), name=f"refuse {entry.entry_id}")

    async def _work(self, delivery: _Delivery, group: PromptGroup) -> None:
        entry = delivery.entry
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
                messages = await self._draw(delivery, group, sample_ended)
                if isinstance(messages, GroupFailure):
                    await self._settle(delivery, messages)
                    self._streak.failed(group, messages)
                    return
                self._streak.succeeded()
                delivering = len(messages)
                self._capacity.delivery_began(delivering)
                await self._finish(delivery, messages)
        except HandedOverError:
            log.info("prompt %d is given back half drawn", group.prompt_id)
            await delivery.box.give_back([entry])
        finally:
            self._capacity.group_ended(undrawn=undrawn, delivering=delivering)

    async def _draw(
        self, delivery: _Delivery, group: PromptGroup, sample_ended: Callable[[], None]
    ) -> list[Outgoing] | GroupFailure:
        """Returns the messages with the group's samples, or why it has none.

        Raises:
            HandedOverError: another server gets the group.
            PeerLostError: the engine has died, or no longer answers.
        """
        limit_s, started, serial = self._limits.group_timeout_s, time.monotonic(), next(self._serials)
        try:
            async with asyncio.timeout(limit_s):
                draws = await self._draw_samples(delivery, group, serial, sample_ended)
            return trajectory_messages(
                group,
                draws,
                server_id=self._server_id,
                draw=f"{self._incarnation}.{serial}",
                store=self._broker.store,
                policies=self._mixed_policies(),
                seconds=time.monotonic() - started,
                together=self._limits.groups_together,
            )
        except TimeoutError:
            await self._probe(group)
            message = (
                f"prompt {group.prompt_id} was not drawn within {limit_s:g} s; raise "
                "rollout.request_timeout_s if its responses are that long"
            )
            return GroupFailure(reason="deadline", message=message)
        except HandedOverError:
            raise
        except Exception as error:  # noqa: BLE001 - fails only the group, unless the engine has died
            await self._engine.check_health()
            return failure_of(error)

    async def _draw_samples(
        self, delivery: _Delivery, group: PromptGroup, serial: int, sample_ended: Callable[[], None]
    ) -> list[Draw]:
        if group.messages and self._episodes is not None:
            return await self._episodes.draw(
                group, str(serial), lambda: _EpisodeSlot(self._capacity, sample_ended)
            )
        images = await self._images.fetch(group.images) if group.images else ()
        await self._going.wait()
        policy = delivery.admission.policy if self._policy is None else self._policy
        requests = sample_requests(group, serial, images, salt=str(policy))
        if images or not self._engine.continues:
            samples = await self._engine.generate(requests, sample_ended)
        else:
            box, entry = delivery.box, delivery.entry
            samples = await self._progress.draw(box, entry, group, requests, sample_ended, policy=policy)
        check_samples(group, samples)
        return [Draw.single(group.prompt_token_ids, sample) for sample in samples]

    async def _probe(self, group: PromptGroup) -> None:
        """Asks the engine for one token: a group that takes too long may have hung the engine.

        Raises:
            PeerLostError: no answer.
        """
        if self.is_paused:
            return
        request = SampleRequest(
            request_id=f"probe#{next(self._serials)}",
            prompt_token_ids=group.prompt_token_ids[:1].tolist(),
            sampling=SamplingSpec(temperature=0.0, max_tokens=1),
            seed=0,
            cache_salt=str(group.policy),
        )
        try:
            async with asyncio.timeout(self._limits.probe_timeout_s):
                await self._engine.generate([request])
        except TimeoutError:
            raise PeerLostError(
                f"the engine hangs: prompt {group.prompt_id} was not drawn within "
                f"{self._limits.group_timeout_s:g} s, and a single token was not drawn within "
                f"{self._limits.probe_timeout_s:g} s",
                peer="engine",
            ) from None
        except Exception as error:  # noqa: BLE001 - also counts as an answer, unless the engine has died
            await self._engine.check_health()
            log.warning("the engine does not draw a single token either: %s", error)

    async def _settle(self, delivery: _Delivery, failure: GroupFailure) -> None:
        """Gives a failed group back, or refuses it if another attempt is not worth it."""
        entry, admission = delivery.entry, delivery.admission
        what = f"reason={failure.reason} stream={entry.stream} entry={entry.entry_id}: {failure.message}"
        if admission.gives_back(entry, failure):
            log.warning("failed, attempt %d: %s", entry.deliveries, what)
            await delivery.box.give_back([entry])
            return
        log.error("refused: %s", what)
        refusal = admission.refusal(entry, failure)
        if refusal is None:
            await delivery.box.done([entry])
        else:
            is_beside = self._limits.reports_beside and refusal.purpose == Purpose.VALIDATE
            version = refusal.policy.version
            stream = names.val_scored(self._run_id, version) if is_beside else names.scored(self._run_id)
            await self._finish(delivery, [Outgoing(stream=stream, payload=encode_group_refusal(refusal))])

    async def _finish(self, delivery: _Delivery, messages: Sequence[Outgoing]) -> None:
        await delivery.box.finish(
            [delivery.entry],
            messages,
            max_length=self._limits.max_stream_length,
            timeout_s=self._limits.append_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class _Delivery:
    """An entry with the mailbox that it came from and the rules for it."""

    box: Mailbox
    admission: Admission
    entry: Entry


class _EpisodeSlot(Slot):
    """An episode's place in the capacity."""

    def __init__(self, capacity: Capacity, ended: Callable[[], None]) -> None:
        self._capacity, self._ended = capacity, ended

    def pause(self) -> None:
        self._capacity.turn_ended()

    def resume(self) -> None:
        self._capacity.turn_began()

    def end(self) -> None:
        self._ended()
