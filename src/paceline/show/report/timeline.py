"""The spans of single steps, from spans.jsonl: who did what when."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.service.observability.spans import earlier

_STEP = "paceline.step"
_MAX_SPANS = 2000

Span = Mapping[str, Any]


def timelines(path: Path, steps: Collection[int]) -> dict[int, list[dict[str, Any]]]:
    """Returns the spans of the steps for JSON, with times in seconds since the step began; {} without spans.

    If a step was repeated, its last execution counts. A span is written when it ends, so a step appears once
    it is over.
    """
    trace_of = dict(_traces(path, steps))
    wanted = {span["trace_id"]: step for step, span in trace_of.items()}
    by_step: dict[int, list[dict[str, Any]]] = {step: [] for step in trace_of}
    for span in spans(path, wanted):
        step = wanted.get(str(span.get("trace_id")))
        if step is not None and len(by_step[step]) < _MAX_SPANS:
            by_step[step].append(_described(span, float(trace_of[step]["start_s"])))
    return {step: sorted(spans, key=lambda s: (s["start"], -s["seconds"])) for step, spans in by_step.items()}


def _traces(path: Path, steps: Collection[int]) -> Iterator[tuple[int, Span]]:
    """Yields each step with the root span of its trace."""
    for span in spans(path, ['"name": "step"']):
        step = span.get("attributes", {}).get(_STEP)
        if span.get("name") == "step" and step in steps:
            yield step, span


def spans(path: Path, parts: Collection[str] = ("",)) -> Iterator[Span]:
    """Yields the spans whose lines hold one of `parts`; parsing every line of a long run takes seconds."""
    needles = [part.encode() for part in parts]
    for line in read_spans(path) if needles else ():
        if any(needle in line for needle in needles):
            try:
                yield json.loads(line)
            except ValueError:
                continue  # an incomplete line of a killed process


def read_spans(path: Path) -> Iterator[bytes]:
    """Yields the lines of both files of spans, in their order."""
    for part in (earlier(path), path):
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            yield from file


def _described(span: Span, began: float) -> dict[str, Any]:
    attributes = {
        str(name).removeprefix("paceline."): value
        for name, value in span.get("attributes", {}).items()
        if not str(name).startswith("rpc.")
    }
    return {
        "who": str(span.get("instance", "")),
        "name": str(span.get("name", "")).rpartition("/")[2],
        "start": round(float(span["start_s"]) - began, 6),
        "seconds": round(float(span["duration_s"]), 6),
        "about": ", ".join(f"{name} {value}" for name, value in attributes.items()),
        "error": str(span.get("error", "")),
    }
