"""The Broker contract, run against memory and against a real Redis server."""

from __future__ import annotations

import asyncio

import pytest

from paceline.broker import Ack, Broker, Outgoing
from paceline.broker.base import SavedPart
from support.memory_broker import MemoryBroker
from support.streams import Stopwatch, drain, messages, payloads, reclaim_all, soon

G = "group"
# After so long a consumer counts as silent here; and after so long not yet, however busy the machine is.
IDLE_S, LONG_S = 0.3, 200.0


async def fill(broker: Broker, stream: str, count: int, *groups: str) -> list[str]:
    for group in groups or (G,):
        await broker.ensure_group(stream, group)
    return await broker.append(messages(stream, map(str, range(count))))


class TestAppendAndRead:
    async def test_entries_come_in_the_order_of_appending(self, broker: Broker, stream: str) -> None:
        first = await fill(broker, stream, 3)
        second = await broker.append(messages(stream, ["x", "y"]))
        entries = await broker.read(stream, G, "a", max_entries=10, block_s=0)
        assert payloads(entries) == ["0", "1", "2", "x", "y"]
        assert [entry.entry_id for entry in entries] == first + second
        assert len(set(first + second)) == 5
        assert {entry.stream for entry in entries} == {stream}

    async def test_a_thousand_messages_in_one_append_keep_their_order(
        self, broker: Broker, stream: str
    ) -> None:
        ids = await fill(broker, stream, 1000)
        entries = await drain(broker, stream, G, "a")
        assert payloads(entries) == [str(number) for number in range(1000)]
        assert [entry.entry_id for entry in entries] == ids

    async def test_no_more_than_max_entries_are_taken(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 5)
        assert payloads(await broker.read(stream, G, "a", max_entries=2, block_s=1)) == ["0", "1"]
        assert payloads(await broker.read(stream, G, "a", max_entries=2, block_s=1)) == ["2", "3"]

    async def test_payloads_are_any_bytes_and_the_trace_context_comes_along(
        self, broker: Broker, stream: str
    ) -> None:
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        await broker.ensure_group(stream, G)
        every_byte = bytes(range(256))
        await broker.append(
            [
                Outgoing(stream=stream, payload=every_byte, traceparent=trace),
                Outgoing(stream=stream, payload=b""),
            ]
        )
        traced, plain = await broker.read(stream, G, "a", max_entries=2, block_s=0)
        assert (traced.payload, traced.traceparent) == (every_byte, trace)
        assert (plain.payload, plain.traceparent) == (b"", "")

    async def test_one_append_reaches_several_streams(self, broker: Broker, prefix: str) -> None:
        left, right = prefix + "one", prefix + "two"
        for stream in (left, right):
            await broker.ensure_group(stream, G)
        await broker.append(messages(left, ["a"]) + messages(right, ["b"]) + messages(left, ["c"]))
        assert payloads(await drain(broker, left, G, "x")) == ["a", "c"]
        assert payloads(await drain(broker, right, G, "x")) == ["b"]

    async def test_nothing_to_append_is_nothing(self, broker: Broker) -> None:
        assert await broker.append([]) == []

    async def test_a_waiting_reader_gets_a_message_as_it_arrives(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 0)
        watch = Stopwatch()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(soon(0.15, broker, messages(stream, ["late"])))
            entries = await broker.read(stream, G, "a", max_entries=5, block_s=600)
        assert payloads(entries) == ["late"]
        assert 0.1 < watch.seconds < 300

    async def test_a_reader_of_nothing_gives_up_after_its_wait(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 0)
        watch = Stopwatch()
        assert await broker.read(stream, G, "a", max_entries=5, block_s=0.2) == []
        assert 0.15 < watch.seconds < 300
        assert await broker.read(stream, G, "a", max_entries=5, block_s=0) == []


