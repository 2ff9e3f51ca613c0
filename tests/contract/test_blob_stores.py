"""Blobs in stores of their own, on real servers: each where its key says, and a store that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from paceline.broker import Broker, Outgoing, names, open_broker
from paceline.broker.opening import nearest_store
from paceline.broker.redis import blob_stores
from paceline.broker.redis.redis_acl import acl_line
from paceline.broker.redis.redis_blobs import BlobClient
from paceline.broker.redis.redis_server import RedisServer
from paceline.core.errors import BrokerError, ConfigError, LostDataError
from support.closing import Closing
from support.redis_faults import kill

pytestmark = pytest.mark.redis
G = "group"
SHORT_S = 0.4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    """A server without durability, whose user has no more rights than a run's."""
    with RedisServer.start(tmp_path / "store", is_durable=False) as server:
        yield server


def limited(server: RedisServer, prefix: str) -> str:
    """The server's address for a user with a run's rights."""
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL SETUSER", *acl_line("run", "pw", keys=f"{prefix}*").split()[1:])
    return f"redis://run:pw@127.0.0.1:{server.port}/0"


def key_of(prefix: str, name: str, store: str = "0") -> str:
    return f"{prefix}r:blob@{store}:{name}:server:1"


def keys_on(server: RedisServer, prefix: str) -> list[str]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return sorted(key for key in client.keys(f"{prefix}*") if client.type(key) == "string")


def opened(url: str, *stores: str) -> Broker:
    return open_broker(url, stores=stores, writer="rollout-0", timeout_s=SHORT_S, outage_timeout_s=SHORT_S)


def test_a_key_names_its_store() -> None:
    plain = names.blob("run", "train:1:0:0", "rollout-0", "a.1")
    there = names.blob("run", "train:1:0:0", "rollout-0", "a.1", "12")
    assert plain == "paceline:run:blob:train:1:0:0:rollout-0:a.1"
    assert there == "paceline:run:blob@12:train:1:0:0:rollout-0:a.1"
    assert names.store_of(plain) == names.store_of(names.image("run", "abc")) == ""
    beside = (names.text(there), names.learner_log_probs(there), names.teacher_top_k(there, "d"))
    assert [names.store_of(key) for key in (there, *beside)] == ["12"] * 4


async def test_each_blob_is_where_its_key_says(
    limited_url: str, redis_server: RedisServer, store: RedisServer, prefix: str, closing: Closing
) -> None:
    broker = closing(opened(limited_url, limited(store, prefix)))
    assert (broker.store, broker.has_stores) == ("0", True)
    far, near, unknown = key_of(prefix, "a"), f"{prefix}r:image:x", key_of(prefix, "b", store="7")
    await broker.ensure_group(f"{prefix}s", G)
    await broker.append([Outgoing(stream=f"{prefix}s", payload=b"p", blobs={far: b"1", near: b"2"})])
    await broker.append([Outgoing(stream=f"{prefix}s", payload=b"q", blobs={unknown: b"3"})])
    await broker.put_blob(names.text(far), b"text")
    assert keys_on(store, prefix) == [far, names.text(far)]
    assert keys_on(redis_server, prefix) == sorted([near, unknown])
    entries = await broker.read(f"{prefix}s", G, "c", max_entries=9, block_s=0)
    assert [entry.payload for entry in entries] == [b"p", b"q"]
    missing = key_of(prefix, "c")
    asked = [missing, near, names.text(far), unknown, far, near]
    assert await broker.get_blobs(asked) == [None, b"2", b"text", b"3", b"1", b"2"]
    assert await broker.missing_blobs([far, missing, near, f"{prefix}none"]) == [missing, f"{prefix}none"]
    (used,) = (await broker.store_bytes()).values()
    assert used is not None
    assert used > 100_000
    with BlobClient(limited_url, stores=[limited(store, prefix)]) as client:
        assert client.get([near, far, unknown]) == [b"2", b"1", b"3"]
        client.put({names.learner_log_probs(far): b"lp", f"{prefix}own": b"4"})
        with pytest.raises(LostDataError, match=r"1 of 2 blobs are not at the broker .*blob@0:c"):
            client.get([far, missing])
    assert names.learner_log_probs(far) in keys_on(store, prefix)
    assert f"{prefix}own" in keys_on(redis_server, prefix)
    await broker.delete_blobs([far, near])
    assert far not in keys_on(store, prefix)
    assert near not in keys_on(redis_server, prefix)
    assert await broker.purge(prefix) == 5
    assert keys_on(store, prefix) == keys_on(redis_server, prefix) == []


