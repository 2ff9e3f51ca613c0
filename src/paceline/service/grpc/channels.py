"""Calls to other services: channels with keep-alive, deadlines, and Paceline's own errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeVar

import grpc

from paceline.core.errors import ConfigError, DeadlineError, PacelineError, PeerLostError, ProtocolError
from paceline.core.text import one_line
from paceline.service.addresses import is_loopback
from paceline.service.grpc import errors
from paceline.service.grpc.connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    TERM_KEY,
    TOKEN_KEY,
    TRACEPARENT_KEY,
    bearer,
    common_options,
)
from paceline.service.grpc.rotating_channel import RotatingChannel
from paceline.service.identity.credentials import (
    CA_FILE,
    INSECURE,
    TLS_DIR,
    TOKEN,
    Credentials,
    LatestTls,
    server_name,
)
from paceline.service.observability import telemetry

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


def connect(
    address: str,
    *,
    credentials: Credentials | None = None,
    role: str = "",
    tls_name: str = "",
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    term: int = 0,
) -> grpc.aio.Channel:
    """Returns a channel to host:port, which connects at its first use.

    Args:
        address: host:port.
        credentials: the token that goes with every call, and the files for TLS; None: neither.
        role: role of the server, which its certificate must name; "": the certificate must name the address.
        tls_name: name required in the server's certificate, instead of the role's.
        term: the controller's term, sent with every call; 0 for other callers.

    Raises:
        ConfigError: the token would go to another machine in plain text.
    """
    options = [
        *common_options(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Control calls stay in the cluster, so the environment's HTTP proxy must not get them.
        ("grpc.enable_http_proxy", 0),
    ]
    credentials = credentials or Credentials()
    interceptors = [kind(credentials.token, term) for kind in (_UnaryHeaders, _StreamHeaders, _DuplexHeaders)]
    if credentials.tls is None:
        _check_reach(address, credentials)
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    if role or tls_name:
        options.append(("grpc.ssl_target_name_override", tls_name or server_name(role)))

    def open_channel(proof: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, proof, options=options, interceptors=interceptors)

    return RotatingChannel(LatestTls(credentials.tls), open_channel)


def _check_reach(address: str, credentials: Credentials) -> None:
    """Refuses to show the token to a network."""
    if credentials.token and not credentials.insecure and not is_loopback(address.rpartition(":")[0]):
        raise ConfigError(
            f"refusing to send the token to {address} in plain text: set {TLS_DIR} to what `paceline certs "
            f"issue` writes, or to a folder with a reward service's {CA_FILE}; or, on a network that you "
            f"trust, set {INSECURE}=1"
        )


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Reply],
    request: _Request,
    *,
    timeout_s: float,
    phase: str,
    peer: str,
    wait_for_ready: bool | None = None,
) -> _Reply:
    """Makes one unary call with a deadline.

    Args:
        phase: what is being done, for the error's message.
        peer: member id of the service that is called, for the error's message.
        wait_for_ready: wait for a peer that is not up yet, until the deadline, instead of failing at once.

    Raises:
        DeadlineError: no answer within `timeout_s`.
        PeerLostError: the peer cannot be reached, or was lost during the call.
        ConfigError: the peer refused the token.
        ProtocolError: the answer cannot be parsed.
        PacelineError: the class that the peer raised, with its message.
    """
    try:
        answer = await method(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
    except grpc.aio.AioRpcError as error:
        raise _translate(error, timeout_s=timeout_s, phase=phase, peer=peer) from error
    return _parsed(answer, phase=phase, peer=peer)


async def stream(
    method: grpc.aio.UnaryStreamMultiCallable[_Request, _Reply],
    request: _Request,
    *,
    phase: str,
    peer: str,
    timeout_s: float | None = None,
) -> AsyncGenerator[_Reply, None]:
    """Yields the replies of a server-streaming call; errors as in `call`.

    `timeout_s` bounds the duration of the stream. With None only the keep-alive ends it, about 15 s after the
    peer froze or died.
    """
    answers = method(request, timeout=timeout_s)
    try:
        async for answer in answers:
            yield _parsed(answer, phase=phase, peer=peer)
    except grpc.aio.AioRpcError as error:
        raise _translate(error, timeout_s=timeout_s or 0.0, phase=phase, peer=peer) from error
    finally:
        answers.cancel()


async def duplex(
    method: grpc.aio.StreamStreamMultiCallable[_Request, _Reply],
    requests: AsyncIterator[_Request],
    *,
    phase: str,
    peer: str,
    token: str = TOKEN,
) -> AsyncIterator[_Reply]:
    """Yields the replies of a call that streams both ways; errors as in `call`. The keep-alive bounds it.

    `token` names the variable that holds the caller's token, for the error's message.
    """
    answers = method(requests)
    try:
        async for answer in answers:
            yield _parsed(answer, phase=phase, peer=peer)
    except grpc.aio.AioRpcError as error:
        raise _translate(error, timeout_s=0.0, phase=phase, peer=peer, token=token) from error
    finally:
        answers.cancel()


def _parsed(answer: _Reply | None, *, phase: str, peer: str) -> _Reply:
    """Returns the answer; raises for None, which gRPC returns if it cannot parse an answer."""
    if answer is None:
        raise ProtocolError(f"{phase}: {peer} sent an answer that cannot be parsed: another version?")
    return answer


def _translate(
    error: grpc.aio.AioRpcError, *, timeout_s: float, phase: str, peer: str, token: str = TOKEN
) -> PacelineError:
    sent = errors.from_metadata(error.trailing_metadata())
    if sent is not None:
        return sent
    code, details = error.code(), one_line(error.details() or "")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(phase=phase, peer=peer, seconds=timeout_s)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) or _is_broken_stream(code, details):
        return PeerLostError(f"{phase}: {peer} cannot be reached or went away ({details})", peer=peer)
    if code is grpc.StatusCode.UNAUTHENTICATED and token != TOKEN:
        return ConfigError(
            f"{phase}: {peer} refused the token ({details}); give this client, as `token` or in {token}, "
            f"one of the scope attach or the run's {TOKEN}"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return ConfigError(
            f"{phase}: {peer} refused the token ({details}); start every service of the run with the same "
            f"{TOKEN}"
        )
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return ConfigError(
            f"{phase}: {peer} refused the certificate ({details}); issue another with `paceline certs issue`"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" not in details:
        return PeerLostError(f"{phase}: {peer} has too much to do ({details})", peer=peer)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ProtocolError(
            f"{phase}: message to or from {peer} is too large ({details}); raise service.max_message_mib"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(
            f"{phase}: {peer} does not serve this method ({details}); is it another service or version?"
        )
    return PacelineError(f"{phase}: {peer} answered {code.name}: {details}")


def _is_broken_stream(code: grpc.StatusCode, details: str) -> bool:
    """Returns whether the stream broke off during the call, which gRPC reports as an internal error.

    Two cases: a call of grpc.aio was about to send when its peer went away
    (https://github.com/grpc/grpc/issues/36066), or the HTTP/2 stream was reset.
    """
    return code is grpc.StatusCode.INTERNAL and details.startswith(
        ("Internal error from Core", "Received RST_STREAM")
    )


class _Headers:
    """Adds token, term and trace context to a call."""

    def __init__(self, token: str, term: int) -> None:
        given = ((TOKEN_KEY, bearer(token) if token else ""), (TERM_KEY, str(term) if term else ""))
        self._fixed: Sequence[tuple[str, str]] = tuple((key, value) for key, value in given if value)

    def _add(self, details: Any) -> Any:
        metadata = list(details.metadata or ()) + list(self._fixed)
        parent = telemetry.current_traceparent()
        if parent:
            metadata.append((TRACEPARENT_KEY, parent))
        return details._replace(metadata=grpc.aio.Metadata(*metadata))


class _UnaryHeaders(_Headers, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(self._add(details), request)


class _StreamHeaders(_Headers, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(self._add(details), request)


class _DuplexHeaders(_Headers, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return await continuation(self._add(details), requests)
