"""Profiles and spans as one file: processes apart, one clock, only what overlaps the recorded steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.core.errors import DataError
from paceline.show.report.trace import write_trace

BASE_NS = 1_700_000_000_000_000_000


def profile(folder: Path, name: str, *events: dict[str, Any]) -> None:
    (folder / "profile").mkdir(exist_ok=True)
    with gzip.open(folder / "profile" / name, "wt") as file:
        json.dump({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}, file)


def span(name: str, start_s: float, duration_s: float, instance: str = "controller") -> str:
    place = {"service": "controller", "instance": instance, "trace_id": "a"}
    return json.dumps({"name": name, "start_s": start_s, "duration_s": duration_s, **place, "attributes": {}})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    label = {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}
    for rank in (0, 1):
        profile(
            tmp_path,
            f"step_000003.learner-{rank}.json.gz",
            label,
            {"ph": "X", "name": "mm", "pid": 7, "tid": 1, "ts": 1e6 + rank, "dur": 2e6},
            {"ph": "s", "name": "ac2g", "id": 5, "pid": 7, "tid": 1, "ts": 1e6},
        )
    begin = BASE_NS / 1e9
    lines = [span("step 2", begin - 5, 1), span("step 3", begin, 4), span("push", begin + 2, 9, "rollout-0")]
    (tmp_path / "spans.jsonl").write_text("\n".join([*lines, '{"name": "torn']))
    return tmp_path


def test_profiles_and_spans_have_one_clock_and_processes_of_their_own(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(run_dir)]) == 0
    path = run_dir / "profile" / "trace.json.gz"
    assert str(path) in capsys.readouterr().out
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    timed = {(e["name"], e["pid"]): (round(e["ts"]), e["dur"]) for e in events if e["ph"] == "X"}
    # Microseconds after the first kernel, which began a second after the profiler's base.
    assert timed == {
        ("mm", 1000): (0, 2e6),
        ("mm", 2000): (1, 2e6),
        ("step 3", 1): (-1_000_000, 4e6),
        ("push", 2): (1_000_000, 9e6),
    }
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        1: "controller controller",
        2: "controller rollout-0",
        1000: "step_000003.learner-0 python",
        2000: "step_000003.learner-1 python",
    }
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2
    # Writing it again does not take the file itself for a profile.
    assert write_trace(run_dir) == path


def test_a_run_without_profiles_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"name the steps to record in trainer\.profile\.steps"):
        write_trace(tmp_path)
    profile(tmp_path, "step_000001.learner-0.json.gz")
    with pytest.raises(DataError, match="no events"):
        write_trace(tmp_path)
    (tmp_path / "profile" / "step_000001.learner-0.json.gz").write_bytes(b"torn")
    with pytest.raises(DataError, match="is not a profile"):
        write_trace(tmp_path)