async def test_a_store_that_dies_takes_its_blobs_and_nothing_else(
    limited_url: str,
    redis_server: RedisServer,
    store: RedisServer,
    prefix: str,
    closing: Closing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blob_stores, "_REST_S", 0.0)
    broker, stream = closing(opened(limited_url, limited(store, prefix))), f"{prefix}s"
    old, new, newest = (key_of(prefix, name) for name in ("old", "new", "newest"))
    await broker.ensure_group(stream, G)
    await broker.append([Outgoing(stream=stream, payload=b"p", blobs={old: b"1"})])
    kill(store)
    assert await broker.missing_blobs([old]) == [old]
    assert await broker.store_bytes() == {"0": None}
    # The message is there with its blob, which a reader finds although the key names the store.
    await broker.append([Outgoing(stream=stream, payload=b"q", blobs={new: b"2"})])
    assert await broker.get_blobs([old, new]) == [None, b"2"]
    assert keys_on(redis_server, prefix) == [new]
    await broker.delete_blobs([old])
    with BlobClient(limited_url, stores=[store.url], outage_timeout_s=SHORT_S) as client:
        assert client.get([new]) == [b"2"]
        with pytest.raises(LostDataError, match="blob@0:old"):
            client.get([old])
        with pytest.raises(BrokerError, match="did not store"):
            client.put({old: b"x"})
    store.restart()
    limited(store, prefix)
    await broker.append([Outgoing(stream=stream, payload=b"r", blobs={newest: b"3"})])
    assert keys_on(store, prefix) == [newest]
    assert await broker.get_blobs([old, new, newest]) == [None, b"2", b"3"]
    with BlobClient(limited_url, stores=[store.url]) as client:
        assert client.get([newest, new]) == [b"3", b"2"]
    await broker.delete_blobs([new, newest])
    assert keys_on(store, prefix) == keys_on(redis_server, prefix) == []
    assert len(await broker.read(stream, G, "c", max_entries=9, block_s=0)) == 3


async def test_a_frozen_store_delays_only_the_first_command(
    limited_url: str, store: RedisServer, prefix: str, closing: Closing
) -> None:
    said: list[str] = []
    broker = open_broker(
        limited_url,
        stores=[limited(store, prefix)],
        timeout_s=SHORT_S,
        outage_timeout_s=SHORT_S,
        on_outage=said.append,
    )
    closing(broker)
    assert broker.store == ""
    keys = [key_of(prefix, str(number)) for number in range(50)]
    await broker.put_blob(keys[0], b"there")
    os.kill(store.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for key in keys:
            await broker.put_blob(key, b"2")
        assert await broker.get_blobs(keys) == [b"2"] * 50
        await broker.delete_blobs(keys)
        # Fifty waits would take 20 s.
        assert time.monotonic() - began < 15
    finally:
        os.kill(store.pid, signal.SIGCONT)
    await broker.purge(prefix)
    assert keys_on(store, prefix) == []


async def test_blobs_that_could_not_be_deleted_go_with_the_next(
    limited_url: str, store: RedisServer, prefix: str, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_stores, "_REST_S", 0.0)
    broker = closing(opened(limited_url, limited(store, prefix)))
    keys = [key_of(prefix, name) for name in ("a", "b")]
    for key in keys:
        await broker.put_blob(key, b"x")
    with redis.Redis.from_url(store.url) as client:
        client.execute_command("ACL SETUSER", "run", "-unlink")
        await broker.delete_blobs(keys[:1])
        assert keys_on(store, prefix) == keys
        client.execute_command("ACL SETUSER", "run", "+unlink")
    await broker.delete_blobs(keys[1:])
    assert keys_on(store, prefix) == []


def test_a_writer_takes_a_store_of_its_own_machine() -> None:
    far, near = "redis://192.0.2.1:6379/0", "redis://127.0.0.1:7000/0"
    assert nearest_store([far, near, far], "rollout-5") == "1"
    assert nearest_store([far, "unix:///run/redis.sock"], "rollout-0") == "1"
    assert [nearest_store([near, far, near], f"rollout-{number}") for number in range(4)] == list("0202")
    assert {nearest_store([far, far], f"server {letter}") for letter in "abcdefgh"} == {"0", "1"}


def test_addresses_of_stores_are_checked() -> None:
    with pytest.raises(ConfigError, match="http"):
        open_broker("redis://127.0.0.1:1/0", stores=["http://127.0.0.1:2"])
    with pytest.raises(ConfigError, match="http"):
        BlobClient("redis://127.0.0.1:1/0", stores=["http://127.0.0.1:2"])
