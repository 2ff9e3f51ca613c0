"""Broker addresses: which are opened, which refused, and that no password is shown."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.broker import open_broker
from paceline.broker.address import check_reach, redact, with_password
from paceline.broker.redis.redis_blobs import BlobClient
from paceline.broker.redis.redis_client import RedisClient
from paceline.broker.redis.redis_streams import RedisStreamsBroker
from paceline.core.errors import BrokerError, ConfigError
from support.clocks import ManualClock
from support.memory_broker import MemoryBroker
from support.streams import drain, messages, payloads


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://user:se@cret@host/1", "rediss://***@host/1"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


SECRET = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs", "Cc"]), min_size=4)
FORMS = (
    "redis://:{}@host:6379/0", "rediss://user:{}@host/1", "unix://:{}@/run/redis.sock?db=1",
    "broker.url: 'redis://u:{}@host:1/0'", "Error 111 connecting to redis://:{}@host:1, is it up?",
)  # fmt: skip
ENCODED_FORMS = (
    *FORMS, "redis://host:6379/0?password={}&db=1", "redis://host/0?username=u&password={}",
    "url=redis://host?Password={} refused", "http://u:{}@proxy:80/",
)  # fmt: skip


@given(password=SECRET)
def test_no_password_is_shown_in_any_form(password: str) -> None:
    """Not encoded it may hold @, :, / and blanks; in a query it must be percent-encoded to be read at all."""
    marked = f"Xq7{password}Xq7"
    for form in FORMS:
        assert "Xq7" not in redact(form.format(marked))
    for form in ENCODED_FORMS:
        assert "Xq7" not in redact(form.format(quote(marked, safe="")))


@given(password=SECRET)
@example(password="plain")
def test_no_error_about_an_address_shows_its_password(password: str) -> None:
    url = f"redis://:Xq7{password}Xq7@host:many/0"
    # What an @ and then a /, ? or # stand in is an address of another host, in which nothing need be wrong.
    refuses = re.search("@.*[/?#]", password) is None
    for use in (open_broker, BlobClient, lambda url: check_reach(url, insecure=False)):
        problem = ""
        try:
            use(url)
        except ConfigError as error:
            problem = "".join(traceback.format_exception_only(error))
        assert "cannot be used" in problem or not (refuses or problem)
        assert "Xq7" not in problem


def test_the_password_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("a/b@c:d\n")
    environ = {"PACELINE_REDIS_PASSWORD_FILE": str(tmp_path / "password")}
    assert with_password("rediss://paceline@host:1/0", environ) == "rediss://paceline:a%2Fb%40c%3Ad@host:1/0"
    assert with_password("redis://host:1/0", environ) == "redis://:a%2Fb%40c%3Ad@host:1/0"
    assert with_password("redis://:own@host:1/0", environ) == "redis://:own@host:1/0"
    assert with_password("redis://host", {}) == "redis://host"


def test_a_server_on_another_machine_needs_a_password(caplog: pytest.LogCaptureFixture) -> None:
    for url in ("redis://10.0.0.5:6379/0", "rediss://redis/0", "redis://user@[fd00::1]:6379"):
        with pytest.raises(ConfigError, match=r"has no password.*paceline certs acl.*broker\.insecure"):
            check_reach(url, insecure=False)
        check_reach(url, insecure=True)
    caplog.clear()
    local = ("redis://127.0.0.1:1", "redis://[::1]:1", "unix:///run/redis.sock")
    for url in (*local, "rediss://:p@redis/0", "rediss://redis/0?password=p"):
        check_reach(url, insecure=False)
    assert caplog.text == ""
    check_reach("redis://:p@redis/0", insecure=False)
    assert "redis://***@redis/0 is reached in plain text" in caplog.text


@pytest.mark.parametrize("url", ["amqp://:secret@host", "memory://", "localhost:6379", ""])
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


def test_the_pool_needs_room_for_more_than_blocking_reads() -> None:
    with pytest.raises(ValueError, match="reserved_connections is 4, must be in 1 to 3"):
        RedisClient("redis://host", max_connections=4, reserved_connections=4)


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
