"""`paceline redis` and `paceline hosts init`: what two machines need before `paceline up`."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.cli.certificates import Authority
from paceline.cli.commands.start import redis as redis_command
from paceline.cli.main import main
from paceline.config.load import load
from paceline.launch.planning.hosts import Hosts
from paceline.service.identity.credentials import TlsFiles
from paceline.service.process import write_atomically
from paceline.sizing.machine import free_port
from support.byte_tokenizer import save_tokenizer
from support.cli_configs import config
from support.redis_servers import need_redis_with_tls

ONCE = Retry(NoBackoff(), retries=0)


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # Of a test whose server has ended before.
    signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def client(folder: Path, port: int, user: str, password: str) -> redis.Redis:
    return redis.Redis(
        host="127.0.0.1",
        port=port,
        username=user,
        password=password,
        retry=ONCE,
        ssl=True,
        ssl_check_hostname=True,
        ssl_ca_certs=str(folder / "ca.pem"),
        ssl_certfile=str(folder / "cert.pem"),
        ssl_keyfile=str(folder / "key.pem"),
    )


@pytest.mark.redis
@pytest.mark.usefixtures("signals")
def test_one_command_serves_redis_to_who_has_certificate_and_password_and_renews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    need_redis_with_tls()
    monkeypatch.setattr(redis_command, "_LOOKS_EVERY_S", 0.05)
    others = {child.pid for child in psutil.Process().children()}
    folder, port = tmp_path / "certs", free_port()
    seen: dict[str, object] = {}

    def use() -> None:
        try:
            deadline = time.monotonic() + 120
            while not (folder / "redis" / "users.acl").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            password = (folder / "redis_password").read_text()
            Authority.load(folder).issue(folder / "client", "client", role="client")
            with client(folder / "client", port, "paceline", password) as own:
                while True:
                    try:
                        seen["pong"] = own.ping()
                        break
                    except redis.exceptions.ConnectionError:
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                first = presented(folder, port)
                # It began five minutes ago, so that more than half of its time is over.
                Authority.load(folder).issue(
                    folder / "redis", "redis", role="redis", hosts=["127.0.0.1"], days=3 / 1440
                )
                while presented(folder, port) == first:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                seen["after"] = own.ping()
            seen["of the next authority"] = is_served_once_its_authority_is_trusted(tmp_path, port, password)
            refuses_others(folder, port, password)
            (server,) = [child for child in psutil.Process().children() if child.pid not in others]
            listening = [each.laddr for each in server.net_connections() if each.status == "LISTEN"]
            assert listening == [("127.0.0.1", port)]
            seen["done"] = True
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    user = threading.Thread(target=use)
    user.start()
    try:
        code = main(["redis", str(folder), "--host", "127.0.0.1", "--port", str(port)])
    finally:
        user.join()
    assert seen == {"pong": True, "after": True, "of the next authority": True, "done": True}
    assert code == 0
    said = capfd.readouterr().out
    assert f"PACELINE_REDIS_PASSWORD_FILE={folder}/redis_password\n" in said
    assert f"broker.url=rediss://paceline@127.0.0.1:{port}/0\n" in said


@pytest.mark.redis
@pytest.mark.usefixtures("signals")
def test_the_server_ends_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_redis_with_tls()
    servers = []

    def fail(server: subprocess.Popen[bytes], *_: object) -> int:
        servers.append(server)
        raise OSError("no space left")

    monkeypatch.setattr(redis_command, "_tend", fail)
    with pytest.raises(OSError, match="no space left"):
        main(["redis", str(tmp_path), "--host", "127.0.0.1", "--port", str(free_port())])
    assert servers[0].wait(120) is not None


@pytest.mark.redis
def test_the_server_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    need_redis_with_tls()
    words = ["redis", str(tmp_path), "--host", "127.0.0.1", "--port", str(free_port())]
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # Redis' own line: it is the program now that the kernel ends with its parent.
        assert any("Ready to accept connections" in line for line in process.stdout)
        (server,) = psutil.Process(process.pid).children()
        process.kill()
        deadline = time.monotonic() + 120
        try:
            while psutil.pid_exists(server.pid) and server.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        except psutil.NoSuchProcess:
            pass  # it has ended in between
        except AssertionError:
            server.kill()
            raise


def test_a_renewal_that_fails_is_tried_again_and_the_server_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server ends by itself at the fourth look; the certificate is renewed at the first."""
    certificate, looks, loads = tmp_path / "redis" / "tls.crt", [], []
    certificate.parent.mkdir()
    certificate.write_text("old")
    (certificate.parent / "ca.pem").touch()
    monkeypatch.setattr(redis_command, "CERTIFICATE_FILE", certificate.name)

    class Server:
        def wait(self, limit_s: float) -> int:
            looks.append(limit_s)
            if len(looks) < 4:
                raise subprocess.TimeoutExpired("redis-server", limit_s)
            return 0

    def renew(*_: object, **__: object) -> None:
        if len(looks) == 1:
            os.utime(certificate, ns=(1, certificate.stat().st_mtime_ns + 1))

    def load(*_: object) -> None:
        loads.append(len(looks))
        if len(loads) == 1:
            raise redis.exceptions.TimeoutError("no answer")

    monkeypatch.setattr(redis_command.certificates, "renew", renew)
    monkeypatch.setattr(redis_command, "_reload", load)
    assert redis_command._tend(Server(), tmp_path, "127.0.0.1", 6380, "secret") == 0  # type: ignore[arg-type]
    assert loads == [1, 2]
    assert "Redis keeps its old certificate until the next try: no answer" in capsys.readouterr().out


