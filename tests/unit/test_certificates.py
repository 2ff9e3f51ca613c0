"""Mutual TLS between services: issued, checked by both sides, and replaced without a restart."""

from __future__ import annotations

import asyncio
import datetime
import gc
import itertools
import re
import shutil
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509

from paceline.cli import certificates
from paceline.cli.certificates import Authority
from paceline.cli.main import main
from paceline.core.errors import ConfigError, EnvironmentLackError, PeerLostError
from paceline.core.scoring import ScoreItem
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.rpc.v1 import controller_pb2_grpc
from paceline.sdk import RewardClient, RewardServer
from paceline.service.grpc import channels
from paceline.service.grpc.server import RunningServer, start_server
from paceline.service.identity.credentials import Credentials, LatestTls, TlsFiles
from paceline.service.identity.tokens import Scope, mint
from paceline.service.identity.validity import life_left
from support.fake_controller import FakeController, notice_event

DAY_S = 86_400
EXPIRED = -1.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Authority.create(tmp_path, days=1)
    return tmp_path


def issue(folder: Path, name: str, *, role: str = "", days: float = 1.0) -> Credentials:
    Authority.load(folder).issue(folder / name, name, role=role or name, days=days)
    return Credentials(token="secret", tls=TlsFiles(folder / name))


async def status(server: RunningServer, credentials: Credentials, *, role: str = "controller") -> str:
    channel = channels.connect(server.address, credentials=credentials, role=role)
    try:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        reply = await channels.call(
            stub.GetStatus, pb.GetStatusRequest(), timeout_s=60, phase="STATUS", peer="the controller"
        )
    finally:
        await channel.close()
    return str(reply.run_id)


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[RunningServer]:
    add = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    server = await start_server(add, FakeController(), credentials=issue(folder, "controller"))
    yield server
    await server.stop(0)


async def test_a_client_needs_a_certificate_of_the_run_that_has_not_expired(
    folder: Path, server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert await status(server, issue(folder, "client")) == "run-1"
    other = tmp_path_factory.mktemp("other")
    Authority.create(other, days=1)
    for credentials in (
        Credentials(token="secret"),
        issue(folder, "old", role="client", days=EXPIRED),
        issue(other, "client"),
    ):
        with pytest.raises(PeerLostError):
            await status(server, credentials)


async def test_a_server_needs_the_certificate_of_its_role(folder: Path, server: RunningServer) -> None:
    with pytest.raises(PeerLostError, match="Hostname Verification"):
        await status(server, issue(folder, "client"), role="rollout")


async def test_a_host_has_every_role(folder: Path) -> None:
    credentials = issue(folder, "host-1", role="host")
    add = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    server = await start_server(add, FakeController(), credentials=credentials)
    assert await status(server, credentials) == "run-1"
    await server.stop(0)


async def test_certificates_are_replaced_amid_calls_and_the_old_ones_expire(folder: Path) -> None:
    """Calls of one channel go on over a rotation, a restart of the server, and a stream that began before."""
    servicer = FakeController()
    servicer.script = [notice_event("first")]
    add = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    server = await start_server(add, servicer, credentials=issue(folder, "controller"))
    channel = channels.connect(server.address, credentials=issue(folder, "client"), role="controller")
    stub = controller_pb2_grpc.ControllerServiceStub(channel)

    async def ask() -> str:
        reply = await channels.call(
            stub.GetStatus, pb.GetStatusRequest(), timeout_s=60, phase="STATUS", peer="c", wait_for_ready=True
        )
        return str(reply.run_id)

    watching = channels.stream(stub.Watch, pb.WatchRequest(), phase="WATCH", peer="c", timeout_s=20)
    assert (await anext(watching)).notice.message == "first"
    assert await ask() == "run-1"
    # The old pair is of no use any more: a new connection with it fails on both sides.
    issue(folder, "controller", days=EXPIRED)
    issue(folder, "client", days=EXPIRED)
    with pytest.raises(PeerLostError):
        await status(server, Credentials(token="secret", tls=TlsFiles(folder / "client")))
    issue(folder, "controller")
    issue(folder, "client")
    assert await ask() == "run-1"
    servicer.stopped.set_result("enough")
    assert [event.end.message async for event in watching] == ["stopped: enough"]
    await server.stop(0)
    again = await start_server(
        add,
        FakeController(run_id="run-2"),
        port=server.port,
        credentials=Credentials(token="secret", tls=TlsFiles(folder / "controller")),
    )
    assert await ask() == "run-2"
    await channel.close()
    await again.stop(0)


def test_half_a_replacement_is_not_used(folder: Path) -> None:
    issue(folder, "client")
    latest = LatestTls(TlsFiles(folder / "client"))
    before = latest.identity
    issue(folder, "other", role="client")
    (folder / "other" / "key.pem").replace(folder / "client" / "key.pem")
    assert not latest.changed()
    assert latest.identity == before
    (folder / "other" / "cert.pem").replace(folder / "client" / "cert.pem")
    assert latest.changed()
    assert latest.identity != before
    (folder / "client" / "cert.pem").unlink()
    assert not latest.changed()
    with pytest.raises(EnvironmentLackError, match=r"cert\.pem cannot be used.*paceline certs issue"):
        LatestTls(TlsFiles(folder / "client"))


def test_the_command_writes_keys_for_their_owner_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "certs")
    assert main(["certs", "issue", folder, "rollout-0"]) != 0
    assert "run `paceline certs init" in capsys.readouterr().err
    assert main(["certs", "init", folder]) == 0
    first = (tmp_path / "certs" / "ca.pem").read_bytes()
    assert main(["certs", "init", folder]) == 0
    assert (tmp_path / "certs" / "ca.pem").read_bytes() == first
    assert main(["certs", "issue", folder, "rollout-0", "--host", "10.0.0.7", "--host", "gpu7"]) == 0
    for key in ("ca.key", "rollout-0/key.pem"):
        assert stat.S_IMODE((tmp_path / "certs" / key).stat().st_mode) == 0o600
    TlsFiles(tmp_path / "certs" / "rollout-0").read()
    capsys.readouterr()
    for words, reason in (
        (["issue", folder, "gpu7"], "does not begin with a role"),
        (["issue", folder, "../gpu7", "--role", "rollout"], "needs a plain name"),
        (["issue", folder, "x", "--role", "rollout", "--host", "controller.paceline"], "name of a role"),
        (["issue", folder, "rollout-0", "--days", "0"], "--days must be above 0"),
        (["issue", folder, "x", "--role", "king"], "is none of controller, rollout"),
        (["init"], "needs DIR"),
        (["token", "--scope", "reward"], "PACELINE_TOKEN"),
    ):
        assert main(["certs", *words]) == 2, words
        assert reason in capsys.readouterr().err


