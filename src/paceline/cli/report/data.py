"""What a report is made of, read from a run directory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.report.guard import Fired, fired_rules, is_routine
from paceline.cli.report.summary import read_lines

Row = Mapping[str, Any]

# From the bottom of the stack up.
PHASES = (
    "gen",
    "reward",
    "fetch",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
)
_ROUTINE = {"phase", "dispatch", "commit", "trajectory", "refill"}
_MAX_EVENTS = 80
_ADMITTED = "admitted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event of note. `at_s` counts from the journal's first line."""

    at_s: float
    name: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Some trajectories of one step, best first."""

    title: str
    rows: Sequence[Row]
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """All of it. `metrics` are the lines of metrics.jsonl, by step."""

    name: str
    metrics: Sequence[Row]
    events: Sequence[Event]
    fired: Sequence[Fired]
    num_events_left_out: int
    verdicts: Mapping[str, int]
    samples: Sequence[Samples]
    config_text: str

    def points(self, name: str, *, from_step: int = 0) -> list[tuple[float, float]]:
        """(step, value) of a metric, where it was measured."""
        return [
            (float(line["step"]), float(line[name]))
            for line in self.metrics
            if isinstance(line.get(name), int | float) and line["step"] >= from_step
        ]


def read_run(run_dir: Path) -> RunData:
    """Reads a run that has ended or is under way; what is not there is left out."""
    metrics = [line for line in read_lines(run_dir / "metrics.jsonl") if isinstance(line.get("step"), int)]
    journal = read_lines(run_dir / "events.jsonl")
    events = _events(journal)
    config = run_dir / "config.resolved.yaml"
    return RunData(
        name=run_dir.name,
        metrics=metrics,
        events=events[:_MAX_EVENTS],
        fired=fired_rules(journal),
        num_events_left_out=max(0, len(events) - _MAX_EVENTS),
        verdicts=_verdicts(journal),
        samples=_samples(run_dir / "trajectories"),
        config_text=_without_secrets(config.read_text(encoding="utf-8")) if config.is_file() else "",
    )


def phase_seconds(data: RunData) -> tuple[list[float], dict[str, list[float]]]:
    """Steps, and per phase its seconds in each; what no phase claims is "other"."""
    lines = [line for line in data.metrics if isinstance(line.get("timing_s/step"), int | float)]
    names = [name for name in PHASES if any(line.get(f"timing_s/{name}") for line in lines)]
    layers: dict[str, list[float]] = {
        name: [float(line.get(f"timing_s/{name}") or 0.0) for line in lines] for name in names
    }
    totals = [float(line["timing_s/step"]) for line in lines]
    claimed = [sum(values[i] for values in layers.values()) for i in range(len(lines))]
    layers["other"] = [max(0.0, total - known) for total, known in zip(totals, claimed, strict=True)]
    return [float(line["step"]) for line in lines], layers


def _events(journal: Sequence[Row]) -> list[Event]:
    began = next((float(e["time"]) for e in journal if isinstance(e.get("time"), int | float)), 0.0)
    found = []
    for event in journal:
        name = str(event.get("event", ""))
        if (
            not name
            or name in _ROUTINE
            or is_routine(event)
            or str(event.get("what", "")).startswith("state:")
        ):
            continue
        details = {k: v for k, v in event.items() if k not in ("n", "time", "event") and v not in (None, "")}
        text = ", ".join(f"{key} {_word(value)}" for key, value in details.items())
        at = event.get("time")
        found.append(
            Event(at_s=float(at) - began if isinstance(at, int | float) else 0.0, name=name, text=text)
        )
    return found


def _word(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _verdicts(journal: Sequence[Row]) -> dict[str, int]:
    return dict(Counter(str(e.get("verdict")) for e in journal if e.get("event") == "trajectory"))


def _samples(folder: Path) -> list[Samples]:
    """Of the first, the middle and the last step, and of the last validation: best, middle and worst."""
    train = sorted(folder.glob("step_*.parquet"))
    chosen = dict.fromkeys([*train[:1], *train[len(train) // 2 :][:1], *train[-1:]])
    files = [(f"Training, step {_step(path)}", path) for path in chosen]
    files += [
        (f"Validation after step {_step(path)}", path) for path in sorted(folder.glob("val_*.parquet"))[-1:]
    ]
    if not files:
        return []
    try:
        import pyarrow.parquet
    except ImportError:
        return []
    samples = []
    for title, path in files:
        rows = pyarrow.parquet.read_table(path).to_pylist()
        if rows:
            samples.append(Samples(title=title, rows=_spread(rows), num_rows=len(rows)))
    return samples


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most six rows from the highest to the lowest reward, evenly apart, of different prompts where possible."""
    ranked = sorted(
        rows,
        key=lambda row: (-(row.get("reward") or 0.0), row.get("prompt_id", 0), row.get("sample_index", 0)),
    )
    places = sorted({round(i * (len(ranked) - 1) / 5) for i in range(6)})
    return [ranked[place] for place in places]


def _step(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _without_secrets(text: str) -> str:
    lines = []
    for line in text.splitlines():
        head, at, tail = line.rpartition("@")
        scheme, slashes, _ = head.partition("://")
        lines.append(f"{scheme}://***@{tail}" if at and slashes else line)
    return "\n".join(lines)
