"""A real Redis server that dies, freezes or loads: commands wait, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis

from paceline.broker import Ack, Entry, Mailbox, Outgoing, open_broker
from paceline.broker.redis.redis_blobs import BlobClient
from paceline.broker.redis.redis_client import RedisClient
from paceline.broker.redis.redis_server import RedisServer
from paceline.broker.redis.redis_streams import RedisStreamsBroker
from paceline.core.errors import BrokerError
from support.clocks import ManualClock
from support.closing import Closing
from support.redis_faults import Notices, kill, unix_server
from support.streams import Stopwatch, drain, messages, payloads, reclaim_all

pytestmark = pytest.mark.redis
G = "group"


async def test_nothing_acknowledged_is_lost_with_the_servers_process(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
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


async def test_a_reader_waits_through_a_restart(server: RedisServer, closing: Closing) -> None:
    broker = closing(open_broker(server.url))
    await broker.ensure_group("s", G)
    reading = asyncio.create_task(broker.read("s", G, "a", max_entries=1, block_s=120))
    await asyncio.sleep(0.1)
    kill(server)
    await asyncio.to_thread(server.restart)
    other = closing(open_broker(server.url))
    await other.append(messages("s", ["after"]))
    assert payloads(await reading) == ["after"]


async def test_a_server_that_stays_away_is_named_without_its_password(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url, outage_timeout_s=0.5))
    server.stop()
    watch = Stopwatch()
    with pytest.raises(
        BrokerError,
        match=rf"INFO: broker redis://\*\*\*@127.0.0.1:{server.port}/0 cannot .* commands wait 0.5 s",
    ) as caught:
        await broker.ping()
    assert 0.4 < watch.seconds < 200  # and not the 300 s of the default
    assert server.url.split(":")[2].split("@")[0] not in str(caught.value)
    with BlobClient(server.url, outage_timeout_s=0.5) as reader, pytest.raises(BrokerError, match="MGET"):
        reader.get(["k"])


async def test_after_the_bound_commands_fail_at_once_until_the_server_is_back(
    server: RedisServer, closing: Closing
) -> None:
    clock, client = ManualClock(), RedisClient(server.url)
    client.outage._clock = clock
    broker = closing(RedisStreamsBroker(client))
    server.stop()
    waiting = asyncio.create_task(broker.length("s"))
    async with asyncio.timeout(120):
        while not client.outage.is_on:  # noqa: ASYNC110 - a test's own look
            await asyncio.sleep(0.02)
        clock.advance(300)
        with pytest.raises(BrokerError, match="XLEN"):
            await waiting
        # Its clock stands still: a command that waited would wait for ever.
        with pytest.raises(
            BrokerError, match=r"XREADGROUP.*\(broker\.outage_timeout_s\): start the server again"
        ):
            await broker.read("s", G, "a", max_entries=1, block_s=5)
    server.restart()
    assert await broker.length("s") == 0


async def test_waiting_through_an_outage_can_be_cancelled(server: RedisServer, closing: Closing) -> None:
    broker = closing(open_broker(server.url))
    await broker.append(messages("s", ["0"]))
    mailbox = Mailbox(broker, "s", G, "a", lease_s=0.3)
    async with mailbox:
        assert len(await mailbox.take()) == 1
        server.stop()
        commands = [
            asyncio.create_task(broker.append(messages("s", ["1"]))),
            asyncio.create_task(mailbox.take(block_s=5)),
        ]
        await asyncio.sleep(0.4)
        watch = Stopwatch()
        for task in commands:
            task.cancel()
        await asyncio.wait(commands)
    assert watch.seconds < 200  # leaving gives back what it has, but not at the price of a long wait


async def test_an_outage_is_announced_once_and_so_is_its_end(server: RedisServer, closing: Closing) -> None:
    notices = Notices()
    broker = closing(notices.open(server.url))
    await broker.ensure_group("s", G)
    kill(server)
    watch = Stopwatch()
    reading = asyncio.create_task(broker.read("s", G, "a", max_entries=5, block_s=1))
    writing = [asyncio.create_task(broker.append(messages("s", [str(number)]))) for number in range(5)]
    await notices.wait_for(1)
    assert watch.seconds >= 2.0, "a short outage is not worth a notice"
    await asyncio.sleep(1.0)  # the commands go on trying
    assert len(notices) == 1
    assert re.search(r"cannot be reached \(.*\); waiting up to 300 s: start the server again", notices[0])
    await asyncio.to_thread(server.restart)
    await asyncio.gather(reading, *writing)
    assert await broker.length("s") == 5
    assert len(notices) == 2
    assert re.fullmatch(rf"broker redis://\*\*\*@127.0.0.1:{server.port}/0 is back after \d+ s", notices[1])


@pytest.mark.parametrize(
    "command", ["read", "read_log", "append", "ack", "renew", "reclaim", "trim", "get_blobs", "ensure_group"]
)
async def test_a_command_waits_through_a_restart(server: RedisServer, command: str, closing: Closing) -> None:
    broker = closing(open_broker(server.url))
    await broker.ensure_group("s", G)
    await broker.append([Outgoing(stream="s", payload=b"0", blobs={"b": b"v"})])
    (entry,) = await broker.read("s", G, "a", max_entries=1, block_s=0)
    ids = [entry.entry_id]
    commands: dict[str, Callable[[], Awaitable[object]]] = {
        "read": lambda: broker.read("s", G, "b", max_entries=1, block_s=0.1),
        "read_log": lambda: broker.read_log("s", after="0-0", max_entries=1, block_s=0.1),
        "append": lambda: broker.append([], ack=Ack(stream="s", group=G, entry_ids=ids)),
        "ack": lambda: broker.ack("s", G, ids),
        "renew": lambda: broker.renew("s", G, "a", ids),
        "reclaim": lambda: broker.reclaim("s", G, "b", min_idle_s=0, max_entries=1),
        "trim": lambda: broker.trim("s"),
        "get_blobs": lambda: broker.get_blobs(["b"]),
        "ensure_group": lambda: broker.ensure_group("s", G),
    }
    results = {"read": [], "read_log": [entry], "append": [], "renew": ids, "trim": 0, "get_blobs": [b"v"]}
    kill(server)
    waiting = asyncio.ensure_future(commands[command]())
    await asyncio.sleep(0.1)
    assert not waiting.done() or command == "reclaim"
    await asyncio.to_thread(server.restart)
    assert await waiting == results.get(command, [] if command == "reclaim" else None)
    pending = await reclaim_all(broker, "s", G, "c")
    assert payloads(pending) == ([] if command in ("ack", "append") else ["0"])


async def test_after_an_outage_consumers_have_a_lease_to_renew_before_others_take_over(
    server: RedisServer, closing: Closing
) -> None:
    """`a` could not renew two leases in an outage that outlasts them; it then renews one of them."""
    lease_s = 2.4
    a, b = closing(open_broker(server.url)), closing(open_broker(server.url))
    await a.ensure_group("s", G)
    await a.append(messages("s", ["renewed", "left"]))
    renewed, left = [entry.entry_id for entry in await a.read("s", G, "a", max_entries=2, block_s=0)]
    kill(server)
    waiting = asyncio.create_task(b.length("s"))
    await asyncio.sleep(lease_s + 0.2)
    # The lease begins where `b` first meets the server again, some time before it has its answer.
    before = asyncio.get_running_loop().time()
    await asyncio.to_thread(server.restart)
    assert await waiting == 2
    # The server counts both as idle for longer than the lease.
    assert await b.reclaim("s", G, "b", min_idle_s=lease_s, max_entries=2) == []
    assert await a.renew("s", G, "a", [renewed]) == [renewed]
    entries: list[Entry] = []
    while not entries:
        await asyncio.sleep(lease_s / 6)
        assert await a.renew("s", G, "a", [renewed]) == [renewed]
        entries = await b.reclaim("s", G, "b", min_idle_s=lease_s, max_entries=2)
    assert [entry.entry_id for entry in entries] == [left]
    assert lease_s <= asyncio.get_running_loop().time() - before < lease_s + 30


async def test_a_blob_reader_waits_through_a_restart(server: RedisServer, closing: Closing) -> None:
    broker = closing(open_broker(server.url))
    await broker.put_blob("b", b"v")
    with BlobClient(server.url) as reader:
        assert reader.get(["b"]) == [b"v"]
        kill(server)
        reading = asyncio.create_task(asyncio.to_thread(reader.get, ["b"]))
        await asyncio.sleep(0.3)
        assert not reading.done()
        await asyncio.to_thread(server.restart)
        assert await reading == [b"v"]


async def test_a_server_that_comes_back_empty_has_no_entries_and_no_marker(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
    await broker.put_blob("marker", b"1")
    await broker.append(messages("s", ["0", "1"]))
    async with Mailbox(broker, "s", G, "a", lease_s=0.3, block_s=0.1) as box:
        entries = await box.take(1)
        kill(server)
        await asyncio.to_thread(server.restart, keep_data=False)
        assert await box.take() == []
        await box.done(entries)
        assert await broker.get_blobs(["marker"]) == [None]
        # The same mailbox goes on when somebody makes the group again.
        await broker.ensure_group("s", G)
        await broker.append(messages("s", ["again"]))
        assert payloads(await box.take(block_s=30)) == ["again"]


async def test_a_server_that_was_started_again_is_another_process(
    server: RedisServer, closing: Closing
) -> None:
    broker, other = closing(open_broker(server.url)), closing(open_broker(server.url))
    first = await broker.incarnation()
    assert [await broker.incarnation(), await other.incarnation()] == [first, first]
    kill(server)
    await asyncio.to_thread(server.restart)
    assert await broker.incarnation() != first


async def test_a_server_that_freezes_is_waited_for(server: RedisServer, closing: Closing) -> None:
    notices = Notices()
    broker = closing(notices.open(server.url, timeout_s=1.0))
    await broker.ensure_group("s", G)
    await broker.put_blob("b", b"v")
    with BlobClient(server.url, timeout_s=1.0) as reader:
        reader.get(["b"])
        os.kill(server.pid, signal.SIGSTOP)
        try:
            commands = asyncio.gather(
                broker.length("s"),
                broker.read("s", G, "a", max_entries=1, block_s=0.1),
                broker.append(messages("s", ["0"])),
                asyncio.to_thread(reader.get, ["b"]),
            )
            await notices.wait_for(1)
            await asyncio.sleep(1)  # the commands go on waiting
            assert not commands.done()
            assert len(notices) == 1
            assert "has not answered for 1 s; waiting up to 300 s: it is frozen" in notices[0]
        finally:
            os.kill(server.pid, signal.SIGCONT)
        _, _, ids, values = await commands
    assert values == [b"v"]
    assert "is back after" in notices[1]
    # A message may have been stored more than once, and no answer went to the wrong command.
    stored = await broker.read_log("s", after="0-0", max_entries=99, block_s=0)
    assert ids[0] in [entry.entry_id for entry in stored]
    assert await broker.get_blobs(["nix", "b"]) == [None, b"v"]


async def test_a_server_that_is_loading_is_waited_for(tmp_path: Path, closing: Closing) -> None:
    with unix_server(tmp_path) as path, redis.Redis(unix_socket_path=str(path)) as admin:
        # Redis looks at its clients after every 2 MiB that it has loaded.
        blobs = {f"b{number}": os.urandom(2**15) for number in range(500)}
        admin.mset(blobs)
        admin.save()
    with unix_server(tmp_path, "--key-load-delay", "5000"):
        no_retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        with (
            redis.Redis(unix_socket_path=str(path), retry=no_retry) as admin,
            pytest.raises(redis.BusyLoadingError),
        ):
            admin.get("b0")
        broker = closing(open_broker(f"unix://{path}"))
        with BlobClient(f"unix://{path}") as reader:
            reading = asyncio.to_thread(reader.get, ["b0", "b499"])
            (ids, values) = await asyncio.gather(broker.append(messages("s", ["0"])), reading)
        assert len(ids) == 1
        assert values == [blobs["b0"], blobs["b499"]]
