"""OpenTelemetry traces and metrics: to an OTLP endpoint if configured, else spans to a file of the run.

Nothing happens at import, and no global provider is set: `setup` starts the process's telemetry. Before
`setup` spans are not recorded, but trace context passes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline.core.errors import EnvironmentLackError

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.metrics._internal.instrument import Gauge
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

AttributeValue = str | bool | int | float
_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"


class Telemetry:
    """A process's tracer and gauges."""

    def __init__(self, tracer: trace.Tracer, closers: list[object], meter: Meter | None) -> None:
        self.tracer = tracer
        self._closers = closers
        self._meter = meter
        self._gauges: dict[str, Gauge] = {}

    def record(self, name: str, value: float, attributes: Mapping[str, AttributeValue] | None) -> None:
        """Sets a gauge."""
        if self._meter is None:
            return
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        self._gauges[name].set(value, dict(attributes or {}))

    def close(self) -> None:
        """Sends buffered spans and metrics, and ends."""
        for closer in self._closers:
            closer.shutdown()  # type: ignore[attr-defined]


_current = Telemetry(trace.NoOpTracer(), [], None)


def setup(
    service_name: str,
    *,
    run_dir: str | Path | None,
    otlp_endpoint: str | None = None,
    instance: str = "",
) -> None:
    """Starts the process's telemetry; a second call replaces the first.

    Args:
        service_name: "controller", "rollout", ...
        run_dir: without an endpoint spans go to RUN_DIR/spans.jsonl; None: nowhere.
        otlp_endpoint: OTLP/gRPC endpoint for spans and metrics.
        instance: the member id.

    Raises:
        EnvironmentLackError: an endpoint is given but the exporter is not installed.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from paceline.service.spans import SpanFileExporter, SystemIdGenerator

    global _current
    shutdown()
    resource = Resource({"service.name": f"paceline.{service_name}", "service.instance.id": instance})
    exporter: SpanExporter | None = None
    meters: MeterProvider | None = None
    if otlp_endpoint:
        exporter, meters = _otlp(otlp_endpoint, resource)
    elif run_dir is not None:
        exporter = SpanFileExporter(Path(run_dir) / "spans.jsonl")
    provider = TracerProvider(resource=resource, id_generator=SystemIdGenerator(), shutdown_on_exit=False)
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    closers: list[object] = [provider, *([meters] if meters else [])]
    meter = meters.get_meter("paceline") if meters else None
    _current = Telemetry(provider.get_tracer("paceline"), closers, meter)


def shutdown() -> None:
    """Flushes and ends the process's telemetry, if any."""
    global _current
    _current.close()
    _current = Telemetry(trace.NoOpTracer(), [], None)


@contextmanager
def span(
    name: str,
    *,
    traceparent: str | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[trace.Span]:
    """A span around a block; its parent is `traceparent` (W3C) if given, else the open span.

    An exception that leaves the block is recorded on the span.
    """
    parent = _PROPAGATOR.extract({_TRACEPARENT: traceparent}) if traceparent else None
    with _current.tracer.start_as_current_span(
        name, context=parent, attributes=dict(attributes or {})
    ) as opened:
        yield opened


def current_traceparent() -> str:
    """The open span as W3C traceparent, to pass on with the work; "" without an open span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get(_TRACEPARENT, "")


def record(name: str, value: float, attributes: Mapping[str, AttributeValue] | None = None) -> None:
    """Sets a gauge of the OpenTelemetry metrics API; does nothing without an OTLP endpoint."""
    _current.record(name, value, attributes)


def _otlp(endpoint: str, resource: Resource) -> tuple[SpanExporter, MeterProvider]:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise EnvironmentLackError(
            f"telemetry.otlp_endpoint={endpoint} needs the OTLP exporter: pip install 'paceline[otlp]', "
            "or unset it"
        ) from error
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    insecure = not endpoint.startswith("https://")
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint, insecure=insecure), 5000)
    meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    return OTLPSpanExporter(endpoint=endpoint, insecure=insecure), meters
