"""Sends steps to trackers from a separate thread, so that a slow or failing tracker does not slow the run."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.core.errors import DeadlineError
from paceline.service.member.run_directory import read_run_id
from paceline.show.live.view import Metrics, View
from paceline.show.trackers.adapters import TRACKERS
from paceline.show.trackers.base import Row, TrackedRun, Tracker

log = logging.getLogger(__name__)

_LAST_WAIT_S = 60.0
_NUM_SAMPLES = 16
_SAMPLE_COLUMNS = ("prompt", "response", "ground_truth", "reward", "num_response_tokens", "finish_reason")

_Job = Callable[[Tracker], None]


class Sink:
    """The trackers of a run.

    Args:
        say: tells the user that a tracker failed.
        max_waiting: how many jobs may be queued before `step` waits; 0: any number, for runs, which never
            wait.
    """

    def __init__(
        self, names: Sequence[str], run_dir: Path, *, say: Callable[[str], None], max_waiting: int = 0
    ) -> None:
        self._names, self._trackers = names, {name: TRACKERS[name]() for name in names}
        self._run_dir, self._say = run_dir, say
        self._jobs: queue.Queue[_Job | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        self._begun = False

    def step(self, step: int, metrics: Metrics, at: float) -> None:
        """Sends a step that ended at a Unix time; the first one opens the run.

        Raises:
            DeadlineError: `max_waiting` jobs wait, and for a minute no tracker took one.
        """
        if not self._names:
            return
        if not self._begun:
            self._begun = True
            run = tracked_run(self._run_dir)
            self._thread.start()
            self._give(lambda tracker: tracker.begin(run))
        self._send(step, metrics, lambda tracker, finite: tracker.step(step, finite, at))

    def validation(self, step: int, metrics: Metrics, at: float) -> None:
        """Sends a step's validation that arrived at a Unix time, after later steps."""
        if self._begun:
            self._send(step, metrics, lambda tracker, finite: tracker.validation(step, finite, at))

    def _send(self, step: int, metrics: Metrics, give: Callable[[Tracker, Metrics], None]) -> None:
        """Sends numbers, and a validation's samples before them."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        rows = list(validation_samples(self._run_dir, step)) if "timing_s/validate" in metrics else []
        if rows:
            self._give(lambda tracker: tracker.samples(step, rows))
        self._give(lambda tracker: give(tracker, finite))

    def end(self, *, ok: bool) -> None:
        """Closes the run; waits up to a minute for unsent jobs."""
        if not self._begun:
            return
        self._give(lambda tracker: tracker.end(ok=ok))
        self._give(None)
        self._thread.join(_LAST_WAIT_S)
        if self._thread.is_alive():
            self._say(f"trackers: not all was sent within {_LAST_WAIT_S:g} s")

    def _give(self, job: _Job | None) -> None:
        try:
            self._jobs.put(job, timeout=_LAST_WAIT_S)
        except queue.Full:
            raise DeadlineError(
                phase="TRACK",
                peer=f"the trackers ({', '.join(self._names)})",
                seconds=_LAST_WAIT_S,
                hint="they accepted none of the queued steps; check that their server answers",
            ) from None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            for name, tracker in list(self._trackers.items()):
                try:
                    job(tracker)
                except Exception as error:
                    log.exception("%s failed", name)
                    self._say(f"{name} failed and gets nothing more: {type(error).__name__}: {error}")
                    del self._trackers[name]


class TrackingView:
    """A view that also sends each step to a sink."""

    def __init__(self, view: View, sink: Sink) -> None:
        self._view, self._sink = view, sink
        self.milestone, self.phase, self.notice = view.milestone, view.phase, view.notice
        self.pulse, self.close = view.pulse, view.close

    def step(self, step: int, metrics: Metrics) -> None:
        """Shows and sends a step."""
        self._view.step(step, metrics)
        self._sink.step(step, metrics, time.time())

    def validation(self, step: int, metrics: Metrics) -> None:
        """Shows and sends a validation that arrived after later steps."""
        self._view.validation(step, metrics)
        self._sink.validation(step, metrics, time.time())


def tracked_run(run_dir: Path) -> TrackedRun:
    """Returns a directory's run in the form for trackers."""
    config: Mapping[str, Any] = yaml.safe_load((run_dir / "config.resolved.yaml").read_text(encoding="utf-8"))
    # The address of the broker may hold a password.
    shown = {name: section for name, section in config.items() if name != "broker"}
    return TrackedRun(
        run_id=read_run_id(run_dir) or run_dir.name, name=run_dir.name, run_dir=run_dir, config=shown
    )


def validation_samples(run_dir: Path, step: int) -> Iterator[Row]:
    """Returns some samples of a step's validation; none if trajectories are not saved."""
    path = run_dir / "trajectories" / f"val_{step:06d}.parquet"
    if not path.is_file():
        return
    import pyarrow.parquet

    yield from pyarrow.parquet.read_table(path, columns=list(_SAMPLE_COLUMNS)).to_pylist()[:_NUM_SAMPLES]
