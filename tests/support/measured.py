"""Metrics of this process for a test: what is recorded, without an endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.service.observability import telemetry
from paceline.service.observability.metrics import Metric
from paceline.service.observability.telemetry import Telemetry

Read = Callable[[Metric], dict[str, float]]


@contextlib.contextmanager
def measured() -> Iterator[Read]:
    """Yields a function that reads a metric now: values by their labels' values, joined by spaces."""
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)

    def read(metric: Metric) -> dict[str, float]:
        data = reader.get_metrics_data()
        return {
            " ".join(str(value) for _, value in sorted(point.attributes.items())): point.value
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for entry in scope.metrics
            if entry.name == metric.name.removesuffix("_total")
            for point in entry.data.data_points
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "_current", Telemetry(trace.NoOpTracer(), [], meters.get_meter("test")))
        yield read
    meters.shutdown()
