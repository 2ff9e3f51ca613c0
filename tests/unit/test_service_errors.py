"""Every error crosses gRPC and comes out as itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from paceline.core.errors import (
    BrokerError,
    ConfigError,
    DeadlineError,
    EnvironmentLackError,
    InvalidMessageError,
    PacelineError,
    PeerLostError,
    ProtocolError,
    RewardError,
    RewardErrorKind,
)
from paceline.core.members import MemberKind, RankRef
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.rpc.v1 import controller_pb2_grpc
from paceline.service.addresses import is_loopback
from paceline.service.grpc import channels
from paceline.service.grpc.errors import STATUS_CODES, error_classes, from_metadata, status_code
from paceline.service.grpc.fencing import TermFence
from paceline.service.grpc.server import RunningServer, start_server
from paceline.service.identity.credentials import Credentials

ADD = controller_pb2_grpc.add_ControllerServiceServicer_to_server
SECRET = Credentials(token="secret")


class Raiser(controller_pb2_grpc.ControllerServiceServicer):
    """Raises what it is told to."""

    error: BaseException | None = None
    status: tuple[grpc.StatusCode, str] | None = None
    seconds: float = 0.0
    num_calls = 0

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        self.num_calls += 1
        await asyncio.sleep(self.seconds)
        if self.status is not None:
            await context.abort(*self.status)
        if self.error is not None:
            raise self.error
        return pb.LeaveResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(phase="x" * 5_000_000)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        yield pb.WatchEvent(notice=pb.NoticeEvent(message="first"))
        if self.error is not None:
            raise self.error


@pytest.fixture
async def raiser() -> AsyncIterator[tuple[Raiser, RunningServer]]:
    servicer = Raiser()
    server = await start_server(ADD, servicer, credentials=SECRET)
    yield servicer, server
    await server.stop(0.1)


async def ask(
    server: RunningServer, *, token: str = "secret", timeout_s: float = 60.0, **options: Any
) -> None:
    channel = channels.connect(server.address, credentials=Credentials(token=token), **options)
    try:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        await channels.call(
            stub.Leave, pb.LeaveRequest(), timeout_s=timeout_s, phase="LEAVE", peer="controller"
        )
    finally:
        await channel.close()


def example(kind: type[PacelineError]) -> PacelineError:
    message = f"ein Wörtchen über {kind.__name__}"
    if issubclass(kind, DeadlineError):
        return kind(phase="COLLECT", peer="rollout-0", seconds=2.5, hint="look at its log")
    if issubclass(kind, InvalidMessageError):
        return kind(message, reason="bad_length")
    if issubclass(kind, PeerLostError):
        return kind(message, peer="rollout-1")
    if issubclass(kind, RewardError):
        return kind(message, kind=RewardErrorKind.NOT_FINITE)
    return kind(message)


@pytest.mark.parametrize("kind", sorted(error_classes(), key=lambda kind: kind.__name__))
async def test_every_class_comes_back(
    raiser: tuple[Raiser, RunningServer], kind: type[PacelineError]
) -> None:
    servicer, server = raiser
    servicer.error = example(kind)
    with pytest.raises(kind) as caught:
        await ask(server)
    assert type(caught.value) is kind
    assert str(caught.value) == str(servicer.error)
    assert vars(caught.value) == vars(servicer.error)
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
    assert caught.value.__cause__.code() is STATUS_CODES[kind]


@pytest.mark.parametrize("peer", [RankRef(MemberKind.ROLLOUT, 3), RankRef(MemberKind.LEARNER)])
async def test_a_rank_comes_back_as_a_rank(raiser: tuple[Raiser, RunningServer], peer: RankRef) -> None:
    servicer, server = raiser
    for error in (
        PeerLostError("went away", peer=peer),
        DeadlineError(phase="PUSH", peer=peer, seconds=2.0),
    ):
        servicer.error = error
        with pytest.raises(type(error)) as caught:
            await ask(server)
        assert vars(caught.value) == vars(error)


def test_the_table_names_every_class_and_nothing_retryable() -> None:
    assert set(STATUS_CODES) == set(error_classes())
    assert grpc.StatusCode.UNAVAILABLE not in STATUS_CODES.values()

    class Special(BrokerError):
        pass

    assert status_code(Special("x")) is grpc.StatusCode.ABORTED


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("Internal error from Core", PeerLostError),
        ("Received RST_STREAM with error code 2", PeerLostError),
        ("the servicer is broken", PacelineError),
    ],
)
async def test_a_stream_that_breaks_off_is_a_lost_peer(
    raiser: tuple[Raiser, RunningServer], details: str, kind: type[PacelineError]
) -> None:
    servicer, server = raiser
    servicer.status = (grpc.StatusCode.INTERNAL, details)
    with pytest.raises(PacelineError, match=details) as caught:
        await ask(server)
    assert type(caught.value) is kind


async def test_a_very_long_message_is_cut_but_keeps_its_class(raiser: tuple[Raiser, RunningServer]) -> None:
    servicer, server = raiser
    servicer.error = ConfigError("ä" * 50_000)
    with pytest.raises(ConfigError) as caught:
        await ask(server)
    assert len(str(caught.value)) == 2000


async def test_a_bug_in_a_method_is_named_and_logged(
    raiser: tuple[Raiser, RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, server = raiser
    servicer.error = KeyError("row")
    with pytest.raises(PacelineError, match=r"ControllerService/Leave failed: KeyError: 'row'") as caught:
        await ask(server)
    assert type(caught.value) is PacelineError
    assert "Traceback" in caplog.text


async def test_a_stream_keeps_what_came_before_its_error(raiser: tuple[Raiser, RunningServer]) -> None:
    servicer, server = raiser
    servicer.error = BrokerError("redis is gone")
    channel = channels.connect(server.address, credentials=SECRET)
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    seen = []
    with pytest.raises(BrokerError, match="redis is gone"):
        async for event in channels.stream(stub.Watch, pb.WatchRequest(), phase="WATCH", peer="controller"):
            seen += [event.notice.message]
    await channel.close()
    assert seen == ["first"]


async def test_a_wrong_token_is_refused_before_the_method(raiser: tuple[Raiser, RunningServer]) -> None:
    servicer, server = raiser
    for token in ("", "wrong"):
        with pytest.raises(ConfigError, match="refused the token.*PACELINE_TOKEN"):
            await ask(server, token=token)
    assert servicer.num_calls == 0


async def test_a_controller_of_an_earlier_term_gives_no_orders() -> None:
    servicer, fence = Raiser(), TermFence()
    server = await start_server(ADD, servicer, credentials=SECRET, fence=fence)
    fence.note(2)
    await ask(server)  # no controller
    await ask(server, term=2)
    await ask(server, term=4)
    assert (servicer.num_calls, fence.highest) == (3, 4)
    with pytest.raises(ProtocolError, match="term is 3, and this member follows the controller of term 4"):
        await ask(server, term=3)
    channel = channels.connect(server.address, credentials=SECRET, term=3)
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    with pytest.raises(ProtocolError, match="term is 3"):
        async for _ in channels.stream(stub.Watch, pb.WatchRequest(), phase="WATCH", peer="c", timeout_s=60):
            pass
    await channel.close()
    assert servicer.num_calls == 3
    with pytest.raises(ProtocolError, match=r"paceline-term must be a whole number, got 'x'"):
        fence.check([("paceline-term", "x")])
    await server.stop(0)


async def test_no_answer_in_time(raiser: tuple[Raiser, RunningServer]) -> None:
    servicer, server = raiser
    servicer.seconds = 5
    with pytest.raises(DeadlineError) as caught:
        await ask(server, timeout_s=0.2)
    error = caught.value
    assert (error.phase, error.peer, error.seconds) == ("LEAVE", "controller", 0.2)


async def test_nobody_there(raiser: tuple[Raiser, RunningServer]) -> None:
    _, server = raiser
    await server.stop(0)
    with pytest.raises(PeerLostError, match="controller cannot be reached") as caught:
        await ask(server)
    assert caught.value.peer == "controller"


async def test_a_method_that_is_not_served(raiser: tuple[Raiser, RunningServer]) -> None:
    _, server = raiser
    channel = channels.connect(server.address, credentials=SECRET)
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    with pytest.raises(ProtocolError, match="does not serve this method"):
        await channels.call(stub.Register, pb.RegisterRequest(), timeout_s=60, phase="R", peer="controller")
    await channel.close()


async def test_messages_above_the_default_cap_pass_and_above_ours_are_explained(
    raiser: tuple[Raiser, RunningServer],
) -> None:
    _, server = raiser
    for cap, fits in ((8_000_000, True), (1_000_000, False)):
        channel = channels.connect(server.address, credentials=SECRET, max_message_bytes=cap)
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        asking = channels.call(stub.GetStatus, pb.GetStatusRequest(), timeout_s=60, phase="S", peer="c")
        if fits:
            assert len((await asking).phase) == 5_000_000
        else:
            with pytest.raises(ProtocolError, match=r"too large.*service\.max_message_mib"):
                await asking
        await channel.close()


async def test_a_taken_port_is_an_error_that_says_what_to_change() -> None:
    server = await start_server(ADD, Raiser())
    with pytest.raises(
        EnvironmentLackError,
        match=rf"port {server.port} on 127.0.0.1 is taken .* set service.controller_port to another port",
    ):
        await start_server(ADD, Raiser(), port=server.port, port_key="service.controller_port")
    await server.stop(0)


async def test_listening_beyond_loopback_needs_a_token_and_tls(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match=r"refusing to listen on 0\.0\.0\.0 without a token.*PACELINE_TOKEN_FILE"
    ):
        await start_server(ADD, Raiser(), host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"refusing .* in plain text: run `paceline certs init DIR`"):
        await start_server(ADD, Raiser(), host="0.0.0.0", credentials=SECRET)
    insecure = Credentials(token="secret", insecure=True)
    server = await start_server(ADD, Raiser(), host="0.0.0.0", credentials=insecure)
    await server.stop(0)
    assert "listening on 0.0.0.0 in plain text" in caplog.text
    with pytest.raises(ConfigError, match="without a token"):
        await start_server(ADD, Raiser(), host="0.0.0.0", credentials=Credentials(insecure=True))
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "node7")] == [
        True,
        True,
        True,
        False,
        False,
    ]


class Garbage(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message."""

    def service(self, handler_call_details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return b"\xff\xff"

        async def answers(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield b"\xff\xff"

        if "Watch" in handler_call_details.method:
            return grpc.unary_stream_rpc_method_handler(answers)
        return grpc.unary_unary_rpc_method_handler(answer)


async def test_an_answer_that_cannot_be_parsed_is_a_protocol_error() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Garbage(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = channels.connect(f"127.0.0.1:{port}")
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    with pytest.raises(ProtocolError, match="STATUS: rollout-7 sent an answer that cannot be parsed"):
        await channels.call(
            stub.GetStatus, pb.GetStatusRequest(), timeout_s=60, phase="STATUS", peer="rollout-7"
        )
    with pytest.raises(ProtocolError, match="cannot be parsed"):
        async for _ in channels.stream(stub.Watch, pb.WatchRequest(), phase="WATCH", peer="c", timeout_s=60):
            pass
    await channel.close()
    await server.stop(0)


def test_the_text_of_a_peer_is_bounded_and_does_nothing_to_a_terminal() -> None:
    sent = {"class": "ConfigError", "message": "\x1b[2J\x07red\u202e " + "x" * 5000, "fields": {}}
    error = from_metadata((("paceline-error-bin", json.dumps(sent).encode()),))
    assert type(error) is ConfigError
    assert str(error).startswith("\\x1b[2J\\x07red\\u202e xxx")
    assert len(str(error)) <= 2000
    # Refused before it is parsed: a garbage collection at that depth could not run a finalizer.
    nested = from_metadata((("paceline-error-bin", b"[" * 20_000),))
    assert isinstance(nested, ProtocolError)
    assert "nested too deeply" in str(nested)
    for nonsense in (b"\xff", b"[]", b'{"class": 1, "message": 2, "fields": [3]}', b"null"):
        assert isinstance(from_metadata((("paceline-error-bin", nonsense),)), ProtocolError)


def test_what_is_not_an_error_of_ours_is_none_and_nonsense_a_protocol_error() -> None:
    assert from_metadata((("other", "x"),)) is None
    assert from_metadata(None) is None
    assert isinstance(from_metadata((("paceline-error-bin", b"{}"),)), ProtocolError)
    newer = from_metadata((("paceline-error-bin", b'{"class": "NewError", "message": "m", "fields": {}}'),))
    assert type(newer) is PacelineError
