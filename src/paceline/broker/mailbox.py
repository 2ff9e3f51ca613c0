"""A consumer of a stream: takes entries, renews their leases while it works, gives unfinished ones back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from paceline.broker.backpressure import wait_for_room
from paceline.broker.base import Ack, Broker, Entry, Outgoing, SavedPart
from paceline.broker.names import mailbox
from paceline.core.errors import BrokerError
from paceline.service.observability import metrics, telemetry

log = logging.getLogger(__name__)


class Mailbox:
    """One consumer of a group, as a context manager.

    A taken entry belongs to this consumer for `lease_s` seconds; a background task renews the lease until
    `done`, `finish` or `give_back` is called. An entry whose consumer has died goes to another after at most
    1.5 leases. On leaving, entries that are not done are given back at once.

    Args:
        stream: name of the stream; stream and group are created if missing.
        group: consumers of one group share the stream; each entry goes to one of them.
        consumer: name, unique within the group: two consumers of the same name would renew each other's
            leases.
        lease_s: seconds without renewal after which an entry may go to another consumer.
        max_entries: maximum number of entries that one `take` returns, unless the call says otherwise.
        block_s: how long a `take` waits for a first entry, unless the call says otherwise.
    """

    def __init__(
        self,
        broker: Broker,
        stream: str,
        group: str,
        consumer: str,
        *,
        lease_s: float = 5.0,
        max_entries: int = 64,
        block_s: float = 1.0,
    ) -> None:
        self._broker = broker
        self._stream, self._group, self._consumer = stream, group, consumer
        self._lease_s, self._max_entries, self._block_s = lease_s, max_entries, block_s
        self._leased: set[str] = set()
        self._being_settled: set[str] = set()
        self._next_reclaim_s = 0.0
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._broker.ensure_group(self._stream, self._group)
        for metric in (metrics.DELIVERIES, metrics.REDELIVERIES, metrics.LEASES_LOST):
            telemetry.count(metric, 0, mailbox=mailbox(self._stream))
        self._renewing = asyncio.create_task(self._renew_leases(), name=f"leases of {self._stream}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        await self._release(self._leased.copy())

    async def take(self, max_entries: int | None = None, *, block_s: float | None = None) -> list[Entry]:
        """Takes entries whose leases have lapsed, else new ones; waits for the first; [] if none came.

        Entries that this mailbox already holds are not returned again.

        Raises:
            BrokerError: the broker is gone.
        """
        self._check_renewing()
        wanted = self._max_entries if max_entries is None else max_entries
        deadline = time.monotonic() + (self._block_s if block_s is None else block_s)
        while True:
            entries = await self._reclaim_when_due(wanted)
            if not entries:
                entries = await self._read(wanted, deadline)
            if entries or time.monotonic() >= deadline:
                self._count(entries)
                self._leased.update(entry.entry_id for entry in entries)
                return entries

    async def done(self, entries: Iterable[Entry]) -> None:
        """Acknowledges entries: they will not be delivered again."""
        self._check_renewing()
        entry_ids = [entry.entry_id for entry in entries]
        with self._settling(entry_ids):
            await self._broker.ack(self._stream, self._group, entry_ids)

    async def finish(
        self, entries: Iterable[Entry], messages: Sequence[Outgoing], *, max_length: int, timeout_s: float
    ) -> None:
        """Appends messages that answer the entries, once there is room; the last append acknowledges them.

        A consumer that dies at any instant never leaves an entry acknowledged and unanswered. While this
        waits for room, the leases are renewed.

        Raises:
            DeadlineError: a stream had no room for `timeout_s` seconds.
            BrokerError: the broker is gone. The entries stay leased.
        """
        self._check_renewing()
        ack = Ack(
            stream=self._stream, group=self._group, entry_ids=tuple(entry.entry_id for entry in entries)
        )
        await wait_for_room(self._broker, messages, max_length=max_length, timeout_s=timeout_s)
        with self._settling(ack.entry_ids):
            await self._broker.append(messages, ack=ack)

    async def save_progress(self, parts: Sequence[SavedPart]) -> list[str]:
        """Saves this consumer's progress on its entries, so that the next consumer can continue from there.

        Returns the ids of the entries whose progress was saved; the others have gone to another consumer.

        Raises:
            BrokerError: the broker is gone.
        """
        return await self._broker.save_progress(self._stream, self._group, self._consumer, parts)

    async def progress(self, entry: Entry) -> bytes:
        """Returns the progress that the entry's earlier consumers have saved; b"" if there is none."""
        return await self._broker.progress(self._stream, self._group, entry.entry_id)

    async def give_back(self, entries: Iterable[Entry]) -> None:
        """Releases entries that could not be served; the next consumer that asks gets them.

        The next delivery increases `Entry.deliveries`. If the broker cannot be reached, the entries are
        delivered again when their leases lapse.
        """
        self._check_renewing()
        await self._release({entry.entry_id for entry in entries})

    async def _reclaim_when_due(self, wanted: int) -> list[Entry]:
        now = time.monotonic()
        if now < self._next_reclaim_s:
            return []
        entries = await self._broker.reclaim(
            self._stream, self._group, self._consumer, min_idle_s=self._lease_s, max_entries=wanted
        )
        if len(entries) < wanted:
            self._next_reclaim_s = now + self._lease_s / 2
        # After a stall of this process, its own lapsed entries may come back while it still works on them.
        fresh = [entry for entry in entries if entry.entry_id not in self._leased]
        if fresh:
            log.info("%s: %d entries reclaimed by %s", self._stream, len(fresh), self._consumer)
        return fresh

    async def _read(self, wanted: int, deadline: float) -> list[Entry]:
        # Wakes up for the next reclaim, even if the caller waits longer: the lease bounds the recovery time.
        until = min(deadline, self._next_reclaim_s)
        return await self._broker.read(
            self._stream,
            self._group,
            self._consumer,
            max_entries=wanted,
            block_s=max(0.0, until - time.monotonic()),
        )

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            entry_ids = list(self._leased)
            if not entry_ids:
                continue
            try:
                renewed = await self._broker.renew(self._stream, self._group, self._consumer, entry_ids)
            except BrokerError as error:
                # The next round may succeed in time; if not, the entries are delivered again.
                log.warning("%s: %d leases not renewed: %s", self._stream, len(entry_ids), error)
                continue
            # Entries that are being settled may be acknowledged already.
            lost = self._leased.intersection(entry_ids) - set(renewed) - self._being_settled
            self._leased -= lost
            if lost:
                telemetry.count(metrics.LEASES_LOST, len(lost), mailbox=mailbox(self._stream))
                log.warning(
                    "%s: %d entries of %s have gone to another consumer",
                    self._stream,
                    len(lost),
                    self._consumer,
                )

    def _count(self, entries: Sequence[Entry]) -> None:
        again = sum(entry.deliveries > 1 for entry in entries)
        for metric, number in ((metrics.DELIVERIES, len(entries)), (metrics.REDELIVERIES, again)):
            if number:
                telemetry.count(metric, number, mailbox=mailbox(self._stream))

    def _check_renewing(self) -> None:
        if self._renewing is None:
            raise RuntimeError("a Mailbox is a context manager: use it inside `async with`")
        if self._renewing.done():
            self._renewing.result()

    @contextmanager
    def _settling(self, entry_ids: Sequence[str]) -> Iterator[None]:
        # These entries stay leased, because a full server may delay their answers for a long time.
        self._being_settled.update(entry_ids)
        try:
            yield
            self._leased.difference_update(entry_ids)
        finally:
            self._being_settled.difference_update(entry_ids)

    async def _release(self, entry_ids: set[str]) -> None:
        self._leased -= entry_ids
        if not entry_ids:
            return
        try:
            # Their leases lapse anyway; giving them back is only faster, and not worth a long wait.
            async with asyncio.timeout(self._lease_s):
                await self._broker.release(self._stream, self._group, self._consumer, list(entry_ids))
        except (BrokerError, TimeoutError) as error:
            log.warning("%s: %d entries not given back: %s", self._stream, len(entry_ids), error)
