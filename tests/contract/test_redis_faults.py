"""A real Redis server that dies, freezes, refuses or runs full, and what the broker makes of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from paceline.broker import Ack, Broker, Mailbox, Outgoing, open_broker
from paceline.broker.blobs import BlobReader
from paceline.broker.redis_client import RedisClient
from paceline.broker.redis_server import RedisServer, find_server
from paceline.broker.redis_streams import RedisStreamsBroker
from paceline.core.errors import BrokerError, LostDataError
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


async def test_a_server_that_stays_away_is_named_without_its_password(server: RedisServer) -> None:
    broker = open_broker(server.url, outage_timeout_s=0.5)
    server.stop()
    watch = Stopwatch()
    with pytest.raises(
        BrokerError,
        match=rf"INFO: broker redis://\*\*\*@127.0.0.1:{server.port}/0 cannot .* commands wait 0.5 s",
    ) as caught:
        await broker.ping()
    assert 0.4 < watch.seconds < 2
    assert server.url.split(":")[2].split("@")[0] not in str(caught.value)
    with BlobReader(server.url, outage_timeout_s=0.5) as reader, pytest.raises(BrokerError, match="MGET"):
        reader.get(["k"])
    await broker.close()


async def test_after_the_bound_commands_fail_at_once_until_the_server_is_back(server: RedisServer) -> None:
    broker = open_broker(server.url, outage_timeout_s=0.5)
    server.stop()
    with pytest.raises(BrokerError, match="XLEN"):
        await broker.length("s")
    watch = Stopwatch()
    with pytest.raises(
        BrokerError, match=r"XREADGROUP.*\(broker\.outage_timeout_s\): start the server again"
    ):
        await broker.read("s", G, "a", max_entries=1, block_s=5)
    assert watch.seconds < 0.3
    server.restart()
    assert await broker.length("s") == 0
    await broker.close()


async def test_waiting_through_an_outage_can_be_cancelled(server: RedisServer) -> None:
    broker = open_broker(server.url)
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
        assert watch.seconds < 0.1
    assert watch.seconds < 1  # leaving gives back what it has, but not at the price of a long wait
    await broker.close()


class Notices(list[str]):
    """What a client said about its server."""

    def open(self, url: str, **options: float) -> Broker:
        """A broker that tells it."""
        return open_broker(url, on_outage=self.append, on_recovery=self.append, **options)


async def test_an_outage_is_announced_once_and_so_is_its_end(server: RedisServer) -> None:
    notices = Notices()
    broker = notices.open(server.url)
    await broker.ensure_group("s", G)
    kill(server)
    reading = asyncio.create_task(broker.read("s", G, "a", max_entries=5, block_s=1))
    writing = [asyncio.create_task(broker.append(messages("s", [str(number)]))) for number in range(5)]
    await asyncio.sleep(1.5)
    assert notices == []
    await asyncio.sleep(1.3)
    assert len(notices) == 1
    assert re.search(r"cannot be reached \(.*\); waiting up to 300 s: start the server again", notices[0])
    await asyncio.to_thread(server.restart)
    await asyncio.gather(reading, *writing)
    assert await broker.length("s") == 5
    assert len(notices) == 2
    assert re.fullmatch(rf"broker redis://\*\*\*@127.0.0.1:{server.port}/0 is back after \d s", notices[1])
    await broker.close()


@pytest.mark.parametrize(
    "command", ["read", "read_log", "append", "ack", "renew", "reclaim", "trim", "get_blobs", "ensure_group"]
)
async def test_a_command_waits_through_a_restart(server: RedisServer, command: str) -> None:
    broker = open_broker(server.url)
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
    await broker.close()


async def test_a_blob_reader_waits_through_a_restart(server: RedisServer) -> None:
    broker = open_broker(server.url)
    await broker.put_blob("b", b"v")
    with BlobReader(server.url) as reader:
        assert reader.get(["b"]) == [b"v"]
        kill(server)
        reading = asyncio.create_task(asyncio.to_thread(reader.get, ["b"]))
        await asyncio.sleep(0.3)
        assert not reading.done()
        await asyncio.to_thread(server.restart)
        assert await reading == [b"v"]
    await broker.close()


async def test_a_server_that_comes_back_empty_has_no_entries_and_no_marker(server: RedisServer) -> None:
    broker = open_broker(server.url)
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
        assert payloads(await box.take(block_s=5)) == ["again"]
    await broker.close()


async def test_a_server_that_was_started_again_is_another_process(server: RedisServer) -> None:
    broker, other = open_broker(server.url), open_broker(server.url)
    first = await broker.incarnation()
    assert [await broker.incarnation(), await other.incarnation()] == [first, first]
    kill(server)
    await asyncio.to_thread(server.restart)
    assert await broker.incarnation() != first
    for client in (broker, other):
        await client.close()


async def test_a_server_that_freezes_is_waited_for(server: RedisServer) -> None:
    notices = Notices()
    broker = notices.open(server.url, timeout_s=1.0)
    await broker.ensure_group("s", G)
    await broker.put_blob("b", b"v")
    with BlobReader(server.url, timeout_s=1.0) as reader:
        reader.get(["b"])
        os.kill(server.pid, signal.SIGSTOP)
        try:
            commands = asyncio.gather(
                broker.length("s"),
                broker.read("s", G, "a", max_entries=1, block_s=0.1),
                broker.append(messages("s", ["0"])),
                asyncio.to_thread(reader.get, ["b"]),
            )
            await asyncio.sleep(5)
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
    await broker.close()


async def test_living_consumers_keep_their_entries_when_an_outage_outlasts_the_leases(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    broker, other = open_broker(server.url), open_broker(server.url)
    await broker.append(messages("s", ["0", "1"]))
    async with (
        Mailbox(broker, "s", G, "a", lease_s=0.6, block_s=0.1) as working,
        Mailbox(other, "s", G, "b", lease_s=0.6) as idle,
    ):
        entries = await working.take()
        taking = asyncio.create_task(idle.take(block_s=2.5))
        await asyncio.sleep(0.2)
        kill(server)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(server.restart)
        assert await taking == []
        await working.done(entries)
    assert "have gone to another" not in caplog.text
    for client in (broker, other):
        await client.close()


async def test_a_full_server_makes_writers_wait_until_something_drains(server: RedisServer) -> None:
    notices = Notices()
    broker = notices.open(server.url)
    await broker.append(messages("s", ["0"]))
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory", int(admin.info("memory")["used_memory"]) + 4 * 2**20)
        blob = b"x" * 2**20

        async def write() -> None:
            for number in range(12):
                await broker.append([Outgoing(stream="s", payload=b"", blobs={f"b{number}": blob})])

        writing = asyncio.create_task(write())
        await asyncio.sleep(3.0)
        assert len(notices) == 1
        assert "is full: it has used its maxmemory, takes no more messages" in notices[0]
        # Readers are served meanwhile, and see no message without its blob.
        present = [value for value in await broker.get_blobs([f"b{number}" for number in range(12)]) if value]
        assert await broker.length("s") - 1 == len(present)
        assert 0 < len(present) < 12
        assert len(notices) == 1
        # It goes on when blobs are deleted, and when the limit is raised.
        await broker.delete_blobs([f"b{number}" for number in range(len(present))])
        last = (await broker.read_log("s", after="0-0", max_entries=13, block_s=0))[-1]
        assert await broker.read_log("s", after=last.entry_id, max_entries=1, block_s=5) != []
        admin.config_set("maxmemory", 0)
    async with asyncio.timeout(5):
        await writing
    assert await broker.length("s") == 13
    assert "is back" in notices[1]
    await broker.close()


async def test_a_full_server_that_never_drains_ends_in_an_error(server: RedisServer) -> None:
    broker = open_broker(server.url, outage_timeout_s=0.5)
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory", 1)
    watch = Stopwatch()
    with pytest.raises(BrokerError, match=r"is full.*nothing drains, for .* raise its maxmemory"):
        await broker.append(messages("s", ["0"]))
    assert 0.4 < watch.seconds < 2
    await broker.close()


async def test_a_replica_is_waited_for_until_it_is_promoted(server: RedisServer, tmp_path: Path) -> None:
    with RedisServer.start(tmp_path / "other") as primary, redis.Redis.from_url(server.url) as admin:
        broker = open_broker(server.url)
        await broker.ensure_group("s", G)
        admin.config_set("replica-read-only", "yes")
        admin.replicaof("127.0.0.1", primary.port)
        commands = asyncio.gather(
            broker.append(messages("s", ["0"])),
            broker.ensure_group("s", G),
            broker.read("s", G, "a", max_entries=1, block_s=5),
        )
        await asyncio.sleep(0.5)
        assert not commands.done()
        admin.replicaof("NO", "ONE")
        async with asyncio.timeout(5):
            await commands
        await broker.close()


async def test_after_a_failover_the_address_is_looked_up_again(server: RedisServer, tmp_path: Path) -> None:
    """A symbolic link takes the place of a DNS name: it leads to another server after the failover."""
    link = tmp_path / "primary.sock"
    with unix_server(tmp_path / "a") as first, unix_server(tmp_path / "b") as second:
        link.symlink_to(first)
        broker = open_broker(f"unix://{link}")
        await broker.append(messages("s", ["old"]))
        with redis.Redis(unix_socket_path=str(first)) as admin:
            admin.replicaof("127.0.0.1", server.port)
        appending = asyncio.create_task(broker.append(messages("s", ["new"])))
        await asyncio.sleep(0.3)
        assert not appending.done()
        link.unlink()
        link.symlink_to(second)
        async with asyncio.timeout(5):
            await appending
        with redis.Redis(unix_socket_path=str(second)) as admin:
            assert admin.xlen("s") == 1
        await broker.close()


@contextmanager
def unix_server(folder: Path, *options: str) -> Iterator[Path]:
    """A server on a socket in the folder, without a password; yields the socket's path."""
    folder.mkdir(exist_ok=True)
    path = folder / "redis.sock"
    path.unlink(missing_ok=True)
    command = [str(find_server()), "--port", "0", "--unixsocket", str(path), "--dir", str(folder)]
    process = subprocess.Popen([*command, "--save", "", *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        with socket.socket(socket.AF_UNIX) as probe:
            while probe.connect_ex(str(path)):
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.01)
        yield path
    finally:
        process.kill()
        process.wait()


async def test_a_server_that_is_loading_is_waited_for(tmp_path: Path) -> None:
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
        broker = open_broker(f"unix://{path}")
        with BlobReader(f"unix://{path}") as reader:
            reading = asyncio.to_thread(reader.get, ["b0", "b499"])
            (ids, values) = await asyncio.gather(broker.append(messages("s", ["0"])), reading)
        assert len(ids) == 1
        assert values == [blobs["b0"], blobs["b499"]]
        await broker.close()


async def test_another_server_at_the_address_is_not_waited_for(server: RedisServer, tmp_path: Path) -> None:
    broker = open_broker(server.url)
    await broker.append(messages("s", ["0"]))
    server.stop()
    with (
        RedisServer.start(tmp_path / "other", port=server.port),
        pytest.raises(BrokerError, match="refused the password"),
    ):
        await broker.append(messages("s", ["1"]))
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
    broker = RedisStreamsBroker(RedisClient(server.url, max_connections=4, reserved_connections=2))
    await broker.ensure_group("s", G)
    readers = [asyncio.create_task(broker.read("s", G, "a", max_entries=1, block_s=10)) for _ in range(4)]
    await asyncio.gather(*(broker.append(messages("s", [str(number)])) for number in range(100)))
    assert sum(len(entries) for entries in await asyncio.gather(*readers)) == 4
    with redis.Redis.from_url(server.url) as admin:
        assert len(admin.client_list()) <= 4 + 1
    await broker.close()


async def test_cancelled_readers_leave_the_pool_usable(server: RedisServer) -> None:
    broker = RedisStreamsBroker(RedisClient(server.url, max_connections=4, reserved_connections=2))
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
