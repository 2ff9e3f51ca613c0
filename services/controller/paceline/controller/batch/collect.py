"""COLLECT: takes scored trajectories in until the barrier closes.

    scored log -> judge -> barrier -> batch
                    |-> refill -> dispatch of further prompts
                    `-> lost with their blob store -> dispatch of the same prompts

consumes     the `scored` stream as a log, from the end of the last finished step on: nothing is acknowledged,
             so that a step which is executed again reads the same entries in the same order
unblocked by a log entry, a change in the fleet
deadlines    barrier.collect_timeout_s for the collection, barrier.stall_timeout_s without progress of the
             barrier; both clocks stop while the collection waits for services
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.broker import names
from paceline.broker.base import Broker, Entry
from paceline.broker.log import LOG_START
from paceline.controller.batch.barrier import Barrier, Verdict
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Dispatcher, Order
from paceline.controller.batch.mailboxes import Mailboxes, blob_keys, trained_keys
from paceline.controller.batch.refill import DEGENERATE, Refill
from paceline.controller.progress import Run
from paceline.core.errors import DeadlineError, InvalidMessageError, LostDataError, RewardErrorKind
from paceline.core.ids import NEVER_TRAINED, Purpose
from paceline.core.samples.normalizing import Scale, normalized, scales
from paceline.core.samples.trajectory import GroupRefusal, ScoredHeader
from paceline.data.prompts import Prompt
from paceline.service.observability import metrics, telemetry
from paceline.wire import decode_scored

log = logging.getLogger(__name__)

_TAKE = 512
_BLOCK_S = 0.5
# Seconds without an entry after which the broker is asked whether the run's data is still there.
_CHECK_S = 3.0
_PROGRESS = (Verdict.ADMITTED, Verdict.REWARD_ERROR)

Watch = Callable[[Barrier], None]
"""Called when the barrier of a collection has changed; must not change it."""


class _Collection:
    """One order's barrier, its refill, and the times of arrivals."""

    def __init__(
        self,
        order: Order,
        refill: Refill | None,
        max_staleness: int,
        *,
        ahead: bool,
        commits: Mapping[int, str] | None,
    ) -> None:
        self.order, self.refill, self.ahead = order, refill, ahead
        self.prompts = dict(order.prompts)
        self.barrier = Barrier(
            step=order.step,
            policy=order.policy,
            max_staleness=max_staleness,
            commits=commits,
            counts=order.counts,
            prompts=order.prompts,
            prompt_counts=order.prompt_counts,
        )
        self.began = self.last_progress = self.last_entry = time.monotonic()
        self.first_arrival: float | None = None
        self.last: ScoredHeader | None = None

    def batch(self) -> Batch:
        """Returns the batch of the closed barrier."""
        ended, barrier, last = time.monotonic(), self.barrier, self.last
        samples, beside, set_aside = barrier.batch(), barrier.beside(), barrier.aside()
        if barrier.purpose != Purpose.VALIDATE:
            by_name = scales(header.normalized for header in samples)
            samples = [_normalized(header, by_name) for header in samples]
            set_aside = [_normalized(header, by_name) for header in set_aside]
            beside = {name: [_normalized(h, by_name) for h in headers] for name, headers in beside.items()}
        reward_s = min(last.reward_s, ended - self.began) if last is not None else 0.0
        return Batch(
            samples=samples,
            dropped=barrier.dropped,
            verdicts=barrier.verdicts,
            num_groups=barrier.num_groups,
            beside=beside,
            set_aside=set_aside,
            num_extra=None if self.refill is None else self.refill.num_extra,
            gen_s=ended - self.began - reward_s,
            reward_s=reward_s,
            wait_s=ended - (self.first_arrival or ended),
        )


