"""A view that compares the first warm steps with the estimate, once."""

from __future__ import annotations

from paceline.show.live.view import Metrics, View
from paceline.sizing.expectation import Expectation


class ExpectingView:
    """Wraps a view and adds a notice after the first warm steps.

    Args:
        expectation: expectation of the run's steps.
    """

    def __init__(self, view: View, expectation: Expectation) -> None:
        self._view, self._expectation = view, expectation
        self.milestone, self.phase, self.notice = view.milestone, view.phase, view.notice
        self.pulse, self.close, self.validation = view.pulse, view.close, view.validation

    def step(self, step: int, metrics: Metrics) -> None:
        """Shows a step; after the last of the first warm steps also the comparison."""
        self._view.step(step, metrics)
        if sentence := self._expectation.step(metrics):
            self._view.notice(sentence)
