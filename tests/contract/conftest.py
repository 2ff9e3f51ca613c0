"""Both implementations of the broker, for one suite of contract tests."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from paceline.broker import Broker, open_broker
from paceline.broker.redis.redis_acl import acl_line
from paceline.broker.redis.redis_server import RedisServer
from support.closing import Closing, closing_all
from support.memory_broker import MemoryBroker


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real server that the tests share; they must not kill it."""
    with RedisServer.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, which it may kill."""
    with RedisServer.start(tmp_path / "redis") as server:
        yield server


@pytest.fixture(scope="session")
def limited_url(redis_server: RedisServer) -> str:
    """The server's address for the user whom `paceline certs acl` describes, with the tests' keys."""
    line = acl_line("limited", "of a user", keys="test-*").split()
    with redis.Redis.from_url(redis_server.url) as client:
        client.execute_command("ACL SETUSER", *line[1:])
    return f"redis://limited:of%20a%20user@127.0.0.1:{redis_server.port}/0"


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    """Registers what is to be closed when the test is over."""
    async with closing_all() as register:
        yield register


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def broker(request: pytest.FixtureRequest, closing: Closing) -> Broker:
    """A broker, empty under the test's prefix; at Redis it has no more rights than a run's user."""
    if request.param == "memory":
        return closing(MemoryBroker())
    return closing(open_broker(request.getfixturevalue("limited_url")))


@pytest.fixture
def prefix() -> str:
    """What the test's streams and blobs are named with."""
    return f"test-{uuid.uuid4().hex}:"


@pytest.fixture
def stream(prefix: str) -> str:
    """A stream that no other test knows."""
    return f"{prefix}stream"
