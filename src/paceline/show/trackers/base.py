"""The interface of trackers, which receive a run's configuration, metrics and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]

PROJECT = "paceline"
"""The project or experiment of a run, unless the tracker's own variable names one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """Describes a run to trackers; a known id continues that run."""

    run_id: str
    name: str
    run_dir: Path
    config: Mapping[str, Any]


class Tracker(Protocol):
    """A tracker, used from one thread. An exception ends the tracker, not the run."""

    def begin(self, run: TrackedRun) -> None:
        """Opens the run, or continues it."""

    def step(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Takes a step's finite metrics; `at` is the Unix time of its end."""

    def validation(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Takes the metrics of a step's validation, after those of later steps; by default as `step`."""
        self.step(step, metrics, at)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Takes some samples of a validation, each with the same keys."""

    def end(self, *, ok: bool) -> None:
        """Closes the run at the tracker."""