class TestGroups:
    async def test_every_group_sees_every_entry(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 3, "scorers", "auditors")
        assert payloads(await drain(broker, stream, "scorers", "a")) == ["0", "1", "2"]
        assert payloads(await drain(broker, stream, "auditors", "a")) == ["0", "1", "2"]

    async def test_a_late_group_sees_the_stream_from_its_first_entry(
        self, broker: Broker, stream: str
    ) -> None:
        await broker.append(messages(stream, ["0", "1"]))
        await broker.ensure_group(stream, "late")
        assert payloads(await drain(broker, stream, "late", "a")) == ["0", "1"]

    async def test_making_a_group_again_changes_nothing(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 3)
        await broker.read(stream, G, "a", max_entries=2, block_s=0)
        await broker.ensure_group(stream, G)
        assert payloads(await drain(broker, stream, G, "a")) == ["2"]

    async def test_consumers_of_a_group_share_what_comes(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 40)
        taken: dict[str, list[str]] = {"a": [], "b": []}

        async def consume(name: str) -> None:
            while entries := await broker.read(stream, G, name, max_entries=3, block_s=0):
                taken[name] += payloads(entries)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for name in taken:
                tasks.create_task(consume(name))
        assert sorted(taken["a"] + taken["b"], key=int) == [str(number) for number in range(40)]
        assert taken["a"]
        assert taken["b"]


class TestAcknowledgement:
    async def test_what_is_acknowledged_never_comes_again(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 3)
        await drain(broker, stream, G, "a")
        await broker.ack(stream, G, [ids[0], ids[2]])
        assert payloads(await reclaim_all(broker, stream, G, "b")) == ["1"]
        assert await drain(broker, stream, G, "b") == []

    async def test_an_acknowledgement_counts_for_its_group_alone(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 1, "one", "two")
        await drain(broker, stream, "one", "a")
        await drain(broker, stream, "two", "a")
        await broker.ack(stream, "one", ids)
        assert await reclaim_all(broker, stream, "one", "b") == []
        assert payloads(await reclaim_all(broker, stream, "two", "b")) == ["0"]

    async def test_unknown_ids_are_ignored(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 1)
        await broker.ack(stream, G, ["999999-0", *ids])
        await broker.ack(stream, G, [])
        assert payloads(await drain(broker, stream, G, "a")) == [
            "0"
        ]  # not delivered yet: nothing to acknowledge


class TestAnswers:
    async def test_messages_and_acknowledgement_are_stored_together(
        self, broker: Broker, prefix: str, stream: str
    ) -> None:
        ids = await fill(broker, stream, 4)
        await drain(broker, stream, G, "a")
        answers = prefix + "answers"
        await broker.ensure_group(answers, G)
        message = Outgoing(stream=answers, payload=b"x", blobs={prefix + "b": b"v"})
        acked = Ack(stream=stream, group=G, entry_ids=[ids[0], ids[2]])
        assert len(await broker.append([message], ack=acked)) == 1
        assert payloads(await reclaim_all(broker, stream, G, "b")) == ["1", "3"]
        assert payloads(await drain(broker, answers, G, "b")) == ["x"]
        assert await broker.get_blobs([prefix + "b"]) == [b"v"]

    async def test_an_answer_may_be_nothing_but_an_acknowledgement(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 2)
        await drain(broker, stream, G, "a")
        assert await broker.append([], ack=Ack(stream=stream, group=G, entry_ids=ids[:1])) == []
        assert payloads(await reclaim_all(broker, stream, G, "b")) == ["1"]
        missing = Ack(stream=stream + "-never-there", group=G, entry_ids=ids)
        assert len(await broker.append(messages(stream, ["2"]), ack=missing)) == 1

    async def test_many_entries_are_answered_by_many_messages(
        self, broker: Broker, prefix: str, stream: str
    ) -> None:
        ids = await fill(broker, stream, 2500)
        await drain(broker, stream, G, "a")
        answers = messages(prefix + "answers", map(str, range(600)))
        assert len(await broker.append(answers, ack=Ack(stream=stream, group=G, entry_ids=ids[:2400]))) == 600
        assert await broker.length(prefix + "answers") == 600
        assert payloads(await reclaim_all(broker, stream, G, "b")) == [str(n) for n in range(2400, 2500)]


