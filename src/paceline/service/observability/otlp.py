"""Exports over OTLP/gRPC to a collector; while it is unreachable, drops data and logs that once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from paceline.core.errors import EnvironmentLackError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

log = logging.getLogger(__name__)

_METRICS_EVERY_MS = 5000


class CollectorSpanExporter(SpanExporter):
    """Passes spans to an exporter; logs when the collector begins to fail and when it recovers."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter, self._endpoint = exporter, endpoint
        self._is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans; those that do not arrive within the exporter's deadline are lost."""
        result = self._exporter.export(spans)
        is_away = result is not SpanExportResult.SUCCESS
        if is_away and not self._is_away:
            log.warning("the collector at %s takes nothing: spans and metrics are dropped", self._endpoint)
        if self._is_away and not is_away:
            log.warning("the collector at %s takes spans again", self._endpoint)
        self._is_away = is_away
        return result

    def shutdown(self) -> None:
        """Closes the connection to the collector."""
        self._exporter.shutdown()


def exporters(endpoint: str) -> tuple[SpanExporter, MetricReader]:
    """Returns exporters of spans and metrics to an endpoint, over TLS if it begins with https://.

    Raises:
        EnvironmentLackError: the exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise EnvironmentLackError(
            f"telemetry.otlp_endpoint={endpoint} needs the OTLP exporter: pip install "
            "opentelemetry-exporter-otlp-proto-grpc, or unset it"
        ) from error
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    # The library logs each failed attempt as an error, which a user would take for the reason why a service
    # ended.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    insecure = not endpoint.startswith("https://")
    spans = CollectorSpanExporter(OTLPSpanExporter(endpoint=endpoint, insecure=insecure), endpoint)
    metrics = OTLPMetricExporter(endpoint=endpoint, insecure=insecure)
    return spans, PeriodicExportingMetricReader(metrics, _METRICS_EVERY_MS)
