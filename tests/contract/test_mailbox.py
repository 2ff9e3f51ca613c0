"""Mailboxes over both brokers: leases live while work goes on, and lapse when the consumer dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.broker import Broker, Entry, Mailbox, append_when_room
from paceline.core.errors import BrokerError, DeadlineError
from support.streams import Stopwatch, messages, payloads, reclaim_all, soon

G = "group"
LONG_S = 60.0
"""A lease that does not lapse, however busy the machine is: entries grow old by `release` alone"""
SHORT_S = 1.5
"""One that is renewed every half a second; where it is used, no other mailbox takes what lapses"""


def mailbox(broker: Broker, stream: str, consumer: str, **options: float) -> Mailbox:
    return Mailbox(
        broker,
        stream,
        G,
        consumer,
        lease_s=options.get("lease_s", LONG_S),
        max_entries=int(options.get("max_entries", 10)),
        block_s=options.get("block_s", 0.1),
    )


async def given_back(broker: Broker, stream: str) -> list[Entry]:
    """What another consumer can take over at once, although no lease has lapsed."""
    return await broker.reclaim(stream, G, "b", min_idle_s=LONG_S, max_entries=10)


class Renewals:
    """What the mailboxes of a broker renew from now on."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._broker, self._renew, self.rounds = broker, broker.renew, list[list[str]]()
        monkeypatch.setattr(broker, "renew", self.renew)

    async def renew(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        renewed = await self._renew(stream, group, consumer, entry_ids)
        self.rounds.append(renewed)
        return renewed

    async def after_two_more(self) -> list[str]:
        """What was renewed in a whole round from now."""
        count = len(self.rounds) + 2
        async with asyncio.timeout(120):
            while len(self.rounds) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return self.rounds[-1]

    async def keep(self, stream: str, entries: Sequence[Entry]) -> bool:
        """Whether a mailbox `a` keeps these: whatever makes them old, it makes them young again."""
        entry_ids = [entry.entry_id for entry in entries]
        await self._broker.release(stream, G, "a", entry_ids)
        return await self.after_two_more() == entry_ids and await given_back(self._broker, stream) == []


@pytest.fixture
def renewals(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Renewals:
    return Renewals(broker, monkeypatch)


async def test_takes_what_was_there_before_and_what_comes_after(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, ["before"]))
    async with mailbox(broker, stream, "a") as box:
        assert payloads(await box.take()) == ["before"]
        watch = Stopwatch()
        assert await box.take() == []
        assert 0.05 < watch.seconds < 20
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(soon(0.1, broker, messages(stream, ["after"])))
            assert payloads(await box.take(block_s=20)) == ["after"]


async def test_take_is_bounded(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, map(str, range(6))))
    async with mailbox(broker, stream, "a", max_entries=2) as box:
        assert payloads(await box.take()) == ["0", "1"]
        assert payloads(await box.take(3)) == ["2", "3", "4"]


async def test_work_that_outlasts_its_lease_is_not_given_to_another(
    broker: Broker, stream: str, renewals: Renewals
) -> None:
    await broker.append(messages(stream, ["long"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as slow, mailbox(broker, stream, "b") as idle:
        entries = await slow.take()
        assert await renewals.keep(stream, entries)
        assert await idle.take() == []
        await slow.done(entries)
    assert await reclaim_all(broker, stream, G, "c") == []


async def test_what_a_dead_consumer_had_is_taken_by_another(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, map(str, range(3))))
    await broker.ensure_group(stream, G)
    await broker.read(stream, G, "dead", max_entries=2, block_s=0)
    async with mailbox(broker, stream, "b", lease_s=SHORT_S) as box:
        newest = await box.take(1)
        assert payloads(newest) == ["2"]
        watch = Stopwatch()
        entries = await box.take(block_s=50)  # a long wait does not delay the recovery
        assert payloads(entries) == ["0", "1"]
        assert watch.seconds < 25
        await box.done(newest + entries)
    assert await reclaim_all(broker, stream, G, "c") == []


async def test_two_survivors_take_a_dead_consumers_entries_once_each(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, map(str, range(20))))
    await broker.ensure_group(stream, G)
    of_the_dead = await broker.read(stream, G, "dead", max_entries=20, block_s=0)
    await broker.release(stream, G, "dead", [entry.entry_id for entry in of_the_dead])
    taken: list[str] = []

    async def survive(name: str) -> None:
        async with mailbox(broker, stream, name, max_entries=3) as box:
            while len(taken) < 20:
                entries = await box.take()
                taken.extend(payloads(entries))
                await box.done(entries)

    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        for name in ("b", "c"):
            tasks.create_task(survive(name))
    assert sorted(taken, key=int) == [str(number) for number in range(20)]


async def test_a_lost_lease_is_noticed(broker: Broker, stream: str, caplog: pytest.LogCaptureFixture) -> None:
    await broker.append(messages(stream, ["0", "1"]))
    async with mailbox(broker, stream, "stalled", lease_s=SHORT_S) as box:
        await box.take()
        await broker.reclaim(stream, G, "thief", min_idle_s=0, max_entries=1)
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(60):
                while "1 entries of stalled have gone to another" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    # What the thief has is not the mailbox's to give back.
    assert payloads(await given_back(broker, stream)) == ["1"]


async def test_what_a_mailbox_holds_does_not_come_to_it_again(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, ["0"]))
    async with mailbox(broker, stream, "a") as box:
        entries = await box.take()
        # As after a stall of the process: the lease has lapsed, and this mailbox is the first to see it.
        await broker.release(stream, G, "a", [entries[0].entry_id])
        await asyncio.sleep(0)
        assert await box.take() == []
        await box.done(entries)
    assert await reclaim_all(broker, stream, G, "b") == []