def is_served_once_its_authority_is_trusted(folder: Path, port: int, password: str) -> bool:
    """A client of another authority, which the folder's is told to trust."""
    authority = Authority.create(folder / "next", days=1)
    authority.issue(folder / "next" / "client", "client", role="client")
    both = (folder / "certs" / "ca.pem").read_text() + (folder / "next" / "ca.pem").read_text()
    (folder / "next" / "client" / "ca.pem").write_text(both)
    user = folder / "next" / "client", port, "paceline", password
    with pytest.raises(redis.exceptions.ConnectionError):
        client(*user).ping()
    write_atomically(folder / "certs" / "ca.pem", both)
    deadline = time.monotonic() + 120
    while True:
        try:
            return client(*user).ping()
        except redis.exceptions.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def refuses_others(folder: Path, port: int, password: str) -> None:
    """Who has no password, who wants what a run does not need, and who has no certificate."""
    with pytest.raises(redis.exceptions.AuthenticationError):
        client(folder / "client", port, "paceline", "guess").ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        client(folder / "client", port, "paceline", password).config_get("dir")
    trust = {"ssl": True, "ssl_ca_certs": str(folder / "ca.pem"), "retry": ONCE}
    with pytest.raises(redis.exceptions.ConnectionError):
        redis.Redis("127.0.0.1", port, username="paceline", password=password, **trust).ping()


def presented(folder: Path, port: int) -> str:
    """The server's certificate; this machine proves none, which the server finds out later."""
    return ssl.get_server_certificate(("127.0.0.1", port))


def test_redis_listens_on_one_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["redis", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "give one address" in capsys.readouterr().err


def init(folder: Path, *words: str, to: str = "HOSTS.yaml") -> int:
    """Prepares hosts that are folders of this machine; its shell is /bin/sh."""
    (folder / "run.yaml").write_text(yaml.safe_dump(config().model_dump(mode="json", exclude_unset=True)))
    shell = ["--shell", "/bin/sh -c", "--address", "127.0.0.1", "--python", sys.executable]
    places = ["--certs", str(folder / "certs"), "--to", str(folder / to)]
    return main(["hosts", "init", str(folder / "run.yaml"), *shell, *places, *words])


def test_two_empty_hosts_get_certificates_and_the_model_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / config().model.path)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 0, NVIDIA H100 80GB HBM3\necho 1, NVIDIA H100 80GB HBM3\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    a, b = tmp_path / "a", tmp_path / "b"
    first = ["--host", "a", "learner=1", "reward=1", f"folder={a}", "gpus="]
    second = ["--host", "me@b", "rollout=2", f"folder={b}", "address=127.0.0.1"]
    assert init(tmp_path, *first, *second) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    hosts = load(Hosts, tmp_path / "HOSTS.yaml")
    assert [(host.name, host.learner, host.rollout, host.reward) for host in hosts.hosts] == [
        ("a", 1, 0, 1),
        ("me@b", 0, 2, 0),
    ]
    assert {host.address for host in hosts.hosts} == {"127.0.0.1"}
    assert [(host.gpus, host.card) for host in hosts.hosts] == [((), None), ((0, 1), "H100")]
    own = set()
    for host in hosts.hosts:
        folder = Path(host.folder) / host.env["PACELINE_TLS_DIR"]
        identity = TlsFiles(folder).read()
        own.add(identity.certificate)
        assert identity.ca == (tmp_path / "certs" / "ca.pem").read_bytes()
        assert (folder / "key.pem").stat().st_mode & 0o777 == 0o600
        assert (Path(host.folder) / config().model.path / "tokenizer.json").exists()
    assert len(own) == 2
    # What it says to type is what the other commands take.
    assert f"paceline redis {tmp_path}/certs --host 127.0.0.1 --port 6380 &" in said
    assert f"export PACELINE_TLS_DIR={tmp_path}/certs/host-here" in said
    TlsFiles(tmp_path / "certs" / "host-here").read()
    assert f"paceline up {tmp_path}/HOSTS.yaml broker.url=rediss://paceline@127.0.0.1:6380/0" in said
    assert init(tmp_path, *first, *second) == 2
    assert "is there already" in capsys.readouterr().err
    # More than half of its time is over.
    Authority.load(tmp_path / "certs").issue(
        tmp_path / "certs" / "host-a", "host-a", role="host", days=3 / 1440
    )
    renew = ["hosts", "renew", str(tmp_path / "HOSTS.yaml"), "--certs", str(tmp_path / "certs")]
    assert main(renew) == 0
    now = {TlsFiles(folder / "tls").read().certificate for folder in (a, b)}
    assert len(now & own) == 1
    assert TlsFiles(b / "tls").read().certificate in own


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name the hosts: --host me@node1"),
        (["--host", "a", "lerner=1"], "--host a: lerner=1 is none of learner=, rollout="),
        (["--host", "a", "learner=x"], "learner"),
        (["--host", "a", "learner=1", "folder=/proc/none"], "did not create the folder /proc/none"),
        (["--host", "a", "learner=1", "python=/no/python"], "/no/python: not found"),
        (["--host", "a", "learner=1", "reward=1"], "no host runs rollout"),
    ],
)
def test_hosts_that_cannot_be_prepared_are_refused(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = init(tmp_path, *words, "--folder", str(tmp_path / "there"))
    assert (code, (tmp_path / "HOSTS.yaml").exists()) == (2, False)
    assert reason in capsys.readouterr().err