class TestDeliveries:
    async def test_each_consumer_that_gets_an_entry_counts(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 2)
        first = await drain(broker, stream, G, "a")
        assert [entry.deliveries for entry in first] == [1, 1]
        for deliveries in (2, 3, 4):
            assert await broker.renew(stream, G, "a", ids) == ids
            await broker.release(stream, G, "a", ids[:1])
            entries = await broker.reclaim(stream, G, "a", min_idle_s=60, max_entries=10)
            assert [(entry.entry_id, entry.deliveries) for entry in entries] == [(ids[0], deliveries)]
        assert [entry.deliveries for entry in await reclaim_all(broker, stream, G, "b")] == [5, 2]

    async def test_groups_count_on_their_own(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 1, "one", "two")
        await drain(broker, stream, "one", "a")
        await reclaim_all(broker, stream, "one", "b")
        assert [entry.deliveries for entry in await drain(broker, stream, "two", "a")] == [1]


class TestLog:
    async def test_any_number_of_readers_follow_by_position(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 5)
        for _ in range(2):
            entries = await broker.read_log(stream, after="0-0", max_entries=3, block_s=0)
            assert payloads(entries) == ["0", "1", "2"]
            assert [entry.entry_id for entry in entries] == ids[:3]
            assert {(entry.stream, entry.deliveries) for entry in entries} == {(stream, 1)}
        rest = await broker.read_log(stream, after=ids[2], max_entries=10, block_s=1)
        assert payloads(rest) == ["3", "4"]
        assert await broker.read_log(stream, after=ids[4], max_entries=10, block_s=0) == []
        # The group has been given nothing.
        assert len(await drain(broker, stream, G, "a")) == 5

    async def test_a_waiting_reader_gets_a_message_as_it_arrives(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 1)
        watch = Stopwatch()
        assert await broker.read_log(stream, after=ids[0], max_entries=5, block_s=0.2) == []
        assert 0.15 < watch.seconds < 300
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(soon(0.1, broker, messages(stream, ["late"])))
            entries = await broker.read_log(stream, after=ids[0], max_entries=5, block_s=600)
        assert payloads(entries) == ["late"]

    async def test_a_stream_that_is_not_there_yet_is_waited_for(self, broker: Broker, stream: str) -> None:
        assert await broker.read_log(stream, after="0-0", max_entries=5, block_s=0) == []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(soon(0.1, broker, messages(stream, ["first"])))
            entries = await broker.read_log(stream, after="0-0", max_entries=5, block_s=60)
        assert payloads(entries) == ["first"]

    async def test_what_lies_after_the_groups_position_is_never_trimmed(
        self, broker: Broker, stream: str
    ) -> None:
        ids = await fill(broker, stream, 5)
        await broker.read_log(stream, after="0-0", max_entries=5, block_s=0)
        assert await broker.trim(stream) == 0
        await broker.advance(stream, G, ids[2])
        assert await broker.trim(stream) == 3
        rest = await broker.read_log(stream, after="0-0", max_entries=5, block_s=0)
        assert payloads(rest) == ["3", "4"]
        await broker.advance(stream, G, ids[4])
        assert await broker.trim(stream) == 2
        await broker.append(messages(stream, ["5"]))
        assert await broker.trim(stream) == 0

    async def test_a_missing_stream_or_group_stays_missing(self, broker: Broker, stream: str) -> None:
        await broker.advance(stream, G, "1-0")
        await fill(broker, stream, 1, "other")
        await broker.advance(stream, G, "1-0")
        assert await broker.read(stream, G, "a", max_entries=1, block_s=0) == []


