"""A process's own Prometheus endpoint: http://HOST:PORT/metrics, without a collector in between.

PACELINE_PROMETHEUS_PORT overrides telemetry.prometheus_port; 0 is off. The endpoint listens on loopback
unless PACELINE_PROMETHEUS_HOST names another address, where it serves those who have a certificate of the
run; PACELINE_PROMETHEUS_PLAIN=1 has it serve everyone. It answers with numbers and names of members only.
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
    """The port in force; 0: none.

    Raises:
        ConfigError: PACELINE_PROMETHEUS_PORT is no port.
    """
    given = os.environ.get(PORT, "").strip()
    if not given:
        return configured
    if not given.isdecimal() or int(given) > 65535:
        raise ConfigError(f"{PORT}={given} is no port: give a number from 1 to 65535, or 0 for no endpoint")
    return int(given)


def wanted_host() -> str:
    """The address to listen on."""
    return os.environ.get(HOST, "").strip() or "127.0.0.1"


def _tls_for(host: str, files: TlsFiles | None, *, plain: bool) -> TlsFiles | None:
    """The files with which metrics are served on an address; None: in plain text, as `plain` says.

    Raises:
        ConfigError: other machines reach the address, and plain text is not wanted.
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
    """Serves what its reader collects until it is closed.

    Attributes:
        reader: for the meter provider.

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
        # Not the library's global registry: an engine in this process has metrics of its own there.
        registry = CollectorRegistry()
        self.reader: MetricReader = PrometheusMetricReader(
            disable_target_info=True,
            scope_info_enabled=False,
            resource_attribute_filter=lambda name: name in _LABELS,
            registry=registry,
        )
        self._server = HttpServer(host, port, make_wsgi_app(registry), tls)

    def shutdown(self) -> None:
        """Stops listening for scrapes of the metrics."""
        self._server.close()


def open_endpoint(configured_port: int, local_rank: int) -> PrometheusEndpoint | None:
    """The endpoint that environment and configuration ask for, plus the rank; None without one.

    A port that is taken costs the endpoint and a warning, not the training.

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
