"""Spans: one trace over processes, lines that several processes share, and no side effects before setup."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import EnvironmentLackError
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.rpc.v1 import controller_pb2_grpc
from paceline.service.grpc import channels
from paceline.service.grpc.server import start_server
from paceline.service.observability import telemetry
from paceline.service.observability.spans import SpanFileExporter
from paceline.show.report.timeline import read_spans


@pytest.fixture
def spans_file(tmp_path: Path) -> Iterator[Path]:
    telemetry.setup("controller", run_dir=tmp_path, instance="controller")
    yield tmp_path / "spans.jsonl"
    telemetry.shutdown()


def read(path: Path) -> dict[str, dict[str, Any]]:
    telemetry.shutdown()
    return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_nesting_attributes_and_errors(spans_file: Path) -> None:
    with (
        telemetry.span("step", attributes={"paceline.step": 3}),
        pytest.raises(ValueError, match="bad"),
        telemetry.span("learn"),
    ):
        raise ValueError("bad")
    spans = read(spans_file)
    assert spans["learn"]["parent_id"] == spans["step"]["span_id"]
    assert spans["learn"]["trace_id"] == spans["step"]["trace_id"]
    assert spans["step"]["attributes"] == {"paceline.step": 3}
    assert spans["step"]["service"] == "paceline.controller"
    assert spans["learn"]["error"] == "ValueError: bad"
    assert "error" not in spans["step"]
    assert 0 <= spans["learn"]["duration_s"] <= spans["step"]["duration_s"]


def test_a_traceparent_joins_what_a_stream_has_separated(spans_file: Path) -> None:
    with telemetry.span("dispatch"):
        carried = telemetry.current_traceparent()
    assert telemetry.current_traceparent() == ""
    with telemetry.span("generate", traceparent=carried):
        pass
    with telemetry.span("alone"):
        pass
    spans = read(spans_file)
    assert spans["generate"]["parent_id"] == spans["dispatch"]["span_id"] == carried.split("-")[2]
    assert spans["alone"]["parent_id"] == ""
    assert spans["alone"]["trace_id"] != spans["dispatch"]["trace_id"]


class Answering(controller_pb2_grpc.ControllerServiceServicer):
    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        with telemetry.span("inside"):
            return pb.LeaveResponse()


async def test_grpc_metadata_joins_caller_and_server(spans_file: Path) -> None:
    server = await start_server(controller_pb2_grpc.add_ControllerServiceServicer_to_server, Answering())
    channel = channels.connect(server.address)
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    request = pb.LeaveRequest()
    with telemetry.span("call"):
        await channels.call(stub.Leave, request, timeout_s=5, phase="LEAVE", peer="controller")
    # A heartbeat and its like belong to no trace, and make none.
    await channels.call(stub.Leave, request, timeout_s=5, phase="LEAVE", peer="controller")
    await channel.close()
    await server.stop(0)
    lines = [json.loads(line)["name"] for line in _lines(spans_file)]
    spans = read(spans_file)
    served = spans["paceline.rpc.v1.ControllerService/Leave"]
    assert served["parent_id"] == spans["call"]["span_id"]
    assert {spans[name]["trace_id"] for name in spans if name != "inside"} == {spans["call"]["trace_id"]}
    assert lines.count("paceline.rpc.v1.ControllerService/Leave") == 1


def test_before_setup_context_passes_through_and_nothing_is_recorded(tmp_path: Path) -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with telemetry.span("anything", traceparent=parent):
        assert telemetry.current_traceparent() == parent
    telemetry.record("perf/tokens_per_s", 3.0)
    assert list(tmp_path.iterdir()) == []


def test_ids_leave_the_seeded_generator_alone(spans_file: Path) -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    with telemetry.span("a"), telemetry.span("b"):
        pass
    assert random.random() == expected


def test_processes_share_a_file_without_tearing_lines(tmp_path: Path) -> None:
    program = (
        "import sys; from paceline.service.observability import telemetry as t\n"
        f"t.setup('x', run_dir={str(tmp_path)!r}, instance=sys.argv[1])\n"
        "for i in range(300):\n"
        "    with t.span(sys.argv[1], attributes={'long': 'y' * 9000, 'i': i}): pass\n"
        "t.shutdown()"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, name]) for name in ("one", "two")]
    assert [process.wait(120) for process in running] == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    for name in ("one", "two"):
        assert [line["attributes"]["i"] for line in lines if line["name"] == name] == list(range(300))


def test_an_endpoint_without_the_exporter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(EnvironmentLackError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        telemetry.setup("x", run_dir=None, otlp_endpoint="http://127.0.0.1:4317")


def _lines(path: Path) -> list[str]:
    telemetry.shutdown()
    return path.read_text().splitlines()


def test_spans_of_several_processes_are_bounded_and_only_the_oldest_are_lost(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    path = tmp_path / "spans.jsonl"
    tracers = []
    for _ in range(2):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(SpanFileExporter(path, max_bytes=4000)))
        tracers.append(provider.get_tracer("test"))
    sizes = []
    for number in range(200):
        with tracers[number % 2].start_as_current_span(f"span {number}"):
            pass
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert max(sizes) < 2 * 4000 + 2 * 400
    kept = [json.loads(line)["name"] for line in read_spans(path)]
    assert kept == [f"span {number}" for number in range(200 - len(kept), 200)]
    assert len(kept) > 10
    assert sorted(file.name for file in tmp_path.iterdir()) == ["spans.jsonl", "spans.jsonl.1"]


def test_a_full_file_that_has_no_successor_is_written_on(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    folder, moved = tmp_path / "run", tmp_path / "moved"
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = SpanFileExporter(folder / "spans.jsonl", max_bytes=1)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("first"):
        pass
    folder.rename(moved)
    with tracer.start_as_current_span("lost"):
        pass
    # What opens next must not get the number of the spans' file.
    with (tmp_path / "other").open("w"), tracer.start_as_current_span("lost, too"):
        pass
    assert (tmp_path / "other").read_text() == ""
    moved.rename(folder)
    with tracer.start_as_current_span("last"):
        pass
    assert [json.loads(line)["name"] for line in read_spans(folder / "spans.jsonl")] == ["first", "last"]