class TestLeases:
    async def test_what_a_silent_consumer_holds_goes_to_another(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 3)
        await broker.read(stream, G, "dead", max_entries=2, block_s=0)
        await asyncio.sleep(IDLE_S + 0.05)
        assert await broker.reclaim(stream, G, "b", min_idle_s=LONG_S, max_entries=10) == []
        entries = await broker.reclaim(stream, G, "b", min_idle_s=IDLE_S, max_entries=10)
        assert payloads(entries) == ["0", "1"]
        # They are b's now, and only once: nobody can reclaim them before b falls silent in turn.
        assert await broker.reclaim(stream, G, "c", min_idle_s=LONG_S, max_entries=10) == []
        await broker.ack(stream, G, [entry.entry_id for entry in entries])
        assert await reclaim_all(broker, stream, G, "c") == []
        assert payloads(await drain(broker, stream, G, "c")) == ["2"]

    async def test_reclaiming_stops_at_max_entries(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 30)
        await drain(broker, stream, G, "dead")
        await broker.release(stream, G, "dead", ids)
        first = await broker.reclaim(stream, G, "b", min_idle_s=LONG_S, max_entries=12)
        second = await broker.reclaim(stream, G, "c", min_idle_s=LONG_S, max_entries=100)
        assert payloads(first) == [str(number) for number in range(12)]
        assert payloads(second) == [str(number) for number in range(12, 30)]

    async def test_renewing_keeps_an_entry(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 2)
        await drain(broker, stream, G, "a")
        await broker.release(stream, G, "a", ids)  # anybody can reclaim them at once
        for _ in range(4):
            assert await broker.renew(stream, G, "a", ids[:1]) == ids[:1]
        assert payloads(await broker.reclaim(stream, G, "b", min_idle_s=LONG_S, max_entries=10)) == ["1"]

    async def test_renewing_does_not_take_back_what_another_has(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 3)
        await drain(broker, stream, G, "slow")
        await broker.reclaim(stream, G, "b", min_idle_s=0, max_entries=1)
        await broker.ack(stream, G, ids[1:2])
        assert await broker.renew(stream, G, "slow", ids) == [ids[2]]
        assert await broker.renew(stream, G, "b", ids) == [ids[0]]
        assert await broker.renew(stream, G, "b", []) == []

    async def test_a_released_entry_can_be_reclaimed_at_once(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 2)
        await drain(broker, stream, G, "a")
        await broker.release(stream, G, "b", ids)  # not b's to give
        assert await broker.reclaim(stream, G, "b", min_idle_s=60, max_entries=10) == []
        await broker.release(stream, G, "a", ids[:1])
        assert payloads(await broker.reclaim(stream, G, "b", min_idle_s=60, max_entries=10)) == ["0"]


class TestLengthAndTrim:
    async def test_what_all_groups_have_done_goes_and_nothing_else(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 6, "fast", "slow")
        await drain(broker, stream, "fast", "a")
        await broker.ack(stream, "fast", ids)
        await broker.read(stream, "slow", "a", max_entries=4, block_s=0)
        await broker.ack(stream, "slow", [ids[0], ids[1], ids[3]])
        # slow still works on 2, has done 3 beyond it, and has not seen 4 and 5.
        assert await broker.trim(stream) == 2
        assert await broker.length(stream) == 4
        assert payloads(await reclaim_all(broker, stream, "slow", "b")) == ["2"]
        assert payloads(await drain(broker, stream, "slow", "b")) == ["4", "5"]

    async def test_a_pending_entry_outlives_any_number_of_trims(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 3)
        await drain(broker, stream, G, "a")
        await broker.ack(stream, G, ids[1:])
        assert [await broker.trim(stream) for _ in range(3)] == [0, 0, 0]
        assert payloads(await reclaim_all(broker, stream, G, "b")) == ["0"]
        await broker.ack(stream, G, ids[:1])
        assert await broker.trim(stream) == 3
        assert await broker.length(stream) == 0

    async def test_the_group_goes_on_after_everything_was_trimmed(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 3)
        await drain(broker, stream, G, "a")
        await broker.ack(stream, G, ids)
        await broker.trim(stream)
        await broker.append(messages(stream, ["next"]))
        assert payloads(await drain(broker, stream, G, "a")) == ["next"]

    async def test_what_nobody_has_read_stays(self, broker: Broker, stream: str) -> None:
        await broker.append(messages(stream, ["0", "1"]))
        assert await broker.trim(stream) == 0
        await broker.ensure_group(stream, G)
        assert await broker.trim(stream) == 0
        assert await broker.length(stream) == 2

    async def test_a_stream_that_is_not_there_has_no_entries(self, broker: Broker, stream: str) -> None:
        assert await broker.length(stream) == 0
        assert await broker.trim(stream) == 0


