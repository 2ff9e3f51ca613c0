"""A consumer of one stream: takes entries, keeps their leases alive while they are worked on, gives back what is left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from paceline.broker.base import Ack, Broker, Entry, Outgoing
from paceline.core.errors import BrokerError, DeadlineError

log = logging.getLogger(__name__)


class Mailbox:
    """One consumer of a group, as a context manager.

    An entry taken stays this consumer's for `lease_s` seconds at a time; a background task renews the lease until
    `done` is called. An entry whose consumer has died goes to another after at most 1.5 leases. On leaving, what is not
    done is given back at once.

    Args:
        broker: where the stream lives.
        stream: its name; it and the group are made where missing.
        group: consumers of one group share the stream, each entry goes to one of them.
        consumer: unique within the group: two of the same name would renew each other's leases.
        lease_s: silence after which an entry may go to another consumer.
        max_entries: how many one `take` brings, unless it says otherwise.
        block_s: how long a `take` waits for a first entry, unless it says otherwise.
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
        self.stream, self.group, self.consumer = stream, group, consumer
        self._lease_s, self._max_entries, self._block_s = lease_s, max_entries, block_s
        self._held: dict[str, Entry] = {}
        self._next_reclaim_s = 0.0
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._broker.ensure_group(self.stream, self.group)
        self._renewing = asyncio.create_task(self._renew_leases(), name=f"leases of {self.stream}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        await self._give_back()

    @property
    def held(self) -> list[Entry]:
        """What was taken, is not done, and is still this consumer's, oldest first."""
        return list(self._held.values())

    def holds(self, entry: Entry) -> bool:
        """Whether the entry is still this consumer's; False once it is done or another has reclaimed it."""
        return entry.entry_id in self._held

    async def take(self, max_entries: int | None = None, *, block_s: float | None = None) -> list[Entry]:
        """What others let lapse, else what is new; waits for a first entry, [] when none came.

        Entries that this mailbox holds already do not come again.

        Raises:
            BrokerError, DeadlineError: the broker is gone.
        """
        self._check_renewing()
        wanted = self._max_entries if max_entries is None else max_entries
        deadline = time.monotonic() + (self._block_s if block_s is None else block_s)
        while True:
            entries = await self._reclaim_when_due(wanted)
            if not entries:
                entries = await self._read(wanted, deadline)
            if entries or time.monotonic() >= deadline:
                self._held.update((entry.entry_id, entry) for entry in entries)
                return entries

    async def done(self, entries: Iterable[Entry], results: Sequence[Outgoing] = ()) -> None:
        """Acknowledges entries: they will not be delivered again.

        Args:
            entries: what was taken and is finished.
            results: messages that came of them, appended in the same breath: a crash can then neither lose them nor
                leave their cause to be worked on a second time.
        """
        self._check_renewing()
        entry_ids = [entry.entry_id for entry in entries]
        # Let go of first, or a renewal under way would miss them at the broker and report them as lost.
        held = {entry_id: entry for entry_id in entry_ids if (entry := self._held.pop(entry_id, None))}
        try:
            await self._broker.append(
                results, ack=Ack(stream=self.stream, group=self.group, entry_ids=entry_ids)
            )
        except BaseException:
            self._held.update(held)
            raise

    async def give_back(self, entries: Iterable[Entry]) -> None:
        """Lets go of entries undone: another consumer gets them soon."""
        entry_ids = [entry.entry_id for entry in entries]
        for entry_id in entry_ids:
            self._held.pop(entry_id, None)
        await self._broker.release(self.stream, self.group, self.consumer, entry_ids)

    async def switch(self, stream: str) -> None:
        """Goes over to another stream of the same group; what is held of the old one is given back."""
        await self._broker.ensure_group(stream, self.group)
        await self._give_back()
        self.stream, self._next_reclaim_s = stream, 0.0

    async def _reclaim_when_due(self, wanted: int) -> list[Entry]:
        now = time.monotonic()
        if now < self._next_reclaim_s:
            return []
        entries = await self._broker.reclaim(
            self.stream, self.group, self.consumer, min_idle_s=self._lease_s, max_entries=wanted
        )
        if len(entries) < wanted:
            self._next_reclaim_s = now + self._lease_s / 2
        # A lease that lapsed while this very process was stalled comes back to it: it works on that entry already.
        fresh = [entry for entry in entries if entry.entry_id not in self._held]
        if fresh:
            log.info("%s: %d entries reclaimed by %s", self.stream, len(fresh), self.consumer)
        return fresh

    async def _read(self, wanted: int, deadline: float) -> list[Entry]:
        # Waking up for the next reclaim keeps the recovery time bounded by the lease, however long the caller waits.
        until = min(deadline, self._next_reclaim_s)
        return await self._broker.read(
            self.stream,
            self.group,
            self.consumer,
            max_entries=wanted,
            block_s=max(0.0, until - time.monotonic()),
        )

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            entry_ids = list(self._held)
            if not entry_ids:
                continue
            stream = self.stream
            try:
                still = await self._broker.renew(stream, self.group, self.consumer, entry_ids)
            except (BrokerError, DeadlineError) as error:
                # The next round may succeed in time; if not, the entries lapse and are delivered again, which is allowed.
                log.warning("%s: %d leases not renewed: %s", stream, len(entry_ids), error)
                continue
            if stream == self.stream:
                self._forget(set(entry_ids) - set(still))

    def _forget(self, lost: set[str]) -> None:
        gone = [entry_id for entry_id in lost if self._held.pop(entry_id, None)]
        if gone:
            log.warning("%s: %d entries of %s have gone to another", self.stream, len(gone), self.consumer)

    def _check_renewing(self) -> None:
        if self._renewing is None:
            raise RuntimeError("a Mailbox is a context manager: use it inside `async with`")
        if self._renewing.done():
            self._renewing.result()

    async def _give_back(self) -> None:
        entry_ids = list(self._held)
        self._held.clear()
        if not entry_ids:
            return
        try:
            await self._broker.release(self.stream, self.group, self.consumer, entry_ids)
        except (BrokerError, DeadlineError) as error:
            # They lapse by themselves: this only would have been quicker.
            log.warning("%s: %d entries not given back: %s", self.stream, len(entry_ids), error)