def test_what_is_renewed_is_what_is_half_over_of_another_authority_or_for_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_REDIS_PASSWORD", "secret")

    def renewed(*words: str) -> set[str]:
        assert main(["certs", "renew", str(tmp_path), *words]) == 0
        return {line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if ": valid" in line}

    services = {"controller", "learner", "rollout", "reward", "client", "redis"}
    assert renewed("client-me", "--host", "a") == {*services, "client-me"}
    assert renewed("client-me", "--host", "a") == set()
    assert renewed("--host", "b") == {"redis"}
    assert "#" in (tmp_path / "redis" / "users.acl").read_text()
    # It began five minutes ago.
    Authority.load(tmp_path).issue(tmp_path / "reward", "reward", role="reward", days=3 / 1440)
    (tmp_path / "client" / "key.pem").unlink()
    assert renewed() == {"reward", "client"}
    (tmp_path / "ca.key").unlink()
    assert renewed() == services


class Calendar:
    """Lets the certificates' days pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = datetime.datetime.now(datetime.UTC)
        monkeypatch.setattr(certificates, "_now", lambda: self.now)

    def pass_days(self, days: float) -> None:
        self.now += datetime.timedelta(days=days)


@pytest.fixture
def calendar(monkeypatch: pytest.MonkeyPatch) -> Calendar:
    monkeypatch.setattr("os.fsync", lambda _: None)  # which takes longest
    return Calendar(monkeypatch)


Files = tuple[list[x509.Certificate], x509.Certificate]


def read(folder: Path) -> Files:
    """Whom a service trusts, and what it proves."""
    trusted = x509.load_pem_x509_certificates((folder / "ca.pem").read_bytes())
    return trusted, x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())


def accepts(server: Files, caller: Files, now: datetime.datetime) -> bool:
    certificate = caller[1]
    return now < certificate.not_valid_after_utc and any(
        now < each.not_valid_after_utc and certificates._has_signed(each, certificate) for each in server[0]
    )


@pytest.mark.parametrize(("every_days", "days"), [(14, 30), (40, 90)])
def test_an_authority_follows_another_and_nobody_is_ever_refused(
    every_days: int, days: int, tmp_path: Path, calendar: Calendar
) -> None:
    """In two years: files of this renewal and of the one before are trusted by each other."""
    names = ("redis", "rollout")
    authority = Authority.create(tmp_path, days=365)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "ca.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
    authorities: set[x509.Certificate] = {authority.certificate}
    before: list[Files] = []
    for _ in range(2 * 365 // every_days):
        certificates.renew(tmp_path, names, days=days)
        services = [read(tmp_path / name) for name in names]
        for server, caller in itertools.permutations((*services, *before), 2):
            assert accepts(server, caller, calendar.now)
        before = services
        signer = Authority.load(tmp_path)
        assert len(signer.trusted) <= 2
        assert (tmp_path / "outside" / "ca.pem").read_bytes() == (tmp_path / "redis" / "ca.pem").read_bytes()
        authorities.add(signer.certificate)
        assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
        calendar.pass_days(every_days)
    assert len(authorities) >= 3


async def test_connections_go_on_while_an_authority_follows_another(
    tmp_path: Path, calendar: Calendar
) -> None:
    """Between processes that have read the new files and such that have not."""
    today = calendar.now
    calendar.pass_days(-300)
    Authority.create(tmp_path, days=365)
    calendar.pass_days(200)
    certificates.renew(tmp_path, ("controller", "client"), days=200)
    former = tmp_path / "former"
    for name in ("controller", "client"):
        shutil.copytree(tmp_path / name, former / name)
    calendar.now = today
    assert any("the next authority is trusted" in line for line in certificates.renew(tmp_path, ()))
    assert not (tmp_path / "next.key").exists()
    for name in ("controller", "client"):
        Authority.load(tmp_path).issue(tmp_path / name, name, role=name)
    assert read(former / "client")[1].issuer == read(tmp_path / "client")[1].issuer
    assert not certificates._has_signed(Authority.load(tmp_path).certificate, read(former / "client")[1])
    add = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    for served, asking in ((former, tmp_path), (tmp_path, former)):
        own = Credentials(token="secret", tls=TlsFiles(served / "controller"))
        server = await start_server(add, FakeController(), credentials=own)
        theirs = Credentials(token="secret", tls=TlsFiles(asking / "client"))
        assert await status(server, theirs) == "run-1"
        await server.stop(0)


def test_an_authority_that_has_run_out_is_followed_at_once(tmp_path: Path, calendar: Calendar) -> None:
    calendar.pass_days(-400)
    Authority.create(tmp_path, days=365)
    calendar.pass_days(400)
    certificates.renew(tmp_path, ("redis", "rollout"))
    redis, rollout = read(tmp_path / "redis"), read(tmp_path / "rollout")
    assert len(redis[0]) == 1
    assert accepts(redis, rollout, calendar.now)
    # A key without its certificate is of no use to anyone.
    (tmp_path / "ca.pem").write_bytes((issue_stranger(tmp_path) / "ca.pem").read_bytes())
    with pytest.raises(EnvironmentLackError, match=r"ca\.key is not the key.*paceline certs init"):
        Authority.load(tmp_path)


def test_the_share_of_the_days_that_is_left(tmp_path: Path, calendar: Calendar) -> None:
    Authority.create(tmp_path, days=360)
    certificates.renew(tmp_path, ["redis"], days=30)
    share = (tmp_path / "redis" / "cert.pem").read_text(), (tmp_path / "redis" / "ca.pem").read_text()
    for days, redis, authority in (
        (0, 1.0, 1.0),
        (15, 0.5, 345 / 360),
        (29, 1 / 30, 331 / 360),
        (40, 0, 320 / 360),
    ):
        now = calendar.now + datetime.timedelta(days=days)
        assert [life_left(pem, now) for pem in share] == pytest.approx([redis, authority], abs=1e-3)
    calendar.pass_days(200)
    certificates.renew(tmp_path, ["redis"])
    both = (tmp_path / "redis" / "ca.pem").read_text()
    assert both.count("BEGIN") == 2
    assert life_left(both, calendar.now) > 0.99
    assert life_left(both, calendar.now - datetime.timedelta(days=300)) == 1.0
    with pytest.raises(ValueError, match="no certificate"):
        life_left((tmp_path / "ca.key").read_text(), calendar.now)


def issue_stranger(folder: Path) -> Path:
    """The folder of another authority."""
    Authority.create(folder / "stranger", days=1)
    return folder / "stranger"


def test_the_token_may_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    environ = {"PACELINE_TOKEN_FILE": str(path), "PACELINE_TLS_DIR": "/certs"}
    for content in (None, "", "\n"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match="PACELINE_TOKEN_FILE="):
            Credentials.from_env(environ=environ)
    path.write_text("secret\n")
    credentials = Credentials.from_env(environ=environ)
    assert (credentials.token, credentials.tls) == ("secret", TlsFiles(Path("/certs")))
    assert Credentials.from_env(environ=environ | {"PACELINE_TOKEN": "other"}).token == "other"
    assert "secret" not in repr(credentials)


async def test_calls_go_on_while_the_files_are_replaced_again_and_again(
    folder: Path, server: RunningServer
) -> None:
    channel = channels.connect(server.address, credentials=issue(folder, "client"), role="controller")
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    done = 0

    async def call() -> None:
        nonlocal done
        while done < 60:
            await channels.call(stub.GetStatus, pb.GetStatusRequest(), timeout_s=60, phase="S", peer="c")
            done += 1

    async def rotate() -> None:
        while done < 60:
            await asyncio.to_thread(issue, folder, "client")
            await asyncio.to_thread(issue, folder, "controller")

    await asyncio.gather(call(), call(), rotate())
    await channel.close()
    assert done >= 60


async def test_a_call_that_has_not_begun_keeps_its_channel(folder: Path, server: RunningServer) -> None:
    channel = channels.connect(server.address, credentials=issue(folder, "client"), role="controller")
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    first = stub.GetStatus(pb.GetStatusRequest(), timeout=30)
    issue(folder, "client")
    second = stub.GetStatus(pb.GetStatusRequest(), timeout=30)
    gc.collect()
    answers = await asyncio.gather(first, second)
    assert [type(answer) for answer in answers] == [pb.GetStatusResponse] * 2
    await channel.close()


async def test_a_caller_of_a_reward_server_needs_the_authority_and_a_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue(folder, "reward-0", role="reward")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    item = ScoreItem(trajectory_id="1", prompt="", response="a", ground_truth="a")
    monkeypatch.setenv("PACELINE_TLS_DIR", str(folder / "reward-0"))
    async with RewardServer(lambda response, truth: 1.0, token="secret") as server:
        monkeypatch.setenv("PACELINE_TLS_DIR", str(outside))
        token = mint("secret", Scope.REWARD, expires_at=time.time() + 60)
        async with RewardClient(server.address, token=token) as client:
            assert [result.reward for result in await client.score([item])] == [1.0]
        async with RewardClient(server.address, token="wrong") as client:
            with pytest.raises(ConfigError, match="refused the token"):
                await client.score([item])
        monkeypatch.delenv("PACELINE_TLS_DIR")
        async with RewardClient(server.address, token="secret") as client:
            with pytest.raises(PeerLostError):
                await client.score([item])
    monkeypatch.setenv("PACELINE_TLS_DIR", str(outside))
    with pytest.raises(EnvironmentLackError, match=r"ca\.pem alone, which is for callers"):
        await RewardServer(lambda response, truth: 1.0, token="secret").start()
    (outside / "cert.pem").write_bytes(b"")
    with pytest.raises(EnvironmentLackError, match=r"key\.pem cannot be used"):
        TlsFiles(outside).read()


async def test_a_token_does_not_go_to_another_machine_in_plain_text(folder: Path) -> None:
    """Whoever answered at the address learned it."""
    for address in ("10.0.0.1:7000", "[fd00::1]:7000", "controller:7000"):
        with pytest.raises(
            ConfigError, match=f"refusing to send the token to {re.escape(address)} in plain text"
        ):
            channels.connect(address, credentials=Credentials(token="secret"))
    for address, credentials in (
        ("10.0.0.1:7000", Credentials(token="secret", insecure=True)),
        ("10.0.0.1:7000", Credentials()),
        ("10.0.0.1:7000", issue(folder, "client")),
        ("localhost:7000", Credentials(token="secret")),
        ("[::1]:7000", Credentials(token="secret")),
    ):
        await channels.connect(address, credentials=credentials, role="controller").close()