class TestAllDone:
    async def test_an_entry_is_done_when_it_is_acknowledged_not_when_it_is_taken(
        self, broker: Broker, stream: str
    ) -> None:
        ids = await fill(broker, stream, 2, G, "other")
        assert not await broker.all_done(stream, G)
        await broker.read(stream, G, "a", max_entries=2, block_s=0)
        assert not await broker.all_done(stream, G)
        await broker.ack(stream, G, ids[1:])
        assert not await broker.all_done(stream, G)
        await broker.ack(stream, G, ids[:1])
        assert await broker.all_done(stream, G)
        assert not await broker.all_done(stream, "other")
        await broker.append(messages(stream, ["next"]))
        assert not await broker.all_done(stream, G)

    async def test_what_was_given_back_is_not_done(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 1)
        await broker.read(stream, G, "a", max_entries=1, block_s=0)
        await broker.release(stream, G, "a", ids)
        assert not await broker.all_done(stream, G)

    async def test_nothing_is_left_to_do_where_nothing_is(self, broker: Broker, stream: str) -> None:
        assert await broker.all_done(stream, G)
        await broker.ensure_group(stream, "other")
        assert await broker.all_done(stream, G)
        await broker.append(messages(stream, ["0"]))
        assert not await broker.all_done(stream, G)


class TestMissingStreams:
    async def test_a_reader_whose_stream_is_deleted_runs_dry(self, broker: Broker, stream: str) -> None:
        ids = await fill(broker, stream, 1)
        await drain(broker, stream, G, "a")
        watch = Stopwatch()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(broker.read(stream, G, "a", max_entries=1, block_s=0.5))
            await asyncio.sleep(0.1)
            await broker.delete_streams([stream])
        assert reading.result() == []
        assert watch.seconds > 0.4  # no busy loop
        assert await broker.renew(stream, G, "a", ids) == []
        assert await reclaim_all(broker, stream, G, "a") == []
        await broker.release(stream, G, "a", ids)
        await broker.ack(stream, G, ids)

    async def test_a_stream_made_again_starts_empty(self, broker: Broker, stream: str) -> None:
        await fill(broker, stream, 3)
        await broker.delete_streams([stream, stream + "-never-there"])
        assert await broker.length(stream) == 0
        await fill(broker, stream, 1)
        assert payloads(await drain(broker, stream, G, "a")) == ["0"]