class Collector:
    """Collects the scored trajectories of a step's batch.

    Args:
        wait_for_services: returns as soon as there are a rollout server and a reward service; raises if they
            do not come back.
        count: called with (admitted, wanted) as trajectories come in.
        beside: whether to collect a validation beside training.

    Attributes:
        position: the last log entry that was read.
        blob_keys: the keys of the blobs that the entries named, trained on or not, by step; steps that were
            cleaned up are left out.
    """

    def __init__(
        self,
        run: Run,
        *,
        broker: Broker,
        mailboxes: Mailboxes,
        dispatcher: Dispatcher,
        wait_for_services: Callable[[], Awaitable[None]],
        count: Callable[[int, int], None],
        beside: bool = False,
    ) -> None:
        self._mixes_versions, self._beside = run.config.pushes_in_flight and not beside, beside
        self._config, self._run_id, self._journal = run.config, run.id, run.journal
        self._broker, self.mailboxes, self.dispatcher = broker, mailboxes, dispatcher
        self._wait_for_services, self._count = wait_for_services, count
        self.position = LOG_START
        self._early: list[tuple[str, Entry]] = []
        self._trained: int | None = None
        self.blob_keys: dict[int, list[str]] = {}

    # --- the log

    @property
    def has_stores(self) -> bool:
        """Whether blobs are in stores, which may die alone."""
        return self._broker.has_stores

    @property
    def finished_position(self) -> str:
        """The log position up to which all entries belong to collected steps."""
        return self._early[0][0] if self._early else self.position

    async def recall(self, position: str, version: int, *, is_trained: bool = False) -> None:
        """Moves to the log position in the journal, and looks up the run's data in the broker.

        Args:
            version: the committed version.
            is_trained: whether the learner has trained the step after it already, so that nobody needs that
                step's blobs any more.

        Raises:
            LostDataError: the broker has lost the run's data.
        """
        await self.mailboxes.check()
        self._trained = version + 1 if is_trained else None
        self.position = position
        self._early.clear()
        self.blob_keys = await self.mailboxes.leftovers(position)
        await self.dispatcher.recall(version)

    async def begin_anew(self) -> None:
        """Removes the run's data from the broker, so that everything is sent and collected again."""
        await self.mailboxes.begin_anew()
        self.dispatcher.forget()
        self.position, self.blob_keys = LOG_START, {}
        self._early.clear()

    async def clean_up(self, step: int) -> None:
        """Removes from the broker the data of the steps before `step`, which are all finished.

        Raises:
            LostDataError: the broker has lost the run's data.
        """
        await self.dispatcher.clean_up(step)
        over = [key for of_step, keys in self.blob_keys.items() if of_step < step for key in keys]
        # The version before the committed one is not sampled from any more.
        await self.mailboxes.clean_up(
            version=step - 2, position=self._journal.standing.log_position, blob_keys=over
        )
        self.blob_keys = {of_step: keys for of_step, keys in self.blob_keys.items() if of_step >= step}

    async def store(self, blobs: Mapping[str, bytes], step: int) -> None:
        """Stores blobs of trajectories that `step` trains again, until it is finished."""
        for key, blob in blobs.items():
            await self._broker.put_blob(key, blob)
            self.blob_keys.setdefault(step, []).extend([key, names.learner_log_probs(key)])

    # --- a collection

    async def dispatch(self, order: Order) -> None:
        """Sends out those of the order's prompts that the broker does not hold yet."""
        sent = await self.dispatcher.dispatch(order)
        if 0 < len(sent) < len(order.prompts):
            self._journal.record("redispatch", step=order.step, prompts=sent)

    async def collect(
        self,
        order: Order,
        refill: Refill | None = None,
        *,
        is_over: Callable[[], bool] = lambda: False,
        ahead: bool = False,
        watch: Watch | None = None,
    ) -> Batch:
        """Waits for the barrier to close; meanwhile `refill` replaces groups that teach nothing.

        Args:
            is_over: whether no server samples from the order's policy any more, so that the log is complete.
            ahead: whether the order belongs to a step that has not begun.

        Raises:
            DeadlineError: the barrier made no progress for barrier.stall_timeout_s, or did not close within
                barrier.collect_timeout_s.
            LostDataError: the broker has lost the run's data, or messages without which the barrier does not
                close.
        """
        commits = self._journal.standing.commits if self._mixes_versions else None
        collection = _Collection(order, refill, self._config.barrier.bound, ahead=ahead, commits=commits)
        barrier = collection.barrier
        self._count(0, barrier.num_wanted)
        await self._take_early(collection)
        while not barrier.closed:
            entries = await self._broker.read_log(
                self.mailboxes.scored, after=self.position, max_entries=_TAKE, block_s=_BLOCK_S
            )
            if entries:
                collection.last_entry = time.monotonic()
                await self._take(collection, entries)
                self._count(barrier.num_admitted, barrier.num_wanted)
                if watch is not None:
                    watch(barrier)
            elif is_over():
                raise _lost(barrier)
            else:
                await self._look_around(collection)
            self._check_deadlines(collection)
        return collection.batch()

    # --- entries

    async def _take_early(self, collection: _Collection) -> None:
        """Judges the entries that came while an earlier step was collected."""
        position, (early, self._early) = self.position, (self._early, [])
        taken = await self._take(collection, [entry for _, entry in early])
        before = {entry.entry_id: where for where, entry in early}
        self._early = [(before[entry.entry_id], entry) for _, entry in self._early] + early[taken:]
        self.position = position

    async def _take(self, collection: _Collection, entries: Iterable[Entry]) -> int:
        """Judges entries until the barrier closes; later entries stay in the log for the next reading.

        Returns:
            The number of entries read. Those of later steps are judged when their step is collected.
        """
        taken = 0
        events: list[Mapping[str, Any]] = []
        further: dict[int, Prompt] = {}
        lost: list[ScoredHeader] = []
        messages = [(entry, _decoded(entry)) for entry in entries]
        headers = [message for _, message in messages if isinstance(message, ScoredHeader)]
        gone = set() if collection.barrier.step == self._trained else await self._gone(headers)
        for entry, message in messages:
            if collection.barrier.closed:
                break
            taken, before, self.position = taken + 1, self.position, entry.entry_id
            if isinstance(message, InvalidMessageError):
                events.append(_rejected(message))
            elif self._mixes_versions and _step_of(message) > collection.barrier.step:
                self._early.append((before, entry))
            elif isinstance(message, GroupRefusal):
                events.append(self._refuse(collection, message))
            else:
                events.append(self._judge(collection, message, lost, gone))
                further |= _settle(collection, message, events)
        # Only this task reads the barrier, so no one sees it change before the journal has the same verdicts.
        self._journal.record_all(events)
        if further:
            collection.prompts |= further
            await self.dispatch(replace(collection.order, prompts=further))
        if lost:
            await self._draw_again(collection, lost)
        return taken

    async def _gone(self, headers: Iterable[ScoredHeader]) -> set[str]:
        """Returns the keys of the blobs that the learner needs and that a store has lost."""
        keys = [
            key
            for header in headers
            if names.store_of(header.blob_key) and header.trajectory_id.purpose not in NEVER_TRAINED
            for key in trained_keys(header)
        ]
        return set(await self._broker.missing_blobs(keys)) if keys else set()

    async def _draw_again(self, collection: _Collection, lost: Sequence[ScoredHeader]) -> None:
        """Sends the prompts of lost samples again; the seeds, and so the samples, are the same.

        Raises:
            LostDataError: no server has the weights any more that drew the samples.
        """
        order, committed = collection.order, self._journal.standing.committed
        if order.policy != committed and not (self._mixes_versions or self._beside):
            raise LostDataError(
                f"a blob store has lost samples of step {order.step}, and no server samples from "
                f"{order.policy} any more"
            )
        sent = await self.dispatcher.send_again(replace(order, prompts=collection.prompts), lost)
        if sent:
            log.warning(
                "step %d: a blob store has lost samples; %d prompts are sent again", order.step, len(sent)
            )
            self._journal.record("redispatch", step=order.step, prompts=sent)

    def _judge(
        self, collection: _Collection, header: ScoredHeader, lost: list[ScoredHeader], gone: Container[str]
    ) -> Mapping[str, Any]:
        barrier, now = collection.barrier, time.monotonic()
        verdict = barrier.judge(header)
        if verdict in _PROGRESS and _is_lost(header, gone):
            verdict = Verdict.LOST
            lost.append(header)
        barrier.apply(header, verdict)
        telemetry.count(metrics.VERDICTS, verdict=verdict.value)
        self.blob_keys.setdefault(header.trajectory_id.step, []).extend(blob_keys(header))
        collection.first_arrival = collection.first_arrival or now
        collection.last = header
        if verdict in _PROGRESS:
            collection.last_progress = now
        if self._beside:
            return {**_fate(header, verdict), "beside": barrier.step}
        of_later_step = {"ahead": barrier.step} if collection.ahead else {}
        return {**_fate(header, verdict), **of_later_step}

    def _refuse(self, collection: _Collection, refusal: GroupRefusal) -> Mapping[str, Any]:
        """Notes that the rollout servers have given up a group of this collection."""
        barrier = collection.barrier
        telemetry.count(metrics.REFUSALS, reason=refusal.reason)
        addressed = (refusal.run_id, refusal.step, refusal.policy)
        if addressed == (self._run_id, barrier.step, barrier.policy) and barrier.refuse(
            refusal.prompt_id,
            refusal.purpose,
            reason=f"rollout:{refusal.reason}",
            message=refusal.message,
        ):
            collection.last_progress = time.monotonic()
        return {
            "event": "refusal",
            "step": refusal.step,
            "prompt": refusal.prompt_id,
            "reason": refusal.reason,
            "message": refusal.message,
            "server": refusal.server_id,
        }

    # --- waiting

    async def _look_around(self, collection: _Collection) -> None:
        """Checks, when no entry has come, that the services and the run's data are there."""
        began = time.monotonic()
        await self._wait_for_services()
        now = time.monotonic()
        # The wait extends the collection's deadlines.
        collection.began += now - began
        collection.last_progress += now - began
        if now - collection.last_entry > _CHECK_S:
            collection.last_entry = now
            await self.mailboxes.check()
            await self._broker.ensure_group(
                self.dispatcher.stream(collection.order.policy.version), names.ROLLOUT_GROUP
            )
            await self._check_under_way(collection)

    async def _check_under_way(self, collection: _Collection) -> None:
        """Raises LostDataError if the barrier is open and no further entry can come."""
        if not await self.mailboxes.idle(*self.dispatcher.streams(collection.order.policy.version)):
            return
        scored = self.mailboxes.scored
        if not await self._broker.read_log(scored, after=self.position, max_entries=1, block_s=0.0):
            raise _lost(collection.barrier)

    def _check_deadlines(self, collection: _Collection) -> None:
        now, limits, barrier = time.monotonic(), self._config, collection.barrier
        waited, silent = now - collection.began, now - collection.last_progress
        if barrier.closed or (waited <= limits.collect_timeout_s and silent <= limits.stall_timeout_s):
            return
        is_long, missing = waited > limits.collect_timeout_s, barrier.missing
        setting = "barrier.collect_timeout_s" if is_long else "barrier.stall_timeout_s"
        raise DeadlineError(
            phase="COLLECT",
            peer="the rollout and reward services",
            seconds=round(waited if is_long else silent, 1),
            hint=f"{len(missing)} prompt groups of step {barrier.step} are incomplete (the first is prompt "
            f"{missing[0]}); look into the rollout and reward logs, or raise {setting}",
        )


