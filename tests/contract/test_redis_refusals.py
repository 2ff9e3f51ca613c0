"""A real Redis server that is full, refuses, or is not the one that was there before."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis

from paceline.broker import Ack, Outgoing, open_broker
from paceline.broker.redis.redis_blobs import BlobClient
from paceline.broker.redis.redis_server import RedisServer
from paceline.core.errors import BrokerError, LostDataError
from support.closing import Closing
from support.redis_faults import Notices, unix_server
from support.streams import Stopwatch, messages, payloads, reclaim_all

pytestmark = pytest.mark.redis
G = "group"


async def test_a_full_server_makes_writers_wait_until_something_drains(
    server: RedisServer, closing: Closing
) -> None:
    notices = Notices()
    broker = closing(notices.open(server.url))
    keys, blob = [f"b{number}" for number in range(12)], b"x" * 2**20

    async def write(some: list[str]) -> None:
        for key in some:
            await broker.append([Outgoing(stream="s", payload=b"", blobs={key: blob})])

    async with asyncio.timeout(300):
        with redis.Redis.from_url(server.url) as admin:
            # Connections' buffers count as used memory, and go again: six blobs alone are above the limit,
            # and a server without them has room for buffers and a blob.
            memory = admin.info("memory")
            empty = int(memory["used_memory"]) - int(memory["mem_not_counted_for_evict"])
            await write(keys[:6])
            admin.config_set("maxmemory", empty + 11 * 2**19)
            writing = asyncio.create_task(write(keys[6:]))
            await notices.wait_for(1)
            assert "is full: it has used its maxmemory, takes no more messages" in notices[0]
            # Readers are served meanwhile, and see no message without its blob.
            assert await broker.get_blobs(keys) == [blob] * 6 + [None] * 6
            assert await broker.length("s") == 6
            assert len(notices) == 1
            # It goes on when blobs are deleted, and when the limit is raised.
            last = (await broker.read_log("s", after="0-0", max_entries=13, block_s=0))[-1]
            await broker.delete_blobs(keys[:6])
            assert await broker.read_log("s", after=last.entry_id, max_entries=1, block_s=30) != []
            await notices.wait_for(2)
            assert "is back" in notices[1]
            admin.config_set("maxmemory", 0)
        await writing
    assert await broker.length("s") == 12


async def test_a_full_server_keeps_its_readers_connections(server: RedisServer, closing: Closing) -> None:
    # A connection closed under a reader fails its command; its next attempt then tells, falsely, that the
    # server is back.
    notices = Notices()
    broker = closing(notices.open(server.url))
    with redis.Redis.from_url(server.url) as admin:
        await broker.append(messages("s", ["0"]))
        await asyncio.gather(*(broker.length("s") for _ in range(3)))
        connected = {client["id"] for client in admin.client_list()}
        admin.config_set("maxmemory", 1)
        writing = asyncio.create_task(broker.append(messages("s", ["1"])))
        await notices.wait_for(1)
        assert connected <= {client["id"] for client in admin.client_list()}
        admin.config_set("maxmemory", 0)
    await writing


async def test_a_full_server_that_never_drains_ends_in_an_error(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url, outage_timeout_s=0.5))
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory", 1)
    watch = Stopwatch()
    with pytest.raises(BrokerError, match=r"is full.*nothing drains, for .* raise its maxmemory"):
        await broker.append(messages("s", ["0"]))
    assert 0.4 < watch.seconds < 200  # and not the 300 s of the default


async def test_a_replica_is_waited_for_until_it_is_promoted(
    server: RedisServer, tmp_path: Path, closing: Closing
) -> None:
    with RedisServer.start(tmp_path / "other") as primary, redis.Redis.from_url(server.url) as admin:
        broker = closing(open_broker(server.url))
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
        async with asyncio.timeout(120):
            await commands


async def test_after_a_failover_the_address_is_looked_up_again(
    server: RedisServer, tmp_path: Path, closing: Closing
) -> None:
    """A symbolic link takes the place of a DNS name: it leads to another server after the failover."""
    link = tmp_path / "primary.sock"
    with unix_server(tmp_path / "a") as first, unix_server(tmp_path / "b") as second:
        link.symlink_to(first)
        broker = closing(open_broker(f"unix://{link}"))
        await broker.append(messages("s", ["old"]))
        with redis.Redis(unix_socket_path=str(first)) as admin:
            admin.replicaof("127.0.0.1", server.port)
        appending = asyncio.create_task(broker.append(messages("s", ["new"])))
        await asyncio.sleep(0.3)
        assert not appending.done()
        link.unlink()
        link.symlink_to(second)
        async with asyncio.timeout(120):
            await appending
        with redis.Redis(unix_socket_path=str(second)) as admin:
            assert admin.xlen("s") == 1


async def test_another_server_at_the_address_is_not_waited_for(
    server: RedisServer, tmp_path: Path, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
    await broker.append(messages("s", ["0"]))
    server.stop()
    with (
        RedisServer.start(tmp_path / "other", port=server.port),
        pytest.raises(BrokerError, match="refused the password"),
    ):
        await broker.append(messages("s", ["1"]))


async def test_a_wrong_password_is_said(server: RedisServer, closing: Closing) -> None:
    broker = closing(open_broker(f"redis://:wrong@127.0.0.1:{server.port}/0"))
    with pytest.raises(BrokerError, match=r"refused the password: correct it in broker\.url") as caught:
        await broker.ping()
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


async def test_no_password_is_said(server: RedisServer, closing: Closing) -> None:
    broker = closing(open_broker(f"redis://127.0.0.1:{server.port}/0"))
    with pytest.raises(BrokerError, match="refused the password"):
        await broker.ping()


async def test_a_server_that_forgot_the_scripts_is_told_again(server: RedisServer, closing: Closing) -> None:
    broker = closing(open_broker(server.url))
    await broker.append(messages("s", ["0"]))
    with redis.Redis.from_url(server.url) as admin:
        admin.script_flush()
    await broker.append(messages("s", ["1"]))
    assert await broker.length("s") == 2


async def test_a_name_of_another_kind_is_refused_with_the_servers_words(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
    await broker.append([Outgoing(stream="s", payload=b"", blobs={"k": b"v"})])
    with pytest.raises(BrokerError, match=r"XLEN: .* refused it: .*wrong kind of value"):
        await broker.length("k")


async def test_a_writer_that_is_cut_off_leaves_no_blob_without_its_message(
    server: RedisServer, closing: Closing
) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on the handshake and 2.5 of 3 MiB, and closes the connection."""
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server.port)
        answers = asyncio.create_task(_copy(from_server, writer, 2**20))
        await _copy(reader, to_server, 5 * 2**19)
        answers.cancel()
        for end in (to_server, writer):
            end.close()

    blobs = {f"b{number}": b"x" * 2**20 for number in range(3)}
    async with await asyncio.start_server(cut, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        url = server.url.replace(f":{server.port}/", f":{port}/")
        broker = closing(open_broker(url, outage_timeout_s=1.0))
        with pytest.raises(BrokerError, match="cannot be reached"):
            await broker.append([Outgoing(stream="s", payload=b"", blobs=blobs)])
    with redis.Redis.from_url(server.url) as admin:
        assert int(admin.info("stats")["total_net_input_bytes"]) > 2 * 2**20
        assert admin.dbsize() == 0


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int) -> None:
    while num_bytes and (data := await reader.read(min(num_bytes, 2**16))):
        num_bytes -= len(data)
        writer.write(data)
        await writer.drain()


