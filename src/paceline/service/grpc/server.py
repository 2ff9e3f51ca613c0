"""gRPC servers: token check, errors as status codes, trace context, health, keep-alive."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.service.addresses import is_loopback, join, to_advertise, to_bind
from paceline.service.grpc.connection import DEFAULT_MAX_MESSAGE_BYTES, KEEPALIVE_S, common_options
from paceline.service.grpc.fencing import TermFence
from paceline.service.grpc.interceptor import CallInterceptor
from paceline.service.identity.credentials import INSECURE, TLS_DIR, Credentials, server_credentials
from paceline.service.ports import PORTS, ports_to_try

log = logging.getLogger(__name__)

_Servicer = TypeVar("_Servicer")
_MAX_CALLS = 1024
_MAX_CALLS_PER_CONNECTION = 128
_HANDSHAKE_S = 10
# Ends connections whose certificate has expired; running calls are finished first.
_CONNECTION_AGE_S = 600


@dataclass(kw_only=True, slots=True)
class RunningServer:
    """A gRPC server that listens.

    Attributes:
        advertise: address or name under which others reach it.
    """

    advertise: str
    port: int
    _server: Any = field(repr=False)
    _health: Any = field(repr=False)

    @property
    def address(self) -> str:
        """host:port that other members connect to."""
        return join(self.advertise, self.port)

    async def answer_as(self, name: str) -> None:
        """Answers health checks for `name`, too, so that others can tell this process from its successor."""
        await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def refuse_work(self) -> None:
        """Answers health checks with NOT_SERVING from now on; calls are still served."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 2.0) -> None:
        """Refuses new calls, and cancels running calls after `grace_s` seconds."""
        await self.refuse_work()
        await self._server.stop(grace_s)


async def start_server(
    add: Callable[[_Servicer, grpc.aio.Server], None],
    servicer: _Servicer,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str = "",
    credentials: Credentials | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    port_key: str = "--port",
    fence: TermFence | None = None,
) -> RunningServer:
    """Starts a grpc.aio server with health checks; `port` 0 takes any free one.

    A PacelineError that a method raises reaches the caller's `channels.call` as the same class. Any other
    error arrives as PacelineError with the type's name, and is logged here with its traceback.

    Args:
        servicer: the servicer, with `async def` methods.
        host: address, interface or name to bind to.
        advertise: where others reach it, if that is not `host`; for a wildcard the machine's name.
        credentials: the token that every call must carry, and the files for TLS. None lets every call
            in, for loopback only.
        port_key: what the user changes when the port is taken, for the error's message.
        fence: fencing state of the member behind this server; calls from an earlier controller get
            ProtocolError.

    Raises:
        ConfigError: no token or no TLS on an address that other machines can reach.
        EnvironmentLackError: the port is taken or the address is not this machine's.
    """
    host = to_bind(host)
    credentials = credentials or Credentials()
    _check_reach(host, credentials)
    server = grpc.aio.server(
        interceptors=[CallInterceptor(credentials, fence or TermFence())],
        options=_options(max_message_bytes, has_tls=credentials.tls is not None),
        maximum_concurrent_rpcs=_MAX_CALLS,
    )
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    add(servicer, server)
    bound = _bind(server, host, ports_to_try(port), credentials, port_key)
    await server.start()
    return RunningServer(advertise=to_advertise(host, advertise), port=bound, _server=server, _health=health)


def _bind(
    server: grpc.aio.Server, host: str, ports: Sequence[int], credentials: Credentials, port_key: str
) -> int:
    for port in ports:
        try:
            check_port(host, port, port_key)
            return _add_port(server, join(host, port), credentials)
        except RuntimeError as error:
            fault = _port_taken(host, port, port_key, str(error))
            fault.__cause__ = error
        except EnvironmentLackError as error:
            fault = error
    if len(ports) > 1:
        taken = f"of the ports {min(ports)}-{max(ports)} (service.ports, {PORTS}) none is free on {host}"
        raise EnvironmentLackError(f"{taken}: {fault}; name more of them") from fault
    raise fault


def _add_port(server: grpc.aio.Server, where: str, credentials: Credentials) -> int:
    if credentials.tls is None:
        return server.add_insecure_port(where)
    proof = server_credentials(credentials.tls, asks_callers=credentials.asks_callers)
    return server.add_secure_port(where, proof)


def _options(max_message_bytes: int, *, has_tls: bool) -> list[tuple[str, str | int]]:
    options = [
        *common_options(max_message_bytes),
        # Without these options, the server treats the clients' keep-alive as abuse and ends healthy calls.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
        ("grpc.http2.max_ping_strikes", 0),
        # With port reuse two processes could share the port, and each would get some of the calls.
        ("grpc.so_reuseport", 0),
        # With the probe, megabytes of a message would arrive before it is read, instead of 64 KiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", _MAX_CALLS_PER_CONNECTION),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_S * 1000),
    ]
    if has_tls:
        # A connection that began with a certificate must not outlive it for long.
        options.append(("grpc.max_connection_age_ms", _CONNECTION_AGE_S * 1000))
    return options


def _check_reach(host: str, credentials: Credentials) -> None:
    """Refuses to serve other machines without a token and TLS."""
    if is_loopback(host):
        return
    if not credentials.token:
        raise ConfigError(
            f"refusing to listen on {host} without a token: set PACELINE_TOKEN, or PACELINE_TOKEN_FILE, to "
            "the same secret for every service (`openssl rand -hex 32` makes one), or listen on 127.0.0.1"
        )
    if credentials.tls is None and not credentials.insecure:
        raise ConfigError(
            f"refusing to listen on {host} in plain text: run `paceline certs init DIR` once and `paceline "
            f"certs issue DIR NAME --role ROLE` for each service, and set {TLS_DIR} to what that writes; or "
            f"listen on 127.0.0.1; or, on a network that you trust fully, set service.insecure: true and "
            f"{INSECURE}=1"
        )
    if credentials.tls is None:
        log.warning(
            "listening on %s in plain text, as asked: everyone on that network can read the token and every "
            "call",
            host,
        )


def check_port(host: str, port: int, port_key: str) -> None:
    """Binds the port once, because the system's error message is clearer than gRPC's.

    Raises:
        EnvironmentLackError: the port is taken or the address is not this machine's; the message names
            `port_key`.
    """
    try:
        infos = socket.getaddrinfo(to_bind(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _port_taken(host, port, port_key, error.strerror or str(error), error.errno) from error


def _port_taken(
    host: str, port: int, port_key: str, why: str, number: int | None = None
) -> EnvironmentLackError:
    if number in (errno.EADDRINUSE, None):
        return EnvironmentLackError(
            f"port {port} on {host} is taken ({why}); stop what listens there, or set {port_key} to another "
            "port (0 takes any free one)"
        )
    return EnvironmentLackError(
        f"cannot listen on {join(host, port)} ({why}); give an address of this machine and a port it may "
        f"use ({port_key}; 0 takes any free one)"
    )