async def test_what_could_not_be_acknowledged_is_still_the_mailboxs(
    broker: Broker, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: object) -> None:
        raise BrokerError("gone")

    await broker.append(messages(stream, ["0"]))
    async with mailbox(broker, stream, "a") as box:
        entries = await box.take()
        with monkeypatch.context() as patch, pytest.raises(BrokerError):
            patch.setattr(broker, "ack", failing)
            await box.done(entries)
    assert payloads(await given_back(broker, stream)) == ["0"]


async def test_leaving_gives_back_what_is_not_done(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, ["done", "not done"]))
    async with mailbox(broker, stream, "a") as box:
        entries = await box.take()
        await box.done(entries[:1])
    assert payloads(await given_back(broker, stream)) == ["not done"]


async def test_a_failing_consumer_gives_back_too(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, ["0"]))
    with pytest.raises(ZeroDivisionError):
        async with mailbox(broker, stream, "a") as box:
            assert 1 / (len(await box.take()) - 1)
    assert payloads(await given_back(broker, stream)) == ["0"]


async def test_a_mailbox_outlives_the_deletion_of_its_stream(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, ["0"]))
    async with mailbox(broker, stream, "a") as box:
        entries = await box.take()
        await broker.delete_streams([stream])
        assert await box.take() == []
        await box.done(entries)


