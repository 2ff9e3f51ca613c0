"""Who may do what at Redis: the run's user, and TLS to a server that has it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from paceline.broker import open_broker
from paceline.broker.redis.redis_blobs import BlobClient
from paceline.broker.redis.redis_server import RedisServer, find_server
from paceline.cli.certificates import Authority
from paceline.cli.main import main
from paceline.core.errors import BrokerError
from paceline.sizing.machine import free_port
from support import source
from support.closing import Closing
from support.redis_servers import debian_redis, need_redis_with_tls, serving, tls_words


@pytest.mark.redis
@pytest.mark.parametrize(
    "words",
    [
        "FLUSHALL",
        "CONFIG GET requirepass",
        "KEYS *",
        "ACL LIST",
        "GET test-x",
        "SET other:x 1",
        "PUBLISH c m",
    ],
)
def test_the_runs_user_may_do_nothing_else(limited_url: str, words: str) -> None:
    with redis.Redis.from_url(limited_url) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*words.split())


@pytest.mark.redis
def test_a_script_has_no_more_rights_than_its_user(limited_url: str) -> None:
    with redis.Redis.from_url(limited_url) as client, pytest.raises(redis.exceptions.RedisError):
        client.eval("return redis.call('SET', KEYS[1], 'x')", 1, "other:x")


def redis_with_users(folder: Path, port: int) -> contextlib.AbstractContextManager[None]:
    """A server with the users of `users.acl` in a folder, and its append-only file there."""
    command = [
        debian_redis() or str(find_server()), "--save", "",
        "--aclfile", str(folder / "users.acl"), "--dir", str(folder),
        "--bind", "127.0.0.1", "--port", str(port), "--appendonly", "yes", "--appendfsync", "always",
    ]  # fmt: skip
    return serving(command, port)


@pytest.mark.redis
def test_transactions_outlive_a_restart_of_a_server_whose_default_user_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis loads its file as the default user: EXEC of one without permissions drops the transaction."""
    monkeypatch.setenv("PACELINE_REDIS_PASSWORD", "secret")
    assert main(["certs", "renew", str(tmp_path / "tls")]) == 0
    users = (tmp_path / "tls" / "redis" / "users.acl").rename(tmp_path / "users.acl")
    assert "+@all" in users.read_text().splitlines()[0].split()  # a server before 7.0 does not need it
    port = free_port()
    address = f"127.0.0.1:{port}/0"
    with (
        redis_with_users(tmp_path, port),
        redis.Redis.from_url(f"redis://paceline:secret@{address}") as client,
    ):
        both = "redis.call('SET', KEYS[1], '1') redis.call('SET', KEYS[2], '2')"
        client.eval(both, 2, "paceline:a", "paceline:b")
        for stranger in ("redis://", "redis://default:@", "redis://default:secret@"):
            with (
                redis.Redis.from_url(stranger + address) as other,
                pytest.raises(redis.exceptions.AuthenticationError),
            ):
                other.ping()
    with (
        redis_with_users(tmp_path, port),
        redis.Redis.from_url(f"redis://paceline:secret@{address}") as client,
    ):
        assert client.mget("paceline:a", "paceline:b") == [b"1", b"2"]


