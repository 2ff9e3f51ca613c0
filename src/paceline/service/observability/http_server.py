"""Serves a process's metrics and pages over HTTP or HTTPS, in threads."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import ssl
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from paceline.service.identity.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, LatestTls, TlsFiles

log = logging.getLogger(__name__)

_MAX_REQUESTS = 16
_REQUEST_S = 10.0
_CLOSE_S = 2.0
_POLL_S = 0.1


class HttpServer(socketserver.ThreadingMixIn, WSGIServer):
    """Answers from a limited number of threads until it is closed.

    Args:
        host: address of this machine to listen on.
        tls: certificate files; None: plain text.
        asks_callers: over TLS, require of every caller a certificate of the same authority.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
        EnvironmentLackError: the TLS files cannot be used.
    """

    daemon_threads = True

    def __init__(
        self, host: str, port: int, app: Any, tls: TlsFiles | None, *, asks_callers: bool = True
    ) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self._files, self._latest = tls, LatestTls(tls) if tls else None
        self._asks_callers = asks_callers
        self._context = _context(tls, asks_callers) if tls else None
        self._open: dict[int, socket.socket] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(address, _Handler)  # type: ignore[arg-type]  # an IPv6 address has four parts
        self.set_app(app)
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="http", daemon=True)
        self._thread.start()

    @property
    def is_plain(self) -> bool:
        """Whether it answers without TLS."""
        return self._files is None

    def server_bind(self) -> None:
        """Binds without a DNS lookup of the machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection; if there are too many, closes the oldest.

        Refusing the newest instead would let callers that send nothing, or a byte at a time, lock out others.
        """
        with self._lock:
            if len(self._open) >= _MAX_REQUESTS:
                _end(self._open.pop(next(iter(self._open))))
            self._open[id(request)] = request.dup()  # a handshake replaces the request's descriptor
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handles a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                copy = self._open.pop(id(request), None)
            if copy is not None:
                copy.close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers, over TLS after the handshake."""
        context = self._now()
        if context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_REQUEST_S)
        with context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def _now(self) -> ssl.SSLContext | None:
        """Returns the TLS context, reloaded if the files have changed; None for plain text."""
        if self._files is not None and self._latest is not None and self._latest.changed():
            self._context = _context(self._files, self._asks_callers)
        return self._context

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs callers' errors at DEBUG: a refused or lost caller is not an error of this process."""
        log.debug("a call over HTTP from %s failed", client_address, exc_info=True)

    def close(self) -> None:
        """Stops listening and ends the server's thread."""
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=_CLOSE_S)


def _end(connection: socket.socket) -> None:
    """Closes a connection whose thread may be waiting for it."""
    with contextlib.suppress(OSError), connection:
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, *_: Any) -> None:
        """Leaves requests out of the log."""


def _context(files: TlsFiles, asks_callers: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.folder / CA_FILE))
    context.verify_mode = ssl.CERT_REQUIRED if asks_callers else ssl.CERT_NONE
    context.load_cert_chain(files.folder / CERTIFICATE_FILE, files.folder / KEY_FILE)
    return context