@pytest.mark.parametrize("wrong", ["answers", "acknowledged"])
async def test_an_answer_that_is_refused_stores_no_message(
    server: RedisServer, wrong: str, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
    await broker.ensure_group("s", G)
    await broker.append([Outgoing(stream="s", payload=b"0", blobs={"not-a-stream": b"v"})])
    (entry,) = await broker.read("s", G, "a", max_entries=1, block_s=0)
    answers = messages("answers", ["0"])
    if wrong == "answers":
        answers += messages("not-a-stream", ["x"])
    ack_stream = "not-a-stream" if wrong == "acknowledged" else "s"
    with pytest.raises(BrokerError, match="WRONGTYPE not-a-stream is a string, not a stream"):
        await broker.append(answers, ack=Ack(stream=ack_stream, group=G, entry_ids=[entry.entry_id]))
    assert await broker.length("answers") == 0
    assert payloads(await reclaim_all(broker, "s", G, "b")) == ["0"]


async def test_entries_are_not_acknowledged_before_the_last_of_their_answers(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
    await broker.ensure_group("s", G)
    await broker.append([Outgoing(stream="s", payload=b"0", blobs={"not-a-stream": b"v"})])
    (entry,) = await broker.read("s", G, "a", max_entries=1, block_s=0)
    answers = messages("answers", map(str, range(300))) + messages("not-a-stream", ["x"])
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await broker.append(answers, ack=Ack(stream="s", group=G, entry_ids=[entry.entry_id]))
    assert await broker.length("answers") == 256
    assert payloads(await reclaim_all(broker, "s", G, "b")) == ["0"]


async def test_a_blob_reader_names_what_is_missing(server: RedisServer, closing: Closing) -> None:
    broker = closing(open_broker(server.url))
    blobs = {f"b{number}": bytes([number]) for number in range(150)}
    await broker.append([Outgoing(stream="s", payload=b"", blobs=blobs)])
    with BlobClient(server.url) as reader:
        assert reader.get([]) == []
        assert reader.get(list(reversed(blobs))) == list(reversed(blobs.values()))
        with pytest.raises(
            LostDataError, match=r"7 of 9 blobs are not at .*: gone0, gone1, .*gone4 and 2 more"
        ):
            reader.get(["b3", *(f"gone{number}" for number in range(7)), "b4"])


async def test_a_blob_client_stores_what_it_is_given_and_waits_for_no_full_server(
    server: RedisServer, closing: Closing
) -> None:
    broker = closing(open_broker(server.url))
    blobs = {f"b{number}": bytes([number]) for number in range(150)}
    with BlobClient(server.url, outage_timeout_s=600.0) as client:
        client.put(blobs)
        assert client.get(list(blobs)) == list(blobs.values())
        assert await broker.get_blobs(["b0", "b149"]) == [b"\0", bytes([149])]
        with redis.Redis.from_url(server.url) as other:
            other.config_set("maxmemory", 1)
        began = time.monotonic()
        with pytest.raises(BrokerError, match="did not store blobs.*maxmemory"):
            client.put({"c": b"x"})
        assert time.monotonic() - began < 300
