"""The records of `paceline chaos`: a line per fault, the table at the end, and both as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from paceline.chaos.faults import Fault

FILE = "chaos.jsonl"
SUMMARY = "chaos.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRecovery:
    """A fault and how the run recovered from it.

    Attributes:
        time: Unix time of the fault.
        step, phase: where the run was.
        alone: whether the run had recovered from all earlier faults, and no later fault came before the
            recovery.
        step_s: seconds from the fault until, after the fault's end, the run finished a step that it had not
            finished before; None: never.
        ready_s: seconds until the members that the fault hit worked again; None: never.
    """

    number: int
    time: float
    fault: Fault
    step: int
    phase: str
    alone: bool
    step_s: float | None
    ready_s: float | None

    @property
    def recovery_s(self) -> float | None:
        """Seconds until the run was going on with all its members; None for a hang."""
        if self.step_s is None or self.ready_s is None:
            return None
        return max(self.step_s, self.ready_s)

    def to_json(self) -> str:
        """Returns the fault and its recovery as a line of chaos.jsonl."""
        return json.dumps(
            {
                "n": self.number,
                "time": round(self.time, 3),
                "fault": self.fault.kind.value,
                "target": self.fault.target,
                "seconds": round(self.fault.seconds, 2),
                "step": self.step,
                "phase": self.phase,
                "alone": self.alone,
                "step_s": _rounded(self.step_s),
                "ready_s": _rounded(self.ready_s),
                "recovery_s": _rounded(self.recovery_s),
            }
        )


class Record:
    """Appends outages to chaos.jsonl in the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self.outages: list[FaultRecovery] = []

    def add(self, outage: FaultRecovery) -> None:
        """Writes a fault and its recovery to the record."""
        self.outages.append(outage)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(outage.to_json() + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryTally:
    """Count and recovery times of faults, in seconds; `longest_alone_s` is over faults with `alone` set."""

    count: int
    median_s: float | None
    longest_s: float | None
    longest_alone_s: float | None
    hangs: int

    @classmethod
    def of(cls, outages: Sequence[FaultRecovery]) -> RecoveryTally:
        """Sums up the recoveries from faults."""
        times = [outage.recovery_s for outage in outages if outage.recovery_s is not None]
        alone = [o.recovery_s for o in outages if o.alone and o.recovery_s is not None]
        return cls(
            count=len(outages),
            median_s=_rounded(median(times)) if times else None,
            longest_s=_rounded(max(times, default=None)),
            longest_alone_s=_rounded(max(alone, default=None)),
            hangs=len(outages) - len(times),
        )


def by_kind(outages: Sequence[FaultRecovery]) -> dict[str, RecoveryTally]:
    """Returns a tally per kind and kind of target: "kill rollout"."""
    rows: dict[str, list[FaultRecovery]] = {}
    for outage in outages:
        service, _, part = outage.fault.target.partition("/")
        name = f"{outage.fault.kind.value} {part or service.partition('-')[0]}"
        rows.setdefault(name, []).append(outage)
    return {name: RecoveryTally.of(rows[name]) for name in sorted(rows)}


def table(outages: Sequence[FaultRecovery]) -> Table:
    """Makes a table of counts and recovery times by kind of fault and of target."""
    drawn = Table("fault", box=None, pad_edge=False)
    for title in ("times", "median s", "longest s", "alone s", "hangs"):
        drawn.add_column(title, justify="right")
    for name, tally in {**by_kind(outages), "all": RecoveryTally.of(outages)}.items():
        times = (tally.median_s, tally.longest_s, tally.longest_alone_s)
        cells = ("" if seconds is None else f"{seconds:.1f}" for seconds in times)
        drawn.add_row(name, str(tally.count), *cells, str(tally.hangs))
    return drawn


def summary(record: Record, verified: Mapping[str, Mapping[str, int]]) -> dict[str, object]:
    """Returns what chaos.json holds; `verified` are the counts and breaches that `paceline verify` writes."""
    counts, breaches = verified.get("counts", {}), verified.get("breaches", {})
    return {
        "all": asdict(RecoveryTally.of(record.outages)),
        "by_kind": {name: asdict(tally) for name, tally in by_kind(record.outages).items()},
        "rewinds": counts.get("rewinds", 0),
        "recollections": counts.get("re-collections", 0),
        "dropped_groups": counts.get("prompt groups dropped", 0),
        "steps": counts.get("steps finished", 0),
        "rows_trained": counts.get("rows trained", 0),
        "off_policy": breaches.get("I1", 0),
        "lost": breaches.get("I2", 0),
        "twice": breaches.get("I3", 0),
        "other_breaches": sum(n for name, n in breaches.items() if name not in ("I1", "I2", "I3")),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
