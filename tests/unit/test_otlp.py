"""OTLP: a collector gets spans and metrics; one that is away or hangs costs neither time nor the run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from paceline.service.observability import metrics, telemetry
from paceline.service.observability.otlp import CollectorSpanExporter
from paceline.sizing.machine import free_port
from support.otlp_collector import collector


def test_a_collector_gets_spans_and_metrics_under_the_names_of_the_catalogue() -> None:
    with collector() as kept:
        telemetry.setup("reward", run_dir=None, otlp_endpoint=kept.endpoint, instance="reward-0")
        with telemetry.span("step", attributes={"paceline.step": 3}), telemetry.span("learn"):
            telemetry.record(metrics.PUSH_SECONDS, 1.0)
            telemetry.count(metrics.REFUSALS, reason="deadline")
        telemetry.shutdown()
    learn, step = sorted(kept.spans, key=lambda span: span.name)
    assert (learn.parent_id, learn.trace_id) == (step.span_id, step.trace_id)
    assert (step.service, step.attributes) == ("paceline.reward", {"paceline.step": 3})
    assert {"paceline_push_seconds", "paceline_refusals", "paceline_process_open_files"} <= kept.metrics


def test_a_collector_that_never_answers_costs_no_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_CLOSE_S", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "300")
    with collector(hangs=True) as kept:
        telemetry.setup("learner", run_dir=None, otlp_endpoint=kept.endpoint)
        with telemetry.span("first"):
            pass
        assert kept.called.wait(120), "nothing was sent"
        began = time.monotonic()
        # More than its queue holds, while the one before hangs.
        for _ in range(3000):
            with telemetry.span("more"):
                telemetry.record(metrics.PUSH_SECONDS, 1.0)
        spent_s = time.monotonic() - began
        began = time.monotonic()
        telemetry.shutdown()
        assert time.monotonic() - began < 200
    assert spent_s < 200, "spans wait for the collector"
    assert "the last spans and metrics are lost" in caplog.text


def test_a_process_ends_though_its_collector_hangs() -> None:
    program = (
        "import sys; from paceline.service.observability import telemetry as t\n"
        "t.setup('x', run_dir=None, otlp_endpoint=sys.argv[1])\n"
        "with t.span('a'): pass\n"
        "t.shutdown()"
    )
    with collector(hangs=True) as kept:
        patient = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "300"}
        subprocess.run([sys.executable, "-c", program, kept.endpoint], check=True, timeout=120, env=patient)


def test_a_collector_that_is_away_is_named_once_and_not_as_an_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(telemetry, "_CLOSE_S", 0.5)
    port = free_port()
    telemetry.setup("learner", run_dir=None, otlp_endpoint=f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 120
    while "takes nothing" not in caplog.text and time.monotonic() < deadline:
        with telemetry.span("lost"):
            time.sleep(0.05)
    telemetry.shutdown()
    assert caplog.text.count(f"the collector at http://127.0.0.1:{port} takes nothing") == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_collector_that_comes_back_is_named(caplog: pytest.LogCaptureFixture) -> None:
    results = iter([False, False, True, True, False])

    class Sometimes(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS if next(results) else SpanExportResult.FAILURE

    exporter = CollectorSpanExporter(Sometimes(), "c")
    for _ in range(5):
        exporter.export([])
    said = [record.getMessage().split()[5] for record in caplog.records]
    assert said == ["nothing:", "spans", "nothing:"]