class TestProgress:
    async def taken(self, broker: Broker, stream: str, count: int = 2) -> list[str]:
        await fill(broker, stream, count)
        return [e.entry_id for e in await broker.read(stream, G, "a", max_entries=count, block_s=0)]

    async def test_parts_follow_each_other_and_one_that_is_repeated_changes_nothing(
        self, broker: Broker, stream: str
    ) -> None:
        first, second = await self.taken(broker, stream)
        every_byte = bytes(range(256))
        parts = [
            SavedPart(entry_id=first, offset=0, data=b"abc"),
            SavedPart(entry_id=second, offset=0, data=b"x"),
        ]
        assert await broker.save_progress(stream, G, "a", parts) == [first, second]
        more = [SavedPart(entry_id=first, offset=3, data=every_byte)]
        assert await broker.save_progress(stream, G, "a", more) == [first]
        assert await broker.save_progress(stream, G, "a", more) == [first]
        assert await broker.progress(stream, G, first) == b"abc" + every_byte
        assert await broker.progress(stream, G, second) == b"x"
        assert await broker.save_progress(stream, G, "a", [SavedPart(entry_id=first, offset=2, data=b"yz")])
        assert await broker.progress(stream, G, first) == b"abyz"
        assert await broker.save_progress(stream, G, "a", [SavedPart(entry_id=first, offset=0, data=b"z")])
        assert await broker.progress(stream, G, first) == b"z"

    async def test_no_part_leaves_a_hole(self, broker: Broker, stream: str) -> None:
        first, second = await self.taken(broker, stream)
        parts = [
            SavedPart(entry_id=first, offset=1, data=b"abc"),
            SavedPart(entry_id=second, offset=0, data=b"x"),
        ]
        assert await broker.save_progress(stream, G, "a", parts) == [second]
        assert await broker.progress(stream, G, first) == b""

    async def test_it_goes_to_whoever_takes_the_entry_and_no_other_can_save(
        self, broker: Broker, stream: str
    ) -> None:
        first, second = await self.taken(broker, stream)
        await broker.save_progress(stream, G, "a", [SavedPart(entry_id=first, offset=0, data=b"abc")])
        await broker.release(stream, G, "a", [first])
        (entry,) = await broker.reclaim(stream, G, "b", min_idle_s=LONG_S, max_entries=1)
        assert (entry.entry_id, await broker.progress(stream, G, first)) == (first, b"abc")
        late = [SavedPart(entry_id=i, offset=0, data=b"late") for i in (first, second)]
        assert await broker.save_progress(stream, G, "a", late) == [second]
        assert await broker.save_progress(stream, G, "b", late) == [first]
        assert await broker.progress(stream, G, first) == b"late"

    @pytest.mark.parametrize("with_answer", [False, True])
    async def test_it_goes_with_the_acknowledgement(
        self, broker: Broker, stream: str, prefix: str, with_answer: bool
    ) -> None:
        ids = await self.taken(broker, stream, 3)
        parts = [SavedPart(entry_id=i, offset=0, data=b"abc") for i in ids]
        await broker.save_progress(stream, G, "a", parts)
        if with_answer:
            ack = Ack(stream=stream, group=G, entry_ids=ids[:2])
            await broker.append([Outgoing(stream=prefix + "answers", payload=b"")], ack=ack)
        else:
            await broker.ack(stream, G, ids[:2])
        assert [await broker.progress(stream, G, i) for i in ids] == [b"", b"", b"abc"]
        assert await broker.save_progress(stream, G, "a", parts) == ids[2:]
        # Nothing is left under any name: the stream, its answers, and what was saved of the third.
        assert await broker.purge(stream) == (1 if isinstance(broker, MemoryBroker) else 2)

    async def test_it_goes_with_the_stream(self, broker: Broker, stream: str) -> None:
        ids = await self.taken(broker, stream, 1200)
        parts = [SavedPart(entry_id=i, offset=0, data=b"abc") for i in ids]
        assert await broker.save_progress(stream, G, "a", parts) == ids
        await broker.delete_streams([stream])
        assert await broker.purge(stream) == 0
        assert await broker.progress(stream, G, ids[0]) == b""
        assert await broker.save_progress(stream, G, "a", parts) == []

    async def test_many_bytes_are_saved_in_several_commands(self, broker: Broker, stream: str) -> None:
        ids = await self.taken(broker, stream, 3)
        data = bytes(5 * 2**20)
        parts = [SavedPart(entry_id=i, offset=0, data=data) for i in ids]
        assert await broker.save_progress(stream, G, "a", parts) == ids
        assert [len(await broker.progress(stream, G, i)) for i in ids] == [len(data)] * 3


