"""Views around another one: one records where the run is, one compares the first steps with the estimate."""

from __future__ import annotations

import asyncio

from paceline.show.live.view import Metrics, View
from paceline.sizing.expectation import Expectation

# The phase in which a training step begins.
_FIRST_PHASE = "dispatch"


class WatchedView:
    """Passes everything on to `view`.

    Attributes:
        now_step, now_phase: where the run is.
        finished: the last finished step; -1 before one is.
        trains: whether a training step has begun.
        has_answers: whether a rollout server has answered a prompt.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self.milestone, self.notice, self.pulse = view.milestone, view.notice, view.pulse
        self.validation, self.close = view.validation, view.close
        self.now_step, self.now_phase = 0, "start"
        self.finished, self.trains, self.has_answers = -1, False, False
        self._finished = asyncio.Event()

    async def next_step(self) -> None:
        """Waits until another step is finished; a step repeated after a rewind does not count."""
        await self._finished.wait()

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Notes where the run is."""
        self.now_step, self.now_phase = step, phase
        self.trains = self.trains or phase == _FIRST_PHASE
        self.has_answers = self.has_answers or admitted > 0
        self._view.phase(step=step, phase=phase, admitted=admitted, wanted=wanted)

    def step(self, step: int, metrics: Metrics) -> None:
        """Notes that a step is finished."""
        self.finished = step
        self._finished.set()
        self._finished = asyncio.Event()
        self._view.step(step, metrics)


class ExpectingView:
    """Wraps a view and adds a notice after the first warm steps."""

    def __init__(self, view: View, expectation: Expectation) -> None:
        self._view, self._expectation = view, expectation
        self.milestone, self.phase, self.notice = view.milestone, view.phase, view.notice
        self.pulse, self.close, self.validation = view.pulse, view.close, view.validation

    def step(self, step: int, metrics: Metrics) -> None:
        """Shows a step; after the last of the first warm steps also the comparison."""
        self._view.step(step, metrics)
        if sentence := self._expectation.step(metrics):
            self._view.notice(sentence)
