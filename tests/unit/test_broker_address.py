"""Broker addresses: which are opened, which refused, and that no password is shown."""

from __future__ import annotations

import pytest

from paceline.broker import open_broker
from paceline.broker.address import redact
from paceline.broker.blobs import BlobReader
from paceline.broker.memory import MemoryBroker
from paceline.broker.redis_client import RedisClient
from paceline.broker.redis_streams import RedisStreamsBroker
from paceline.core.errors import BrokerError, ConfigError
from support.clocks import ManualClock
from support.streams import drain, messages, payloads


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://user:se@cret@host/1", "rediss://***@host/1"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("memory://name", "memory://name"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize("url", ["amqp://:secret@host", "localhost:6379", ""])
def test_other_schemes_are_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"broker\.url .* write redis://\[:password@\]host:port/db"
    ) as caught:
        open_broker(url)
    assert "secret" not in str(caught.value)


def test_an_unusable_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        open_broker("redis://:secret@host:many/0")
    assert "secret" not in str(caught.value)


def test_a_learner_cannot_read_blobs_of_another_process() -> None:
    with pytest.raises(ConfigError, match="one process only"):
        BlobReader("memory://name")


def test_the_pool_needs_room_for_more_than_blocking_reads() -> None:
    with pytest.raises(ValueError, match="reserved_connections is 4, must be in 1 to 3"):
        RedisClient("redis://host", max_connections=4, reserved_connections=4)


async def test_brokers_of_one_memory_name_share_their_streams() -> None:
    first, second, other = open_broker("memory://x"), open_broker("memory://x"), open_broker("memory://")
    await first.ensure_group("s", "g")
    await first.append(messages("s", ["0"]))
    assert await other.length("s") == 0
    await first.close()
    assert payloads(await drain(second, "s", "g", "a")) == ["0"]
    with pytest.raises(BrokerError, match="closed"):
        await first.append([])


async def test_a_lease_is_measured_by_the_clock_given() -> None:
    clock = ManualClock()
    broker = MemoryBroker(clock)
    await broker.ensure_group("s", "g")
    await broker.append(messages("s", ["0"]))
    await drain(broker, "s", "g", "a")
    clock.advance(4.999)
    assert await broker.reclaim("s", "g", "b", min_idle_s=5, max_entries=1) == []
    clock.advance(0.001)
    assert payloads(await broker.reclaim("s", "g", "b", min_idle_s=5, max_entries=1)) == ["0"]


@pytest.mark.parametrize(
    ("version", "accepted"), [("6.0.16", False), ("6.2.14", True), ("7.0.15", True), ("10.0", True)]
)
async def test_a_server_that_is_too_old_is_refused(
    version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def info(*_: object, **__: object) -> dict[str, str]:
        return {"redis_version": version}

    client = RedisClient("redis://:secret@host:1/0")
    monkeypatch.setattr(client, "run", info)
    broker = RedisStreamsBroker(client)
    if accepted:
        await broker.ping()
    else:
        with pytest.raises(
            BrokerError, match=r"redis://\*\*\*@host:1/0 is Redis 6\.0\.16: 6\.2 is the first"
        ):
            await broker.ping()
    await broker.close()
