"""Every method of the protocol refuses whom docs/security.md says that it refuses, before it reads a message.

A new method is covered by itself: the methods come from the generated modules.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from grpc import StatusCode

from paceline.cli.certificates import ROLES, Authority
from paceline.service.grpc.admission import callers
from paceline.service.grpc.connection import DEFAULT_MAX_MESSAGE_BYTES
from paceline.service.identity import tokens
from paceline.service.identity.credentials import TlsFiles, server_name
from paceline.service.identity.tokens import Scope
from support.closed_server import methods, path

SECRET = "a secret of the run"
METHODS = {path(method): method for method in methods()}
REWARD = tuple(sorted(method for method in METHODS if "/paceline.rpc.v1.RewardService/" in method))
ATTACH = "/paceline.rpc.v1.RewardGateway/Attach"
ATTACH_ENVIRONMENT = "/paceline.rpc.v1.EnvironmentGateway/Attach"
PLAY = tuple(sorted(method for method in METHODS if "/paceline.rpc.v1.EnvironmentService/" in method))
OUTSIDE = (*REWARD, ATTACH, ATTACH_ENVIRONMENT, *PLAY)
INSIDE = sorted(METHODS.keys() - {*OUTSIDE})
HEALTH = "/grpc.health.v1.Health/Check"
DOCS = Path(__file__).parents[2] / "docs" / "security.md"
BIG = b"\0" * (8 << 20)
GROWTH_MIB = 96


@dataclass(frozen=True)
class Server:
    folder: Path
    port: int
    pid: int

    @functools.cached_property
    def _channels(self) -> dict[str, grpc.Channel]:
        return {}

    def channel(self, certificate: str) -> grpc.Channel:
        if certificate not in self._channels:
            ca = TlsFiles(self.folder / "host").read().ca
            if certificate in ("none", "plain text"):
                proof = grpc.ssl_channel_credentials(ca)
            else:
                proof = TlsFiles(self.folder / certificate).read().for_channel()
            address, options = (
                f"127.0.0.1:{self.port}",
                [
                    ("grpc.ssl_target_name_override", server_name("controller")),
                    ("grpc.max_send_message_length", DEFAULT_MAX_MESSAGE_BYTES),
                ],
            )
            self._channels[certificate] = (
                grpc.insecure_channel(address)
                if certificate == "plain text"
                else grpc.secure_channel(address, proof, options=options)
            )
        return self._channels[certificate]

    def ask(self, method: str, *, certificate: str, token: str, message: bytes = b"") -> StatusCode:
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        channel = self.channel(certificate)
        try:
            if method in METHODS and METHODS[method].client_streaming:
                list(channel.stream_stream(method)(iter([message]), metadata=metadata, timeout=60))
            elif method in METHODS and METHODS[method].server_streaming:
                list(channel.unary_stream(method)(message, metadata=metadata, timeout=60))
            else:
                channel.unary_unary(method)(message, metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
        return StatusCode.OK


def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    authority = Authority.create(folder, days=1)
    for role in ROLES:
        authority.issue(folder / role, role, role=role)
    authority.issue(folder / "expired", "expired", role="host", days=-1)
    stranger = Authority.create(folder / "strangers", days=1)
    stranger.issue(folder / "stranger", "stranger", role="host")
    environment = os.environ | {
        "PACELINE_TOKEN": SECRET,
        "PACELINE_TLS_DIR": str(folder / "host"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "support.closed_server", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Server(folder, int(process.stdout.readline()), process.pid)
        process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serving(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def reward_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serving(tmp_path_factory.mktemp("certs"), "outside")


def scoped(method: str, *, days: float = 1, right: bool = True) -> str:
    """A token whose scope is, or is not, for the method."""
    play = dict.fromkeys(PLAY, Scope.ENVIRONMENT)
    attach = dict.fromkeys((ATTACH, ATTACH_ENVIRONMENT), Scope.ATTACH)
    reward = dict.fromkeys(REWARD, Scope.REWARD)
    opener = {**reward, **attach, **play}.get(method, Scope.STATUS)
    other = Scope.ATTACH if method in REWARD else Scope.REWARD
    scope = opener if right else other
    return tokens.mint(SECRET, scope, expires_at=time.time() + days * 86_400)


def forged(method: str) -> str:
    """A token for the method, of a later expiry than was signed."""
    form, scope, expiry, mac = scoped(method, days=-1).split(".")
    return ".".join((form, scope, str(int(expiry) + 10**6), mac))


# The rows of the table in docs/security.md: certificate, token, answer.
def refused(kind: str, method: str) -> tuple[str, str, StatusCode]:
    openers = callers(method) or frozenset()
    other_role = next(role for role in ("learner", "controller", "client") if role not in openers)
    return {
        "plain text": ("plain text", SECRET, StatusCode.UNAVAILABLE),
        "no certificate": ("none", SECRET, StatusCode.UNAVAILABLE),
        "expired certificate": ("expired", SECRET, StatusCode.UNAVAILABLE),
        "certificate of another authority": ("stranger", SECRET, StatusCode.UNAVAILABLE),
        "certificate of another role": (other_role, SECRET, StatusCode.PERMISSION_DENIED),
        "no token": ("host", "", StatusCode.UNAUTHENTICATED),
        "wrong token": ("host", "wrong", StatusCode.UNAUTHENTICATED),
        "expired token": ("host", scoped(method, days=-1), StatusCode.UNAUTHENTICATED),
        "forged token": ("host", forged(method), StatusCode.UNAUTHENTICATED),
        "token of another scope": ("host", scoped(method, right=False), StatusCode.UNAUTHENTICATED),
    }[kind]


KINDS = (
    "plain text", "no certificate", "expired certificate", "certificate of another authority",
    "certificate of another role", "no token", "wrong token", "expired token", "forged token",
    "token of another scope",
)  # fmt: skip
STATUS_METHODS = ("/paceline.rpc.v1.ControllerService/GetStatus", "/paceline.rpc.v1.ControllerService/Watch")


@pytest.mark.parametrize("method", INSIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_is_refused(server: Server, kind: str, method: str) -> None:
    certificate, token, code = refused(kind, method)
    if kind == "token of another scope" and method in STATUS_METHODS:
        token = tokens.mint(SECRET, Scope.REWARD, expires_at=time.time() + 60)
    # Bytes that are no message: an answer other than the code would mean that they were parsed.
    assert server.ask(method, certificate=certificate, token=token, message=b"\xff") is code


TOKEN_KINDS = tuple(kind for kind in KINDS if kind.endswith(("token", "scope")))


@pytest.mark.parametrize("method", OUTSIDE)
@pytest.mark.parametrize("kind", ["plain text", *TOKEN_KINDS])
def test_a_reward_service_refuses_who_has_no_token(reward_server: Server, kind: str, method: str) -> None:
    certificate, token, code = refused(kind, method)
    certificate = "plain text" if kind == "plain text" else "none"
    assert reward_server.ask(method, certificate=certificate, token=token, message=b"\xff") is code


def test_a_reward_service_asks_for_a_token_and_no_certificate(reward_server: Server) -> None:
    """It serves nothing else: a method of another service would still need the certificate of its role."""
    for method in OUTSIDE:
        for token in (SECRET, scoped(method)):
            assert reward_server.ask(method, certificate="none", token=token) is StatusCode.UNIMPLEMENTED
    assert reward_server.ask(HEALTH, certificate="none", token="") is StatusCode.OK
    for method in INSIDE:
        assert reward_server.ask(method, certificate="none", token=SECRET) is StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("method", INSIDE)
def test_those_who_may_get_in(server: Server, method: str) -> None:
    roles = callers(method)
    assert roles, f"{method}: say in service/grpc/admission.py who may call it"
    for role in (*sorted(roles), "host"):
        assert server.ask(method, certificate=role, token=SECRET) is StatusCode.UNIMPLEMENTED, role
    assert (
        server.ask(method, certificate="host", token=SECRET, message=b"\xff") is StatusCode.INVALID_ARGUMENT
    )


def test_a_scoped_token_opens_its_methods_alone(server: Server) -> None:
    for scope in Scope:
        token = tokens.mint(SECRET, scope, expires_at=time.time() + 60)
        opened = {
            method
            for method in METHODS
            if server.ask(method, certificate="host", token=token) is StatusCode.UNIMPLEMENTED
        }
        wanted = {
            Scope.REWARD: set(REWARD),
            Scope.ATTACH: {ATTACH, ATTACH_ENVIRONMENT},
            Scope.ENVIRONMENT: set(PLAY),
            Scope.STATUS: set(STATUS_METHODS),
        }[scope]
        assert opened == wanted


def test_health_needs_a_certificate_and_no_token(server: Server) -> None:
    assert server.ask(HEALTH, certificate="client", token="") is StatusCode.OK
    assert server.ask(HEALTH, certificate="none", token="") is StatusCode.UNAVAILABLE
    assert server.ask("/grpc.health.v1.Health/Watch", certificate="client", token="") is (
        StatusCode.UNAUTHENTICATED
    )


def test_a_flood_without_a_token_does_not_grow_the_server(server: Server) -> None:
    """A call of 8 MiB to every method at once, and some more to health, which asks for no token.

    It grew by 420 MiB when gRPC received the messages before the token was looked at.
    """
    process = psutil.Process(server.pid)
    before = most = process.memory_info().rss
    channel = server.channel("host")
    flood = {
        (method, number): channel.unary_unary(method).future(BIG, timeout=120)
        for method in (*METHODS, HEALTH)
        for number in range(16 if method == HEALTH else 1)
    }
    while not all(answer.done() for answer in flood.values()):
        most = max(most, process.memory_info().rss)
        time.sleep(0.005)
    codes = {answer.code() for (method, _), answer in flood.items() if method != HEALTH}
    assert codes == {StatusCode.UNAUTHENTICATED}
    assert (most - before) / 2**20 < GROWTH_MIB
    assert server.ask(HEALTH, certificate="client", token="") is StatusCode.OK


@pytest.mark.parametrize("certificate", ["none", "learner"])
def test_messages_that_are_refused_once_they_are_read_are_not_kept(
    server: Server, reward_server: Server, certificate: str
) -> None:
    """With a token; they are no messages, or the role is wrong. The server kept 25 of them at a time."""
    there = reward_server if certificate == "none" else server
    method, code = (
        (REWARD[1], StatusCode.INVALID_ARGUMENT)
        if certificate == "none"
        else ("/paceline.rpc.v1.LearnerService/TrainStep", StatusCode.PERMISSION_DENIED)
    )
    process = psutil.Process(there.pid)
    before = most = process.memory_info().rss
    for _ in range(48):
        assert there.ask(method, certificate=certificate, token=SECRET, message=BIG) is code
        most = max(most, process.memory_info().rss)
    assert (most - before) / 2**20 < GROWTH_MIB


def _rows(heading: str) -> dict[str, str]:
    section = DOCS.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = (re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if line.startswith("|"))
    return {row[0].strip("`"): row[1] for row in list(cells)[2:]}


def test_the_document_has_every_method_and_every_refusal() -> None:
    rows = _rows("Who may call what")
    assert set(rows) == {method.removeprefix("/paceline.rpc.v1.") for method in METHODS}
    for method in OUTSIDE:
        assert rows.pop(method.removeprefix("/paceline.rpc.v1.")) == "everyone who has a token"
    for method in INSIDE:
        named = set(rows[method.removeprefix("/paceline.rpc.v1.")].split(", "))
        assert named == (callers(method) or set())
    assert set(_rows("Who is refused")) == {*KINDS, "flood without a token"}
