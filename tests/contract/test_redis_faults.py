"""A real Redis server that dies, freezes, refuses or runs full, and what the broker makes of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from paceline.broker import Ack, Mailbox, Outgoing, open_broker
from paceline.broker.blobs import BlobReader
from paceline.broker.redis_server import RedisServer
from paceline.broker.redis_streams import RedisStreamsBroker
from paceline.core.errors import BrokerError, DeadlineError, LostDataError
from support.streams import Stopwatch, drain, messages, payloads, reclaim_all

pytestmark = pytest.mark.redis
G = "group"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, which it may kill."""
    with RedisServer.start(tmp_path / "redis") as server:
        yield server


def kill(server: RedisServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


async def test_nothing_acknowledged_is_lost_with_the_servers_process(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.ensure_group("s", G)
    await broker.append(
        [
            Outgoing(stream="s", payload=str(number).encode(), blobs={f"b{number}": b"x" * number})
            for number in range(200)
        ]
    )
    taken = await broker.read("s", G, "a", max_entries=100, block_s=0)
    await broker.ack("s", G, [entry.entry_id for entry in taken[:40]])

    kill(server)
    server.restart()

    # The same broker object goes on: it connects anew by itself.
    assert await broker.length("s") == 200
    pending = await reclaim_all(broker, "s", G, "b")
    assert payloads(pending) == [str(number) for number in range(40, 100)]
    assert payloads(await drain(broker, "s", G, "b")) == [str(number) for number in range(100, 200)]
    values = await broker.get_blobs([f"b{number}" for number in range(200)])
    assert values == [b"x" * number for number in range(200)]
    await broker.close()


async def test_a_reader_waits_through_a_restart(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.ensure_group("s", G)
    reading = asyncio.create_task(broker.read("s", G, "a", max_entries=1, block_s=8))
    await asyncio.sleep(0.1)
    kill(server)
    await asyncio.to_thread(server.restart)
    other = open_broker(server.url)
    await other.append(messages("s", ["after"]))
    assert payloads(await reading) == ["after"]
    await other.close()
    await broker.close()


CONSUMER = """
import asyncio, os, sys
from paceline.broker import Mailbox, open_broker
async def main():
    async with Mailbox(open_broker(os.environ["URL"]), "s", "group", "victim", lease_s=0.5) as box:
        entries = await box.take(5, block_s=5)
        print(len(entries), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_killed_process_keeps_its_entries_while_it_lives_and_no_longer(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.append(messages("s", map(str, range(8))))
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONSUMER, env={**os.environ, "URL": server.url}, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert victim.stdout is not None
        async with asyncio.timeout(20):
            assert await victim.stdout.readline() == b"5\n"
        async with Mailbox(broker, "s", G, "survivor", lease_s=0.5) as box:
            rest = await box.take(block_s=1.5)  # three leases: the victim lives and renews
            assert payloads(rest) == ["5", "6", "7"]
            assert await box.take(block_s=1.0) == []
            victim.kill()
            await victim.wait()
            watch = Stopwatch()
            recovered = await box.take(block_s=10)
            assert payloads(recovered) == ["0", "1", "2", "3", "4"]
            assert watch.seconds < 2
            await box.done(rest + recovered)
        assert await reclaim_all(broker, "s", G, "anybody") == []
    finally:
        if victim.returncode is None:
            victim.kill()
            await victim.wait()
    await broker.close()


async def test_a_server_that_is_gone_is_named_without_its_password(server: RedisServer) -> None:
    broker = open_broker(server.url, timeout_s=5)
    server.stop()
    watch = Stopwatch()
    with pytest.raises(
        BrokerError, match=rf"INFO: broker redis://\*\*\*@127.0.0.1:{server.port}/0 cannot"
    ) as caught:
        await broker.ping()
    assert watch.seconds < 5
    assert server.url.split(":")[2].split("@")[0] not in str(caught.value)
    with BlobReader(server.url) as reader, pytest.raises(BrokerError, match="MGET"):
        reader.get(["k"])
    await broker.close()


async def test_a_frozen_server_ends_in_a_deadline(server: RedisServer) -> None:
    broker = open_broker(server.url, timeout_s=0.4)
    await broker.ensure_group("s", G)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        watch = Stopwatch()
        with pytest.raises(DeadlineError, match="XLEN: no answer from broker redis") as caught:
            await broker.length("s")
        assert caught.value.seconds == 0.4
        assert 0.3 < watch.seconds < 2
        with pytest.raises(DeadlineError, match="XREADGROUP") as caught:
            await broker.read("s", G, "a", max_entries=1, block_s=0.2)
        assert caught.value.seconds == pytest.approx(0.6)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    # A command cut off in the middle must not leave its answer to the next one.
    await broker.append(messages("s", ["0"]))
    assert await broker.length("s") == 1
    assert await broker.get_blobs(["nix"]) == [None]
    await broker.close()


async def test_a_wrong_password_is_said(server: RedisServer) -> None:
    broker = open_broker(f"redis://:wrong@127.0.0.1:{server.port}/0")
    with pytest.raises(BrokerError, match=r"refused the password: correct it in broker\.url") as caught:
        await broker.ping()
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
    await broker.close()


async def test_no_password_is_said(server: RedisServer) -> None:
    broker = open_broker(f"redis://127.0.0.1:{server.port}/0")
    with pytest.raises(BrokerError, match="refused the password"):
        await broker.ping()
    await broker.close()


async def test_a_full_server_takes_a_message_whole_or_not_at_all(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.append(messages("s", ["0"]))
    with redis.Redis.from_url(server.url) as admin:
        used = int(admin.info("memory")["used_memory"])  # type: ignore[index]
        admin.config_set("maxmemory", used + 4 * 2**20)
        blob = b"x" * 2**20
        with pytest.raises(BrokerError, match=r"out of memory .* raise its maxmemory"):
            for number in range(20):
                await broker.append([Outgoing(stream="s", payload=b"", blobs={f"b{number}": blob})])
        admin.config_set("maxmemory", 0)
    present = [value for value in await broker.get_blobs([f"b{number}" for number in range(20)]) if value]
    assert await broker.length("s") - 1 == len(present)
    assert 0 < len(present) < 20
    await broker.close()


async def test_a_server_that_forgot_the_scripts_is_told_again(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.append(messages("s", ["0"]))
    with redis.Redis.from_url(server.url) as admin:
        admin.script_flush()
    await broker.append(messages("s", ["1"]))
    assert await broker.length("s") == 2
    await broker.close()


async def test_a_name_of_another_kind_is_refused_with_the_servers_words(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.append([Outgoing(stream="s", payload=b"", blobs={"k": b"v"})])
    with pytest.raises(BrokerError, match=r"XLEN: .* refused it: .*wrong kind of value"):
        await broker.length("k")
    await broker.close()


@pytest.mark.parametrize("wrong", ["answers", "acknowledged"])
async def test_an_answer_that_is_refused_stores_nothing(server: RedisServer, wrong: str) -> None:
    broker = open_broker(server.url)
    await broker.ensure_group("s", G)
    await broker.append([Outgoing(stream="s", payload=b"0", blobs={"not-a-stream": b"v"})])
    (entry,) = await broker.read("s", G, "a", max_entries=1, block_s=0)
    answers = [Outgoing(stream="answers", payload=b"", blobs={"b": b"v"})]
    if wrong == "answers":
        answers += messages("not-a-stream", ["x"])
    ack_stream = "not-a-stream" if wrong == "acknowledged" else "s"
    with pytest.raises(BrokerError, match="WRONGTYPE not-a-stream is a string, not a stream"):
        await broker.append(answers, ack=Ack(stream=ack_stream, group=G, entry_ids=[entry.entry_id]))
    assert await broker.length("answers") == 0
    assert await broker.get_blobs(["b"]) == [None]
    assert payloads(await reclaim_all(broker, "s", G, "b")) == ["0"]
    await broker.close()


async def test_entries_are_not_acknowledged_before_the_last_of_their_answers(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.ensure_group("s", G)
    await broker.append([Outgoing(stream="s", payload=b"0", blobs={"not-a-stream": b"v"})])
    (entry,) = await broker.read("s", G, "a", max_entries=1, block_s=0)
    answers = messages("answers", map(str, range(300))) + messages("not-a-stream", ["x"])
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await broker.append(answers, ack=Ack(stream="s", group=G, entry_ids=[entry.entry_id]))
    assert await broker.length("answers") == 256
    assert payloads(await reclaim_all(broker, "s", G, "b")) == ["0"]
    await broker.close()


async def test_reclaiming_is_one_round_trip_however_many_are_pending(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.ensure_group("s", G)
    ids = await broker.append(messages("s", map(str, range(12_800))))
    while await broker.read("s", G, "a", max_entries=1000, block_s=0):
        pass
    await broker.release("s", G, "a", ids[-70:])
    with redis.Redis.from_url(server.url) as admin:
        admin.config_resetstat()
        entries = await broker.reclaim("s", G, "b", min_idle_s=60, max_entries=64)
        entries += await broker.reclaim("s", G, "b", min_idle_s=60, max_entries=64)
        statistics: dict[str, dict[str, int]] = admin.info("commandstats")
    assert [entry.entry_id for entry in entries] == ids[-70:]
    assert {entry.deliveries for entry in entries} == {2}
    sent = {name: row["calls"] for name, row in statistics.items() if "eval" in name or "xauto" in name}
    # The first call sends the script's text once.
    assert sent == {"cmdstat_evalsha": 2, "cmdstat_eval": 1}
    await broker.close()


async def test_entries_that_were_deleted_are_not_reclaimed_again_and_again(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.ensure_group("s", G)
    ids = await broker.append(messages("s", map(str, range(3000))))
    await drain(broker, "s", G, "a")
    with redis.Redis.from_url(server.url) as admin:
        admin.xdel("s", *ids[:1500], ids[1502])
        entries = await broker.reclaim("s", G, "b", min_idle_s=0, max_entries=4)
        assert payloads(entries) == ["1500", "1501", "1503", "1504"]
        assert admin.xpending("s", G)["pending"] == 3000 - 1501
    await broker.close()


async def test_the_pool_serves_more_tasks_than_it_has_connections(server: RedisServer) -> None:
    broker = RedisStreamsBroker(server.url, max_connections=4, reserved_connections=2)
    await broker.ensure_group("s", G)
    readers = [asyncio.create_task(broker.read("s", G, "a", max_entries=1, block_s=0.3)) for _ in range(4)]
    await asyncio.gather(*(broker.append(messages("s", [str(number)])) for number in range(100)))
    assert sum(len(entries) for entries in await asyncio.gather(*readers)) == 4
    with redis.Redis.from_url(server.url) as admin:
        assert len(admin.client_list()) <= 4 + 1
    await broker.close()


async def test_cancelled_readers_leave_the_pool_usable(server: RedisServer) -> None:
    broker = RedisStreamsBroker(server.url, max_connections=4, reserved_connections=2)
    await broker.ensure_group("s", G)
    for _ in range(10):
        reading = asyncio.create_task(broker.read("s", G, "a", max_entries=1, block_s=30))
        await asyncio.sleep(0.02)
        reading.cancel()
        await asyncio.wait([reading])
    await broker.append(messages("s", ["0"]))
    assert payloads(await broker.read("s", G, "b", max_entries=1, block_s=2)) == ["0"]
    await broker.close()


async def test_a_blob_reader_names_what_is_missing(server: RedisServer) -> None:
    broker = open_broker(server.url)
    blobs = {f"b{number}": bytes([number]) for number in range(150)}
    await broker.append([Outgoing(stream="s", payload=b"", blobs=blobs)])
    with BlobReader(server.url) as reader:
        assert reader.get([]) == []
        assert reader.get(list(reversed(blobs))) == list(reversed(blobs.values()))
        with pytest.raises(
            LostDataError, match=r"7 of 9 blobs are not at .*: gone0, gone1, .*gone4 and 2 more"
        ):
            reader.get(["b3", *(f"gone{number}" for number in range(7)), "b4"])
    await broker.close()
