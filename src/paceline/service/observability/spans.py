"""Writes spans as lines of JSON to a file to which all processes of a run append."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

MAX_BYTES = 128 * 2**20
"""The largest size of a span file; a run has at most two."""


class SystemIdGenerator(IdGenerator):
    """Draws ids from the system: the default draws from `random` and would disturb a seeded generator."""

    def generate_span_id(self) -> int:
        """Returns 64 random bits, never 0."""
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        """Returns 128 random bits, never 0."""
        return int.from_bytes(os.urandom(16), "big") or 1


class SpanFileExporter(SpanExporter):
    """Appends one JSON object per span, each in a single write, so that lines of processes do not mix.

    A full file replaces the previous full one, so that the two take at most about 2 * `max_bytes`.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._max_bytes = path, max_bytes
        self._file = self._open()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes the spans; a full disk loses spans but does not end the run."""
        try:
            for span in spans:
                self._rotate()
                os.write(self._file, json.dumps(_describe(span)).encode() + b"\n")
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the file of the spans."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _rotate(self) -> None:
        """Opens a new file if this one is full; one process renames the full one, under its lock."""
        if os.fstat(self._file).st_size < self._max_bytes:
            return
        full = self._file
        fcntl.flock(full, fcntl.LOCK_EX)
        try:
            if self._path.exists() and os.path.samestat(os.fstat(full), self._path.stat()):
                self._path.rename(earlier(self._path))
            self._file = self._open()
        finally:
            fcntl.flock(full, fcntl.LOCK_UN)
        os.close(full)  # last: a closed descriptor's number may be reused at once


def earlier(path: Path) -> Path:
    """Returns the path of the previous file of spans."""
    return path.with_name(f"{path.name}.1")


def _describe(span: ReadableSpan) -> dict[str, object]:
    context = span.get_span_context()
    start, end = span.start_time or 0, span.end_time or 0
    line: dict[str, object] = {
        "service": span.resource.attributes.get("service.name", ""),
        "instance": span.resource.attributes.get("service.instance.id", ""),
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}" if context else "",
        "span_id": f"{context.span_id:016x}" if context else "",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "start_s": start / 1e9,
        "duration_s": (end - start) / 1e9,
        "attributes": dict(span.attributes or {}),
    }
    if not span.status.is_ok and span.status.description:
        line["error"] = span.status.description
    return line