class TestBlobs:
    async def test_values_come_in_the_order_of_the_keys(self, broker: Broker, prefix: str) -> None:
        blobs = {f"{prefix}{number}": bytes([number]) * number for number in range(200)}
        await broker.append([Outgoing(stream=prefix + "s", payload=b"", blobs=blobs)])
        keys = sorted(blobs)
        assert await broker.get_blobs(keys) == [blobs[key] for key in keys]

    async def test_a_blob_may_be_stored_without_a_message(self, broker: Broker, prefix: str) -> None:
        await broker.put_blob(prefix + "k", b"1")
        await broker.put_blob(prefix + "k", b"2")
        assert await broker.get_blobs([prefix + "k"]) == [b"2"]
        assert await broker.purge(prefix) == 1

    async def test_a_missing_blob_is_none(self, broker: Broker, prefix: str) -> None:
        await broker.append([Outgoing(stream=prefix + "s", payload=b"", blobs={prefix + "k": b"v"})])
        assert await broker.get_blobs([prefix + "nix", prefix + "k", prefix + "nix"]) == [None, b"v", None]
        assert await broker.get_blobs([]) == []

    async def test_deleting_removes_exactly_the_named(self, broker: Broker, prefix: str) -> None:
        blobs = {prefix + "a": b"1", prefix + "b": b"2"}
        await broker.append([Outgoing(stream=prefix + "s", payload=b"", blobs=blobs)])
        await broker.delete_blobs([prefix + "a", prefix + "never"])
        await broker.delete_blobs([])
        assert await broker.get_blobs(sorted(blobs)) == [None, b"2"]

    async def test_no_message_is_seen_before_its_blobs(
        self, broker: Broker, prefix: str, stream: str
    ) -> None:
        await broker.ensure_group(stream, G)
        batch = [
            Outgoing(
                stream=stream,
                payload=f"{prefix}{number}".encode(),
                blobs={f"{prefix}{number}": b"x" * 20_000},
            )
            for number in range(600)  # more than one portion of the writer's
        ]
        seen = 0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broker.append(batch))
            while seen < len(batch):
                entries = await broker.read(stream, G, "a", max_entries=50, block_s=60)
                assert entries, f"only {seen} messages came"
                values = await broker.get_blobs(payloads(entries))
                assert [len(value or b"") for value in values] == [20_000] * len(entries)
                seen += len(entries)


class TestPurge:
    async def test_removes_a_run_and_nothing_else(self, broker: Broker, prefix: str) -> None:
        run, other = prefix + "run[1]*:", prefix + "run1x:"
        for name in (run, other):
            await broker.append([Outgoing(stream=name + "s", payload=b"", blobs={name + "b": b"v"})])
        assert await broker.purge(run) == 2
        assert [await broker.length(run + "s"), await broker.length(other + "s")] == [0, 1]
        assert await broker.get_blobs([run + "b", other + "b"]) == [None, b"v"]
        assert await broker.purge(run) == 0

    async def test_does_not_empty_the_server(self, broker: Broker) -> None:
        with pytest.raises(ValueError, match="prefix"):
            await broker.purge("")


async def test_waiting_readers_leave_room_for_other_commands(broker: Broker, prefix: str) -> None:
    streams = [f"{prefix}{number}" for number in range(60)]
    for stream in streams:
        await broker.ensure_group(stream, G)
    readers = [
        asyncio.create_task(broker.read(stream, G, "a", max_entries=1, block_s=60)) for stream in streams
    ]
    await asyncio.sleep(0.1)
    await broker.ping()
    await broker.append(messages(streams[0], ["hello"]))
    assert payloads(await readers[0]) == ["hello"]
    assert not any(reader.done() for reader in readers[1:])  # none had to end first
    # Who has waited for its turn to ask gets it.
    await broker.append(messages(streams[-1], ["late"]))
    for reader in readers[1:-1]:
        reader.cancel()
    assert payloads(await readers[-1]) == ["late"]
    await asyncio.wait(readers)