def _step_of(message: ScoredHeader | GroupRefusal) -> int:
    return message.step if isinstance(message, GroupRefusal) else message.trajectory_id.step


def _lost(barrier: Barrier) -> LostDataError:
    missing = barrier.missing
    return LostDataError(
        f"the message broker has lost some of its messages: {len(missing)} prompt groups of step "
        f"{barrier.step} are incomplete (the first is prompt {missing[0]}), and none of their messages is in "
        "transit"
    )


def _settle(
    collection: _Collection, header: ScoredHeader, events: list[Mapping[str, Any]]
) -> Mapping[int, Prompt]:
    """Judges the group that a header may have completed; returns the prompts that replace it, if it is set
    aside."""
    if collection.refill is None:
        return {}
    replacement = collection.refill.settle(collection.barrier, [header.trajectory_id.prompt_id])
    if replacement.set_aside:
        events.append(
            {
                "event": "refill",
                "step": collection.order.step,
                "reason": DEGENERATE,
                "set_aside": sorted(replacement.set_aside.items()),
                "prompts": list(replacement.prompts),
            }
        )
    return replacement.prompts


def _decoded(entry: Entry) -> ScoredHeader | GroupRefusal | InvalidMessageError:
    try:
        return decode_scored(entry.payload)
    except InvalidMessageError as error:
        return error