@pytest.fixture
def tls_redis(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Debian's server with TLS, and the folder with a client's files."""
    binary, port = need_redis_with_tls(), free_port()
    authority = Authority.create(tmp_path, days=1)
    authority.issue(tmp_path / "redis", "redis", role="redis", hosts=["127.0.0.1"])
    authority.issue(tmp_path / "rollout-0", "rollout-0", role="rollout")
    with serving([binary, *tls_words(tmp_path / "redis", port), "--dir", str(tmp_path)], port):
        yield f"rediss://:secret@127.0.0.1:{port}/0", tmp_path / "rollout-0"


@pytest.mark.redis
async def test_tls_needs_the_files_of_the_run(
    tls_redis: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, closing: Closing
) -> None:
    url, folder = tls_redis
    monkeypatch.delenv("PACELINE_TLS_DIR", raising=False)
    stranger = closing(open_broker(url))
    with pytest.raises(BrokerError, match=r"rediss://\*\*\*@"):
        await stranger.ping()
    monkeypatch.setenv("PACELINE_TLS_DIR", str(folder))
    broker = closing(open_broker(url))
    await broker.ping()
    await broker.put_blob("x", b"1")
    with BlobClient(url) as reader:
        assert reader.get(["x"]) == [b"1"]


@pytest.mark.redis
async def test_a_wrong_password_is_not_shown(redis_server: RedisServer, closing: Closing) -> None:
    broker = closing(open_broker(f"redis://:a%2Fwrong%40secret@127.0.0.1:{redis_server.port}/0"))
    with pytest.raises(BrokerError, match="refused the password") as caught:
        await broker.ping()
    assert "wrong" not in str(caught.value)


def presented(port: int, files: Path) -> bytes:
    """The certificate that a server on this machine presents to a client with these files."""
    context = ssl.create_default_context(cafile=str(files / "ca.pem"))
    context.check_hostname = False
    context.load_cert_chain(files / "cert.pem", files / "key.pem")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


@pytest.mark.redis
@pytest.mark.parametrize(("own", "is_durable"), [({}, True), ({"REDIS_APPEND_ONLY": "no"}, False)])
def test_redis_takes_a_renewed_certificate_without_a_restart(
    own: dict[str, str], is_durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scripts of its container: with the next health check, and connected clients notice nothing.

    A blob store keeps nothing on disk.
    """
    need_redis_with_tls()
    if shutil.which("redis-cli", path="/usr/bin:/usr/local/bin") is None:
        pytest.skip("needs redis-cli: `apt install redis-tools`")
    folder, port = tmp_path / "tls", free_port()
    for name in ("data", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "redis_password").write_text("secret")
    monkeypatch.setenv("PACELINE_REDIS_PASSWORD_FILE", str(tmp_path / "redis_password"))
    assert main(["certs", "renew", str(folder), "--host", "127.0.0.1"]) == 0
    places = {
        "/tmp/": f"{tmp_path}/tmp/", "/run/tls": f"{folder}/redis", "/run/secrets": str(tmp_path),
        "/data": f"{tmp_path}/data", "6379": str(port), "redis-cli ": f"redis-cli -p {port} ",
    }  # fmt: skip

    def script(name: str) -> list[str]:
        text = (source.ROOT / "deploy" / "compose" / "redis" / name).read_text(encoding="utf-8")
        for place, here in places.items():
            text = text.replace(place, here)
        return ["sh", "-c", text]

    env = os.environ | {"PATH": "/usr/bin:/bin"} | own

    def is_healthy() -> bool:
        return subprocess.run(script("health.sh"), env=env, timeout=60, check=False).returncode == 0

    with subprocess.Popen(script("start.sh"), env=env, stdout=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 120
            while not is_healthy():
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            first = presented(port, folder / "client")
            files = {
                "ssl_ca_certs": str(folder / "client/ca.pem"),
                "ssl_certfile": str(folder / "client/cert.pem"),
                "ssl_keyfile": str(folder / "client/key.pem"),
            }
            with redis.Redis.from_url(f"rediss://paceline:secret@127.0.0.1:{port}", **files) as client:
                assert client.ping()
                Authority.load(folder).issue(folder / "redis", "redis", role="redis", hosts=["127.0.0.1"])
                assert is_healthy()
                assert presented(port, folder / "client") != first
                assert client.ping()
            assert is_healthy()
            with pytest.raises(redis.exceptions.NoPermissionError):
                password = (tmp_path / "tmp" / "renewer").read_text()
                redis.Redis.from_url(f"rediss://renewer:{password}@127.0.0.1:{port}", **files).get(
                    "paceline:a"
                )
            assert bool([*(tmp_path / "data").rglob("*.aof")]) == is_durable
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
