"""Admits or refuses calls to a gRPC server; answers errors, and follows traces."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.core.errors import InvalidMessageError, PacelineError
from paceline.core.text import one_line
from paceline.service.grpc import errors
from paceline.service.grpc.admission import OPEN_METHOD, callers, certificate_admits, token_admits
from paceline.service.grpc.connection import TRACEPARENT_KEY
from paceline.service.grpc.fencing import TermFence
from paceline.service.identity.credentials import Credentials
from paceline.service.observability import telemetry

log = logging.getLogger(__name__)

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_MAX_OPEN_READS = 2
_OPEN_READ_S = 2.0
_CERTIFICATE_NAMES = "x509_subject_alternative_name"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Checks the token, certificate and term of calls; maps errors; opens spans for traced calls.

    gRPC reads the message of a unary call before it calls the method, but that of a stream only when the
    method asks for it. So a call without a token gets a method for streams, which ends the call without
    reading its message.
    """

    def __init__(self, credentials: Credentials, fence: TermFence) -> None:
        self._credentials, self._fence = credentials, fence
        self._open_reads = asyncio.Semaphore(_MAX_OPEN_READS)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Returns the guarded handler of a call; gRPC asks for it once per call."""
        if not token_admits(self._credentials.token, details.method, details.invocation_metadata):
            return grpc.stream_stream_rpc_method_handler(_refuse_token)
        handler = await continuation(details)
        if handler is None:
            return None
        if details.method == OPEN_METHOD:
            return _open(handler, self._open_reads)
        if details.method.startswith(_HEALTH_PREFIX):
            return handler
        guard = _Guard(
            method=details.method,
            checks_role=self._credentials.tls is not None,
            fence=self._fence,
            parse=handler.request_deserializer,
        )
        return _wrap(handler, guard)


async def _refuse_token(_: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "wrong, expired or missing token, or one of another scope"
    )


def _open(handler: Any, reads: asyncio.Semaphore) -> Any:
    """Serves a unary method without a token; it reads few messages at a time, so floods of calls wait."""

    async def method(requests: AsyncIterator[Any], context: Any) -> Any:
        async with asyncio.timeout(_OPEN_READ_S), reads:
            request = await anext(requests, None)
        if request is None:  # too large, or the caller is gone: gRPC has ended the call
            raise asyncio.CancelledError
        return await handler.unary_unary(request, context)

    return grpc.stream_unary_rpc_method_handler(
        method, handler.request_deserializer, handler.response_serializer
    )


class _WrongRoleError(Exception):
    """A caller's certificate does not permit the method."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    """How a call ends. Not an exception: gRPC would keep it in a reference cycle, with its frames.

    Refused calls would then keep their messages until the garbage collector runs.
    """

    code: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    async def end(self, context: Any) -> None:
        """Ends the call. Called outside of `except`, where the error's frames would be kept too."""
        await context.abort(self.code, self.message, trailing_metadata=self.metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guard:
    method: str
    checks_role: bool
    fence: TermFence
    parse: Callable[[bytes], Any]

    @property
    def name(self) -> str:
        """The method's name without the leading slash."""
        return self.method.removeprefix("/")

    def admit(self, raw: bytes, context: Any) -> Any:
        """Checks the caller, then parses and returns the request."""
        self.check(context)
        return self.read(raw)

    def admit_all(self, raw_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Checks the caller; returns the requests, each parsed when it is read."""
        self.check(context)
        return (self.read(raw) async for raw in raw_requests)

    def check(self, context: Any) -> None:
        """Refuses a caller whose certificate does not permit the method, or whose term is over.

        Raises:
            _WrongRoleError: the certificate has another role.
            ProtocolError: the caller's term is over.
        """
        if self.checks_role and not certificate_admits(
            self.method, context.auth_context().get(_CERTIFICATE_NAMES, ())
        ):
            roles = ", ".join(sorted(callers(self.method) or ()))
            raise _WrongRoleError(f"{self.name} needs a certificate of role {roles}")
        self.fence.check(context.invocation_metadata())

    def read(self, raw: bytes) -> Any:
        """Returns the message.

        Raises:
            InvalidMessageError: it cannot be parsed.
        """
        try:
            return self.parse(raw)
        except Exception as error:
            raise InvalidMessageError(
                f"{self.name}: request cannot be parsed", reason="unparsable"
            ) from error

    def refusal(self, error: Exception) -> _Refusal:
        """Logs a call's error; returns how the call ends."""
        if isinstance(error, _WrongRoleError):
            return _Refusal(code=grpc.StatusCode.PERMISSION_DENIED, message=str(error))
        if isinstance(error, NotImplementedError):
            return _Refusal(code=grpc.StatusCode.UNIMPLEMENTED, message=f"{self.name} is not served here")
        if isinstance(error, PacelineError):
            log.info("%s answered %s: %s", self.name, type(error).__name__, one_line(str(error)))
        else:
            log.error("%s failed", self.name, exc_info=error)
            error = PacelineError(f"{self.name} failed: {type(error).__name__}: {error}")
        code, message = errors.status_code(error), errors.clip(str(error))
        return _Refusal(code=code, message=message, metadata=errors.to_metadata(error))


def _wrap(handler: Any, guard: _Guard) -> Any:
    """Returns the handler with the guard around its method; a stream of requests is answered by a stream."""
    serialize = handler.response_serializer
    if handler.request_streaming:
        method = _guard_stream(handler.stream_stream, guard, guard.admit_all)
        return grpc.stream_stream_rpc_method_handler(method, response_serializer=serialize)
    if handler.response_streaming:
        method = _guard_stream(handler.unary_stream, guard, guard.admit)
        return grpc.unary_stream_rpc_method_handler(method, response_serializer=serialize)
    return grpc.unary_unary_rpc_method_handler(
        _guard_unary(handler.unary_unary, guard), response_serializer=serialize
    )


def _guard_unary(inner: Any, guard: _Guard) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        parent = _traceparent(context)
        if not parent:
            return await inner(request, context)
        with telemetry.span(guard.name, traceparent=parent, attributes={"rpc.system": "grpc"}):
            return await inner(request, context)

    async def method(raw: bytes, context: Any) -> Any:
        try:
            return await answer(guard.admit(raw, context), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: every error is answered, or logged too
            refusal = guard.refusal(error)
        del raw
        await refusal.end(context)
        return None

    return method


def _guard_stream(
    inner: Any, guard: _Guard, admit: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def method(raw: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for answer in _checked(inner(admit(raw, context), context), guard):
                yield answer
            return
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            refusal = guard.refusal(error)
        del raw
        await refusal.end(context)

    return method


def _checked(answers: Any, guard: _Guard) -> AsyncIterator[Any]:
    if not inspect.isasyncgen(answers):
        raise TypeError(f"{guard.name} must be an async generator")
    return answers


def _traceparent(context: Any) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == TRACEPARENT_KEY), "")
