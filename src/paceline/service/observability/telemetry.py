"""Records OpenTelemetry traces and metrics of a process.

    spans   -> the OTLP endpoint if configured, else a file of the run
    metrics -> the OTLP endpoint, the process's own Prometheus endpoint, or both, if configured

Nothing happens at import, and no global provider is set: `setup` starts the process's telemetry. Before
`setup` spans are not recorded, but trace context passes through. Nothing here waits for a collector; data
that it does not take is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline.service.observability import metrics
from paceline.service.observability.metrics import Metric, MetricKind, Observer

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

AttributeValue = str | bool | int | float
_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"
# The longest wait at the end of a process for a collector to take the last spans and metrics.
_CLOSE_S = 2.0


class Telemetry:
    """Holds a process's tracer and metrics; without a meter, metrics are not recorded."""

    def __init__(self, tracer: trace.Tracer, closers: list[Any], meter: Meter | None) -> None:
        self.tracer = tracer
        self.meter = meter
        self._closers = closers
        self._instruments: dict[str, Any] = {}
        self._lock = Lock()

    def observe(self, metric: Metric, observer: Observer) -> None:
        """Registers a callback that is called whenever the metrics are read."""
        if self.meter is None:
            return

        def call(_: CallbackOptions) -> Iterable[Observation]:
            from opentelemetry.metrics import Observation

            return [Observation(value, dict(labels)) for value, labels in observer()]

        is_counter = metric.kind is MetricKind.COUNTER
        create = self.meter.create_observable_counter if is_counter else self.meter.create_observable_gauge
        create(_name(metric), [call], description=metric.help)

    def close(self) -> None:
        """Sends buffered spans and metrics, for at most two seconds, and ends."""
        deadline = time.monotonic() + _CLOSE_S
        ending = [Thread(target=closer.shutdown, daemon=True) for closer in self._closers]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in ending):
            log.warning("the collector does not answer: the last spans and metrics are lost")

    def instrument(self, metric: Metric) -> Any:
        """Returns the gauge or counter of a metric; None if metrics are not recorded."""
        if self.meter is None:
            return None
        with self._lock:
            if metric.name not in self._instruments:
                is_counter = metric.kind is MetricKind.COUNTER
                create = self.meter.create_counter if is_counter else self.meter.create_gauge
                self._instruments[metric.name] = create(_name(metric), description=metric.help)
            return self._instruments[metric.name]


def _name(metric: Metric) -> str:
    """Returns the instrument's name, without _total: the exporters add it to counters."""
    return metric.name.removesuffix("_total") if metric.kind is MetricKind.COUNTER else metric.name


_current = Telemetry(trace.NoOpTracer(), [], None)


def setup(
    service_name: str,
    *,
    run_dir: str | Path | None,
    otlp_endpoint: str | None = None,
    prometheus_port: int = 0,
    local_rank: int = 0,
    instance: str = "",
    uses_gpus: bool = False,
) -> None:
    """Starts the process's telemetry; a second call replaces the first.

    Args:
        service_name: "controller", "rollout", ...
        run_dir: without an OTLP endpoint, spans go to RUN_DIR/spans.jsonl; None: they are dropped.
        otlp_endpoint: OTLP/gRPC endpoint for spans and metrics.
        prometheus_port: port of the process's Prometheus endpoint, unless the environment names one; 0: none.
        local_rank: added to the port for learner ranks that share a machine and an environment.
        uses_gpus: whether this service exports the metrics of the visible GPUs.

    Raises:
        EnvironmentLackError: an endpoint is configured but its exporter is not installed.
        ConfigError: the environment names an invalid port.
    """
    from opentelemetry.sdk.resources import Resource

    from paceline.service.observability.gpu_metrics import observe_gpus
    from paceline.service.observability.process_metrics import observe_process
    from paceline.service.observability.prometheus import open_endpoint
    from paceline.service.observability.spans import SpanFileExporter

    global _current
    shutdown()
    resource = Resource({"service.name": f"paceline.{service_name}", "service.instance.id": instance})
    spans: SpanExporter | None = None
    readers: list[MetricReader] = []
    closers: list[Any] = []
    if otlp_endpoint:
        from paceline.service.observability.otlp import exporters

        spans, reader = exporters(otlp_endpoint)
        readers.append(reader)
    elif run_dir is not None:
        spans = SpanFileExporter(Path(run_dir) / "spans.jsonl")
    endpoint = open_endpoint(prometheus_port, local_rank)
    if endpoint is not None:
        readers.append(endpoint.reader)
        closers.append(endpoint)
    tracer = _open_tracer(resource, spans, closers)
    _current = Telemetry(tracer, closers, _open_meter(resource, readers, closers) if readers else None)
    observe_process(_current.observe)
    if uses_gpus:
        observe_gpus(_current.observe)


def _open_tracer(resource: Resource, spans: SpanExporter | None, closers: list[Any]) -> trace.Tracer:
    """Returns a tracer; adds to `closers` what must be shut down at the end."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from paceline.service.observability.spans import SystemIdGenerator

    provider = TracerProvider(resource=resource, id_generator=SystemIdGenerator(), shutdown_on_exit=False)
    if spans is not None:
        provider.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=1000))
    closers.append(provider)
    return provider.get_tracer("paceline")


def _open_meter(resource: Resource, readers: Sequence[MetricReader], closers: list[Any]) -> Meter:
    """Returns a meter for the readers; adds to `closers` what must be shut down at the end."""
    from opentelemetry.sdk.metrics import MeterProvider

    meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    closers.append(meters)
    return meters.get_meter("paceline")


def shutdown() -> None:
    """Flushes and ends the process's telemetry, if any."""
    global _current
    _current.close()
    _current = Telemetry(trace.NoOpTracer(), [], None)


@contextmanager
def span(
    name: str, *, traceparent: str | None = None, attributes: Mapping[str, AttributeValue] | None = None
) -> Iterator[trace.Span]:
    """Opens a span around a block; its parent is `traceparent` (W3C) if given, else the open span.

    An exception that leaves the block is recorded on the span.
    """
    parent = _PROPAGATOR.extract({_TRACEPARENT: traceparent}) if traceparent else None
    with _current.tracer.start_as_current_span(
        name, context=parent, attributes=dict(attributes or {})
    ) as opened:
        yield opened


def current_traceparent() -> str:
    """Returns the open span as W3C traceparent, to pass on with the work; "" without an open span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get(_TRACEPARENT, "")


def is_measuring() -> bool:
    """Returns whether metrics are recorded."""
    return _current.meter is not None


def record(metric: Metric, value: float, **labels: str) -> None:
    """Sets a gauge of this process to a value."""
    if (gauge := _current.instrument(metric)) is not None:
        gauge.set(value, labels)


def count(metric: Metric, amount: float = 1, **labels: str) -> None:
    """Adds an amount to a counter of this process."""
    if (counter := _current.instrument(metric)) is not None:
        counter.add(amount, labels)


def observe(metric: Metric, observer: Observer) -> None:
    """Registers a callback that is called whenever the metrics are read; call it after `setup`."""
    _current.observe(metric, observer)


def record_training(step: int, values: Mapping[str, float]) -> None:
    """Sets the metrics of a finished step, then its number."""
    if not is_measuring():
        return
    for name, value in values.items():
        record(metrics.training(name), value)
    record(metrics.TRAINING_STEP, step)
