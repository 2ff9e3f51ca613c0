"""A collector of OTLP over gRPC: keeps the spans and metrics that it gets, or never answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, kw_only=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]


@dataclass
class Collector:
    """What has come in. `hangs`: calls are taken and never answered."""

    hangs: bool = False
    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)
    called: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)

    def take_call(self) -> None:
        self.called.set()
        if self.hangs:
            self.closing.wait(120)


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self._collector.take_call()
        for resource in request.resource_spans:
            of = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self._collector.spans += [
                    ReceivedSpan(
                        service=of["service.name"],
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        attributes={item.key: _value(item.value) for item in span.attributes},
                    )
                    for span in scope.spans
                ]
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self._collector.take_call()
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self._collector.metrics |= {metric.name for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextlib.contextmanager
def collector(*, hangs: bool = False, host: str = "127.0.0.1") -> Iterator[Collector]:
    """Runs a collector on a free port."""
    kept = Collector(hangs=hangs)
    server = grpc.server(ThreadPoolExecutor(8))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(kept), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(kept), server)
    kept.endpoint = f"http://{host}:{server.add_insecure_port(f'{host}:0')}"
    server.start()
    try:
        yield kept
    finally:
        kept.closing.set()
        server.stop(0).wait(60)


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
