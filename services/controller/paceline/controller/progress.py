"""State that the controller's parts share: the run's fixed settings (`Run`) and its progress (`Progress`)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from paceline.config.run import RunConfig
from paceline.controller import phases
from paceline.controller.events import EventHub
from paceline.controller.journal import Journal
from paceline.controller.phases import Phase
from paceline.core.policy import PolicyTag
from paceline.storage.folder import Folder
from paceline.storage.places import checkpoints_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run: its configuration, its id, its folder, and where its parts report."""

    config: RunConfig
    id: str
    dir: Path
    journal: Journal
    events: EventHub

    @property
    def checkpoints(self) -> Folder:
        """The folder that holds the checkpoints of the run."""
        return checkpoints_of(self.config, self.dir, self.id)


class Progress:
    """The step, the phase and the policy of a run; read by GetStatus, changed by the sequencer.

    Attributes:
        phase_began: monotonic time at which the phase began.
        admitted, wanted: trajectories of the collection in progress.
        stop_reason: why the run must end after the step in progress; "" if it need not.
        lr_scale: scale of the learning rates from the next step on, as set by a client; None if not set.
    """

    def __init__(self, run: Run, *, step: int = 0) -> None:
        self._run, self.step = run, step
        self.phase, self.phase_began = Phase.STARTING, time.monotonic()
        self.policy: PolicyTag | None = None
        self.admitted = self.wanted = 0
        self.metrics: dict[str, float] = {}
        self.stop_reason = ""
        self.lr_scale: float | None = None

    def move(self, to: Phase) -> None:
        """Journals a phase, then enters it; raises IllegalTransitionError for a move that is not allowed."""
        phase = phases.move(self.phase, to)
        self._run.journal.record("phase", step=self.step, source=self.phase.value, to=phase.value)
        self.phase, self.phase_began = phase, time.monotonic()
        self.admitted = self.wanted = 0
        self._run.events.phase(step=self.step, phase=phase.value)

    def count(self, admitted: int, wanted: int) -> None:
        """Notes how far a collection is."""
        self.admitted, self.wanted = admitted, wanted
        self._run.events.phase(step=self.step, phase=self.phase.value, admitted=admitted, wanted=wanted)
