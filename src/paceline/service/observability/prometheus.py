"""Serves a process's metrics to Prometheus at http://HOST:PORT/metrics, without a collector.

PACELINE_PROMETHEUS_PORT overrides telemetry.prometheus_port; 0 is off. The endpoint listens on loopback
unless PACELINE_PROMETHEUS_HOST names another address, where it serves callers with a certificate of the run;
PACELINE_PROMETHEUS_PLAIN=1 makes it serve everyone. It exposes only numbers and names of members.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.service.addresses import is_loopback, to_bind
from paceline.service.identity.credentials import TLS_DIR, Credentials, TlsFiles
from paceline.service.observability.http_server import HttpServer

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

log = logging.getLogger(__name__)

PORT = "PACELINE_PROMETHEUS_PORT"
HOST = "PACELINE_PROMETHEUS_HOST"
PLAIN = "PACELINE_PROMETHEUS_PLAIN"
_LABELS = ("service.name", "service.instance.id")


def wanted_port(configured: int) -> int:
    """Returns the port to listen on; 0 for none.

    Raises:
        ConfigError: PACELINE_PROMETHEUS_PORT is not a port.
    """
    given = os.environ.get(PORT, "").strip()
    if not given:
        return configured
    if not given.isdecimal() or int(given) > 65535:
        raise ConfigError(
            f"{PORT}={given} is not a port: give a number from 1 to 65535, or 0 for no endpoint"
        )
    return int(given)


def wanted_host() -> str:
    """Returns the address to listen on."""
    return os.environ.get(HOST, "").strip() or "127.0.0.1"


def _tls_for(host: str, files: TlsFiles | None, *, plain: bool) -> TlsFiles | None:
    """Returns the TLS files for an address; None for plain text, as on loopback or with `plain`.

    Raises:
        ConfigError: other machines reach the address, there are no files, and `plain` is False.
    """
    if is_loopback(host) or plain:
        return None
    if files is None:
        raise ConfigError(
            f"refusing to serve metrics on {host} in plain text: set {TLS_DIR} to what `paceline certs "
            f"issue` writes, or listen on 127.0.0.1, or, on a network that may see them, set {PLAIN}=1"
        )
    return files


class PrometheusEndpoint:
    """Serves the metrics that its reader collects until it is closed.

    Raises:
        ConfigError: other machines reach the address, and this process has no TLS files.
        EnvironmentLackError: the exporter is not installed, or the TLS files cannot be used.
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, host: str, port: int) -> None:
        host = to_bind(host)
        tls = _tls_for(host, Credentials.from_env().tls, plain=os.environ.get(PLAIN) == "1")
        try:
            from opentelemetry.exporter.prometheus import PrometheusMetricReader
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError as error:
            raise EnvironmentLackError(
                f"a Prometheus endpoint on port {port} needs its exporter: pip install "
                "opentelemetry-exporter-prometheus, or set telemetry.prometheus_port=0"
            ) from error
        # Not the library's global registry, which holds the metrics of an engine in this process.
        registry = CollectorRegistry()
        self.reader: MetricReader = PrometheusMetricReader(
            disable_target_info=True,
            scope_info_enabled=False,
            resource_attribute_filter=lambda name: name in _LABELS,
            registry=registry,
        )
        self._server = HttpServer(host, port, make_wsgi_app(registry), tls)

    def shutdown(self) -> None:
        """Stops the endpoint and its server."""
        self._server.close()


def open_endpoint(configured_port: int, local_rank: int) -> PrometheusEndpoint | None:
    """Opens the endpoint on the configured port plus the rank; returns None if none is configured.

    If the port is taken, logs a warning and returns None: training goes on.

    Raises:
        ConfigError, EnvironmentLackError: see `wanted_port` and `PrometheusEndpoint`.
    """
    port, host = wanted_port(configured_port), wanted_host()
    if port == 0:
        return None
    port += local_rank
    try:
        endpoint = PrometheusEndpoint(host, port)
    except OSError as error:
        log.warning(
            "no metrics endpoint on %s:%d (%s); set %s for each process of this machine",
            host,
            port,
            error.strerror or error,
            PORT,
        )
        return None
    log.info("metrics on http://%s:%d/metrics", host, port)
    return endpoint