async def test_a_failed_renewal_is_made_good(
    broker: Broker, stream: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renew, failures = broker.renew, [BrokerError("gone for a moment")]

    async def failing_once(stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        if failures:
            raise failures.pop()
        return await renew(stream, group, consumer, entry_ids)

    monkeypatch.setattr(broker, "renew", failing_once)
    renewals = Renewals(broker, monkeypatch)
    await broker.append(messages(stream, ["0"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as box:
        entries = await box.take()
        assert await renewals.keep(stream, entries)
        assert failures == []
        await box.done(entries)
    assert "1 leases not renewed: gone for a moment" in caplog.text


async def test_a_defect_in_the_renewal_reaches_the_consumer(
    broker: Broker, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> list[str]:
        raise KeyError("a defect")

    monkeypatch.setattr(broker, "renew", broken)
    await broker.append(messages(stream, ["0"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as box:
        await box.take()
        with pytest.raises(KeyError, match="a defect"):
            async with asyncio.timeout(60):
                while True:
                    await box.take()


async def test_an_answered_entry_is_finished_with_its_answer(
    broker: Broker, prefix: str, stream: str, renewals: Renewals
) -> None:
    answers = prefix + "answers"
    await broker.append(messages(stream, ["0", "1"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as box:
        entries = await box.take()
        await box.finish(entries[:1], messages(answers, ["x", "y"]), max_length=2, timeout_s=20)
        assert payloads(await broker.read_log(answers, after="0-0", max_entries=9, block_s=0)) == ["x", "y"]
        # The leases go on without the finished entry.
        assert await renewals.after_two_more() == [entries[1].entry_id]
    assert payloads(await reclaim_all(broker, stream, G, "b")) == ["1"]


async def test_leases_live_while_an_answer_waits_for_room(
    broker: Broker, prefix: str, stream: str, renewals: Renewals
) -> None:
    answers = prefix + "answers"
    await broker.append(messages(stream, ["0"]))
    await broker.append(messages(answers, ["in the way"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as box:
        entries = await box.take()
        with pytest.raises(DeadlineError, match=answers):
            await box.finish(entries, messages(answers, ["x"]), max_length=1, timeout_s=0.2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(box.finish(entries, messages(answers, ["x"]), max_length=1, timeout_s=240))
            assert await renewals.keep(stream, entries)
            await broker.delete_streams([answers])
    assert await reclaim_all(broker, stream, G, "b") == []
    assert await broker.length(answers) == 1


async def test_leases_live_while_the_broker_takes_its_time_with_an_answer(
    broker: Broker,
    prefix: str,
    stream: str,
    renewals: Renewals,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    append, has_room = broker.append, asyncio.Event()

    async def full_for_a_while(*arguments: Any, **options: Any) -> list[str]:
        await has_room.wait()
        return await append(*arguments, **options)

    await broker.append(messages(stream, ["0"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as box:
        entries = await box.take()
        monkeypatch.setattr(broker, "append", full_for_a_while)
        async with asyncio.TaskGroup() as tasks:
            answers = messages(prefix + "answers", ["x"])
            tasks.create_task(box.finish(entries, answers, max_length=1, timeout_s=240))
            assert await renewals.keep(stream, entries)
            has_room.set()
    assert "have gone to another" not in caplog.text
    assert await broker.length(prefix + "answers") == 1


async def test_an_answer_that_failed_leaves_the_entry_with_the_mailbox(
    broker: Broker, prefix: str, stream: str, renewals: Renewals, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: object, **__: object) -> None:
        raise BrokerError("gone")

    await broker.append(messages(stream, ["0"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as box:
        entries = await box.take()
        with monkeypatch.context() as patch, pytest.raises(BrokerError):
            patch.setattr(broker, "append", failing)
            await box.finish(entries, messages(prefix + "answers", ["x"]), max_length=1, timeout_s=20)
        assert await renewals.keep(stream, entries)
    assert payloads(await reclaim_all(broker, stream, G, "b")) == ["0"]


async def test_what_is_given_back_goes_to_the_next_and_counts(
    broker: Broker, stream: str, renewals: Renewals
) -> None:
    await broker.append(messages(stream, ["0", "1"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as box:
        failed, kept = await box.take()
        await box.give_back([failed])
        again = await given_back(broker, stream)
        assert [(entry.entry_id, entry.deliveries) for entry in again] == [(failed.entry_id, 2)]
        # The mailbox renews what it kept, and no longer what it gave back.
        assert await renewals.keep(stream, [kept])
        await broker.release(stream, G, "b", [failed.entry_id])
        lapsed = await broker.reclaim(stream, G, "c", min_idle_s=LONG_S, max_entries=9)
        assert [(entry.entry_id, entry.deliveries) for entry in lapsed] == [(failed.entry_id, 3)]
        await box.done([kept])
    # What another has now is not given back a second time by the mailbox that leaves.
    assert await given_back(broker, stream) == []


async def test_a_mailbox_may_get_back_what_it_gave_back(broker: Broker, stream: str) -> None:
    await broker.append(messages(stream, ["0"]))
    async with mailbox(broker, stream, "a", lease_s=SHORT_S) as box:
        for deliveries in (1, 2, 3):
            (entry,) = await box.take(block_s=20)
            assert entry.deliveries == deliveries
            await box.give_back([entry])


async def test_a_mailbox_must_be_entered(broker: Broker, stream: str) -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await mailbox(broker, stream, "a").take()


class TestBackPressure:
    async def test_writes_at_once_where_there_is_room(self, broker: Broker, stream: str) -> None:
        ids = await append_when_room(broker, messages(stream, ["0"]), max_length=1, timeout_s=20)
        assert len(ids) == 1
        assert await broker.length(stream) == 1

    async def test_what_is_done_makes_room(self, broker: Broker, stream: str) -> None:
        await broker.ensure_group(stream, G)
        await broker.append(messages(stream, map(str, range(4))))
        entries = await broker.read(stream, G, "a", max_entries=2, block_s=0)
        await broker.ack(stream, G, [entry.entry_id for entry in entries])
        await append_when_room(broker, messages(stream, ["4"]), max_length=3, timeout_s=20)
        assert await broker.length(stream) == 3

    async def test_a_writer_waits_for_the_readers(self, broker: Broker, stream: str) -> None:
        async def consume() -> None:
            async with mailbox(broker, stream, "a", max_entries=1) as box:
                for _ in range(12):
                    entries = await box.take(block_s=20)
                    seen.extend(payloads(entries))
                    longest.append(await broker.length(stream))
                    await box.done(entries)

        seen: list[str] = []
        longest: list[int] = []
        await broker.ensure_group(stream, G)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consume())
            for number in range(12):
                await append_when_room(broker, messages(stream, [str(number)]), max_length=3, timeout_s=20)
        assert seen == [str(number) for number in range(12)]
        assert max(longest) <= 3

    async def test_gives_up_with_a_name_when_nobody_reads(self, broker: Broker, stream: str) -> None:
        await broker.ensure_group(stream, G)
        await broker.append(messages(stream, ["0"]))
        watch = Stopwatch()
        with pytest.raises(DeadlineError, match="max_stream_length") as caught:
            await append_when_room(broker, messages(stream, ["1"]), max_length=1, timeout_s=0.2)
        assert caught.value.seconds == 0.2
        assert stream in caught.value.peer
        assert 0.15 < watch.seconds < 20
        assert await broker.length(stream) == 1
