"""Joins the profiles of a run's steps with the services' spans into one file for Perfetto.

Both use the clock of their host, so events of several hosts are shifted by the difference of their clocks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.show.report.timeline import spans

FILE_NAME = "trace.json.gz"
_PROFILES = "step_*.json.gz"

Event = dict[str, Any]


def write_trace(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the file and returns its path; RUN_DIR/profile/trace.json.gz unless `out` says otherwise.

    Raises:
        DataError: the run has no profiles, or one cannot be read.
    """
    folder = run_dir / "profile"
    profiles = sorted(folder.glob(_PROFILES))
    if not profiles:
        raise DataError(
            f"{folder} holds no profiles; name the steps to record in trainer.profile.steps before the run"
        )
    events: list[Event] = []
    for number, path in enumerate(profiles):
        events += _of_profile(path, first_pid=1000 * (number + 1))
    begin, end = _window(events)
    events += _of_spans(run_dir / "spans.jsonl", begin, end)
    for event in events:
        if "ts" in event:
            event["ts"] -= begin
    path = out or folder / FILE_NAME
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)
    return path


def _of_profile(path: Path, *, first_pid: int) -> Iterator[Event]:
    """Yields the file's events, in microseconds of the host's clock, in separate processes."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            tree = json.load(file)
        base, events = int(tree.get("baseTimeNanoseconds", 0)) / 1e3, tree["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a profile ({type(error).__name__}: {error}); delete it") from error
    name = path.name.removesuffix(".json.gz")
    pids: dict[Any, int] = {}
    for event in events:
        pid = pids.setdefault(event.get("pid"), first_pid + len(pids))
        moved = {**event, "pid": pid}
        if "ts" in event:
            moved["ts"] = base + float(event["ts"])
        if "id" in event:
            moved["id"] = f"{name}/{event['id']}"
        if event.get("name") in ("process_name", "process_labels"):
            moved["args"] = {key: f"{name} {value}" for key, value in event.get("args", {}).items()}
        yield moved


def _window(events: Iterable[Event]) -> tuple[float, float]:
    """Returns the begin and end of all events with a duration, in microseconds."""
    timed = [event for event in events if event.get("ph") == "X"]
    if not timed:
        raise DataError("the profiles hold no events; delete them")
    return min(event["ts"] for event in timed), max(event["ts"] + event.get("dur", 0) for event in timed)


def _of_spans(path: Path, begin: float, end: float) -> Iterator[Event]:
    """Yields the spans that overlap the window, a process per service instance and a thread per trace."""
    pids: dict[tuple[str, str], int] = {}
    threads: dict[tuple[int, str], int] = {}
    for span in spans(path):
        start, duration = 1e6 * span["start_s"], 1e6 * span["duration_s"]
        if start > end or start + duration < begin:
            continue
        who = (str(span.get("service", "")), str(span.get("instance", "")))
        if who not in pids:
            pids[who] = len(pids) + 1
            yield {"ph": "M", "name": "process_name", "pid": pids[who], "args": {"name": " ".join(who)}}
        pid = pids[who]
        thread = threads.setdefault((pid, str(span.get("trace_id", ""))), len(threads) + 1)
        yield {
            "ph": "X",
            "name": span["name"],
            "cat": "span",
            "pid": pid,
            "tid": thread,
            "ts": start,
            "dur": duration,
            "args": span.get("attributes", {}),
        }
