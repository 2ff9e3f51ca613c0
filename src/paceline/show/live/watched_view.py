"""A view that records the run's position and the end of each step."""

from __future__ import annotations

import asyncio

from paceline.show.live.view import Metrics, View

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
        self.now_step, self.now_phase = 0, "start"
        self.finished, self.trains, self.has_answers = -1, False, False
        self._finished = asyncio.Event()

    async def next_step(self) -> None:
        """Waits until another step is finished; a step repeated after a rewind does not count."""
        await self._finished.wait()

    def milestone(self, text: str) -> None:
        """Passes the milestone on to the view."""
        self._view.milestone(text)

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

    def notice(self, text: str) -> None:
        """Passes the notice on to the view."""
        self._view.notice(text)

    def pulse(self) -> None:
        """Passes the pulse on to the view."""
        self._view.pulse()

    def validation(self, step: int, metrics: Metrics) -> None:
        """Passes the validation on to the view."""
        self._view.validation(step, metrics)

    def close(self) -> None:
        """Passes the end on to the view."""
        self._view.close()
