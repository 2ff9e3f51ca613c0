"""Reads what a report shows from a run directory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.broker.address import redact
from paceline.cli.metrics import PHASES, STEP_SECONDS, charts
from paceline.cli.report.guard import FiredRule, fired_rules, is_routine
from paceline.service import process_ends
from paceline.service.process_ends import ProcessEnd

Row = Mapping[str, Any]

_ROUTINE = {"phase", "dispatch", "commit", "trajectory", "refill"}
_MAX_EVENTS = 80


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
    """A run's numbers, events and samples.

    Attributes:
        facts: what is trained how, and how the run ended, in a few words each.
        metrics: the lines of metrics.jsonl, by step.
    """

    name: str
    facts: Sequence[str]
    metrics: Sequence[Row]
    events: Sequence[Event]
    fired: Sequence[FiredRule]
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
    """Reads a run that has ended or is under way; a file that is missing counts as empty."""
    metrics = [line for line in read_jsonl(run_dir / "metrics.jsonl") if isinstance(line.get("step"), int)]
    journal = read_jsonl(run_dir / "events.jsonl")
    events = _events(journal, list(process_ends.read(run_dir)))
    config = run_dir / "config.resolved.yaml"
    return RunData(
        name=run_dir.name,
        facts=_facts(config, journal),
        metrics=metrics,
        events=events[:_MAX_EVENTS],
        fired=fired_rules(journal),
        num_events_left_out=max(0, len(events) - _MAX_EVENTS),
        verdicts=_verdicts(journal),
        samples=_samples(run_dir / "trajectories"),
        config_text=redact(config.read_text(encoding="utf-8")) if config.is_file() else "",
    )


def _facts(config: Path, journal: Sequence[Row]) -> list[str]:
    tree = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    model, algorithm, learner, rollout = (
        tree.get(name) or {} for name in ("model", "algorithm", "learner", "rollout")
    )
    facts = [
        model.get("path"),
        algorithm.get("adv_estimator"),
        f"learner ranks: {learner['world_size']}" if "world_size" in learner else None,
        f"rollout servers: {rollout['replicas']}" if "replicas" in rollout else None,
    ]
    last = next((e for e in reversed(journal) if e.get("event") in ("run", "end")), {})
    if last.get("event") == "end":
        facts.append(str(last.get("message", "ended")))
    return [str(fact) for fact in facts if fact]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, [] if it is missing; skips a last line that was cut off in writing."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def phase_seconds(data: RunData) -> tuple[list[float], dict[str, list[float]]]:
    """Steps, and the seconds of each phase in each step; what no phase claims is "other"."""
    lines = [line for line in data.metrics if isinstance(line.get(STEP_SECONDS), int | float)]
    layers: dict[str, list[float]] = {
        metric.label: [float(line.get(metric.name) or 0.0) for line in lines]
        for metric in charts()[PHASES]
        if any(line.get(metric.name) for line in lines)
    }
    totals = [float(line[STEP_SECONDS]) for line in lines]
    claimed = [sum(values[i] for values in layers.values()) for i in range(len(lines))]
    layers["other"] = [max(0.0, total - known) for total, known in zip(totals, claimed, strict=True)]
    return [float(line["step"]) for line in lines], layers


def _events(journal: Sequence[Row], ends: Sequence[ProcessEnd]) -> list[Event]:
    began = next((float(e["time"]) for e in journal if isinstance(e.get("time"), int | float)), 0.0)
    events = []
    for entry in journal:
        if not _is_of_note(entry):
            continue
        details = {k: v for k, v in entry.items() if k not in ("n", "time", "event") and v not in (None, "")}
        text = ", ".join(f"{key} {_word(value)}" for key, value in details.items())
        time = entry.get("time")
        at_s = float(time) - began if isinstance(time, int | float) else 0.0
        events.append(Event(at_s=at_s, name=str(entry["event"]), text=text))
    events += [Event(at_s=end.time - began, name="process", text=str(end)) for end in ends]
    return sorted(events, key=lambda event: event.at_s)


def _is_of_note(entry: Row) -> bool:
    name = str(entry.get("event", ""))
    is_state = str(entry.get("what", "")).startswith("state:")
    return bool(name) and name not in _ROUTINE and not is_state and not is_routine(entry)


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
    """At most six rows from the highest to the lowest reward, evenly apart."""
    ranked = sorted(
        rows,
        key=lambda row: (-(row.get("reward") or 0.0), row.get("prompt_id", 0), row.get("sample_index", 0)),
    )
    places = sorted({round(i * (len(ranked) - 1) / 5) for i in range(6)})
    return [ranked[place] for place in places]


def _step(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])
