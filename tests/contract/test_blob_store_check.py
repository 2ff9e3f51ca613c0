"""`paceline check` of listed blob stores, on a real server."""

from __future__ import annotations

import pytest

from paceline.broker.redis.redis_server import RedisServer
from paceline.checks.broker_checks import stores_line
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.sizing.machine import free_port
from support.cli_configs import config

pytestmark = pytest.mark.redis
URL = "redis://127.0.0.1:1/0"
"""A broker, which this check does not ask."""


def line(*stores: str) -> str:
    return stores_line(config(broker={"url": URL, "blob_stores": list(stores)}))


def test_a_store_that_answers(redis_server: RedisServer) -> None:
    assert line(redis_server.url) == "1 answer"


def test_without_listed_stores_nobody_is_asked() -> None:
    assert stores_line(config(broker={"blob_stores": 3})) == "none listed"


def test_stores_that_cannot_be_used_are_named_without_their_passwords(redis_server: RedisServer) -> None:
    nobody, refused = (f"redis://:s3cret@127.0.0.1:{port}/0" for port in (free_port(), redis_server.port))
    with pytest.raises(EnvironmentLackError, match="2 of 3 stores of broker.blob_stores cannot") as caught:
        line(redis_server.url, nobody, refused)
    said = str(caught.value)
    first, second = said.split("; ", 1)
    assert nobody.partition("@")[2] in first
    assert refused.partition("@")[2] in second
    assert "s3cret" not in said
    assert "leave them out of the list" in said


def test_the_password_is_that_of_the_broker(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, _, password = redis_server.url.rpartition("@")[0].rpartition(":")
    secret = tmp_path_factory.mktemp("secret") / "password"
    secret.write_text(password)
    monkeypatch.setenv("PACELINE_REDIS_PASSWORD_FILE", str(secret))
    assert line(f"redis://127.0.0.1:{redis_server.port}/0") == "1 answer"


def test_a_store_elsewhere_needs_a_password() -> None:
    with pytest.raises(ConfigError, match=r"broker\.blob_stores 'redis://10\.0\.0\.2/0' is on another"):
        line("redis://10.0.0.2/0")
