"""Consumers of a real Redis server: leases through kills and outages, reclaiming, the pool of connections."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
import redis

from paceline.broker import Mailbox, open_broker
from paceline.broker.redis.redis_client import RedisClient
from paceline.broker.redis.redis_server import RedisServer
from paceline.broker.redis.redis_streams import RedisStreamsBroker
from support.closing import Closing
from support.redis_faults import kill
from support.streams import drain, messages, payloads, reclaim_all

pytestmark = pytest.mark.redis
G = "group"


CONSUMER = """
import asyncio, os, sys
from paceline.broker import Mailbox, open_broker
async def main():
    async with Mailbox(open_broker(os.environ["URL"]), "s", "group", "victim", lease_s=3.6) as box:
        entries = await box.take(5, block_s=30)
        print(len(entries), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_killed_process_keeps_its_entries_while_it_lives_and_no_longer(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
    await broker.append(messages("s", map(str, range(8))))
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONSUMER, env={**os.environ, "URL": server.url}, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert victim.stdout is not None
        async with asyncio.timeout(120):
            assert await victim.stdout.readline() == b"5\n"
        async with Mailbox(broker, "s", G, "survivor", lease_s=3.6) as box:
            rest = await box.take()
            assert payloads(rest) == ["5", "6", "7"]
            assert await box.take(block_s=7.2) == []  # two leases: the victim lives and renews
            victim.kill()
            await victim.wait()
            recovered = await box.take(block_s=30)
            assert payloads(recovered) == ["0", "1", "2", "3", "4"]
            await box.done(rest + recovered)
        assert await reclaim_all(broker, "s", G, "anybody") == []
    finally:
        if victim.returncode is None:
            victim.kill()
            await victim.wait()


async def test_living_consumers_keep_their_entries_when_an_outage_outlasts_the_leases(
    server: RedisServer, caplog: pytest.LogCaptureFixture, closing: Closing
) -> None:
    broker, other = closing(open_broker(server.url)), closing(open_broker(server.url))
    await broker.append(messages("s", ["0", "1"]))
    async with (
        Mailbox(broker, "s", G, "a", lease_s=3.6, block_s=0.1) as working,
        Mailbox(other, "s", G, "b", lease_s=3.6) as idle,
    ):
        entries = await working.take()
        taking = asyncio.create_task(idle.take(block_s=10.8))
        await asyncio.sleep(0.2)
        kill(server)
        await asyncio.sleep(4.6)
        await asyncio.to_thread(server.restart)
        assert await taking == []
        await working.done(entries)
    assert "have gone to another" not in caplog.text


async def test_reclaiming_is_one_round_trip_however_many_are_pending(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
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


async def test_entries_that_were_deleted_are_not_reclaimed_again_and_again(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
    await broker.ensure_group("s", G)
    ids = await broker.append(messages("s", map(str, range(3000))))
    await drain(broker, "s", G, "a")
    with redis.Redis.from_url(server.url) as admin:
        admin.xdel("s", *ids[:1500], ids[1502])
        entries = await broker.reclaim("s", G, "b", min_idle_s=0, max_entries=4)
        assert payloads(entries) == ["1500", "1501", "1503", "1504"]
        assert admin.xpending("s", G)["pending"] == 3000 - 1501


async def test_the_pool_serves_more_tasks_than_it_has_connections(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(RedisStreamsBroker(RedisClient(server.url, max_connections=4, reserved_connections=2)))
    await broker.ensure_group("s", G)
    readers = [asyncio.create_task(broker.read("s", G, "a", max_entries=1, block_s=10)) for _ in range(4)]
    await asyncio.gather(*(broker.append(messages("s", [str(number)])) for number in range(100)))
    assert sum(len(entries) for entries in await asyncio.gather(*readers)) == 4
    with redis.Redis.from_url(server.url) as admin:
        assert len(admin.client_list()) <= 4 + 1


async def test_cancelled_readers_leave_the_pool_usable(server: RedisServer, closing: Closing) -> None:
    broker = closing(RedisStreamsBroker(RedisClient(server.url, max_connections=4, reserved_connections=2)))
    await broker.ensure_group("s", G)
    for _ in range(10):
        reading = asyncio.create_task(broker.read("s", G, "a", max_entries=1, block_s=30))
        await asyncio.sleep(0.02)
        reading.cancel()
        await asyncio.wait([reading])
    await broker.append(messages("s", ["0"]))
    assert payloads(await broker.read("s", G, "b", max_entries=1, block_s=20)) == ["0"]