def _is_lost(header: ScoredHeader, gone: Container[str]) -> bool:
    """Returns whether a store has lost the sample, or had lost it when the reward service asked for it."""
    kind = header.reward_error[0] if header.reward_error is not None else ""
    was_lost = kind == RewardErrorKind.LOST.value and bool(names.store_of(header.blob_key))
    return was_lost or any(key in gone for key in trained_keys(header))


def _rejected(error: InvalidMessageError) -> Mapping[str, Any]:
    return {"event": "message_rejected", "stream": "scored", "reason": error.reason, "message": str(error)}


def _normalized(header: ScoredHeader, by_name: Mapping[str, Scale]) -> ScoredHeader:
    if not header.normalized or header.reward is None:
        return header
    return replace(header, reward=normalized(header.reward, header.normalized, by_name))


def _fate(header: ScoredHeader, verdict: Verdict) -> Mapping[str, Any]:
    fate: dict[str, Any] = {
        "event": "trajectory",
        "id": str(header.trajectory_id),
        "verdict": verdict.value,
        "policy": str(header.policy),
        "digest": header.blob_digest,
        "reward": header.reward,
        "server": header.server_id,
    }
    if header.ranges:
        fate["ranges"] = [part.to_plain() for part in header.ranges]
    if header.token_rewards:
        fate["token_rewards"] = [list(pair) for pair in header.token_rewards]
    if header.normalized:
        fate["normalized"] = [list(part) for part in header.normalized]
    if header.teacher_digest:
        fate["teacher"] = header.teacher_digest
    if header.reward_error is not None:
        fate["error"] = ": ".join(header.reward_error)
    return fate
